"""The small net that estimators use where none is given."""

from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn


class MLP(nn.Module):
    """Multilayer perceptron: linear layers with rectifiers between them.

    Parameters
    ----------
    n_inputs : int, default=1
        Numbers in a row of features; rows of several axes are flattened. As the module of a recipe,
        leave it out: the estimator sets it from the data.
    n_outputs : int, default=1
        Classes, or responses; set from the data in the same way.
    hidden : int or tuple of int, default=64
        Units of each hidden layer; () is a linear model.

    Examples
    --------
    >>> from pfl_sklearn.neural_network import MLP
    >>> MLP(4, 3, hidden=(8, 8))
    MLP(
      (layers): Sequential(
        (0): Flatten(start_dim=1, end_dim=-1)
        (1): Linear(in_features=4, out_features=8, bias=True)
        (2): ReLU()
        (3): Linear(in_features=8, out_features=8, bias=True)
        (4): ReLU()
        (5): Linear(in_features=8, out_features=3, bias=True)
      )
    )
    """

    def __init__(self, n_inputs=1, n_outputs=1, hidden=64):
        super().__init__()
        layers, width = [nn.Flatten()], n_inputs
        for units in (hidden,) if isinstance(hidden, int) else hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, n_outputs))

    def forward(self, X):
        """Outputs (n_rows, n_outputs) of rows (n_rows, ...)."""
        return self.layers(X)


def default_recipe(is_classifier):
    """Recipe of an estimator that was given none."""
    if is_classifier:
        return NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss, lr=0.1, batch_size=20)
    return NeuralNetRegressor(MLP, lr=0.05, batch_size=20)
