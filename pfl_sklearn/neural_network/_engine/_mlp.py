"""The small network that estimators use where none is given."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral

import numpy as np
import torch
from skorch import NeuralNet, NeuralNetClassifier, NeuralNetRegressor
from torch import nn


class Units(nn.Module):
    """What rows (n, d) are in: standard units while the net is trained, their own afterwards."""

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, center: Sequence[float], scale: Sequence[float]) -> None:
        super().__init__()
        # In double precision, or a large centre would cost the features their digits.
        self.register_buffer("center", torch.tensor(center, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def standardized(self, values: np.ndarray) -> np.ndarray:
        """Array (n, ...) in standard units."""
        flat = values.reshape(len(values), -1)
        flat = (flat - self.center.numpy(force=True)) / self.scale.numpy(force=True)
        return flat.reshape(values.shape)


def evaluate(module: nn.Module) -> None:
    """Put a module in evaluation mode, but for units: rows stay in those of training."""
    module.eval()
    for layer in module.modules():
        if isinstance(layer, Units):
            layer.train()


class Standardized(Units):
    """Inputs, brought to standard units."""

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Inputs in standard units."""
        return X if self.training else ((X - self.center) / self.scale).to(X.dtype)


class Unstandardized(Units):
    """Outputs, brought back from standard units."""

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Outputs in the units of the mode."""
        return X if self.training else X * self.scale + self.center


class MLP(nn.Module):
    """Multilayer perceptron: linear layers with rectifiers between them.

    Parameters
    ----------
    n_inputs : int, default=1
        Numbers in a row of features; rows of several axes are flattened.
    n_outputs : int, default=1
        Classes, or responses.
    hidden : int or tuple of int, default=64
        Units of each hidden layer; () is a linear model.
    center, scale : sequence of float of shape (n_inputs,), default=None
        Features less the centre, over the scale, are in standard units. None: as they are.
    output_center, output_scale : sequence of float of shape (n_outputs,), default=None
        The same for the responses.

    Notes
    -----
    As the module of a recipe, leave out what the estimator is to take from the data: the numbers of
    inputs and outputs and, in a fit without noise, means and standard deviations of features and
    responses. With noise the data are not used for this, so
    scale features by constants of your own. In training mode the network is
    in standard units; only in evaluation mode does it take rows and give responses as they are.

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

    def __init__(
        self,
        n_inputs: int = 1,
        n_outputs: int = 1,
        hidden: int | Sequence[int] = 64,
        center: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        output_center: Sequence[float] | None = None,
        output_scale: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        hidden = (hidden,) if isinstance(hidden, int | Integral) else hidden
        widths = [n_inputs, *map(int, hidden)]
        # Numbers name the layers whether or not there are units, so that parameters' names are the
        # same with noise and without.
        layers: OrderedDict[str, nn.Module] = OrderedDict({"0": nn.Flatten()})
        if center is not None or scale is not None:
            layers["inputs"] = Standardized(center or [0.0] * n_inputs, scale or [1.0] * n_inputs)
        for k, (before, after) in enumerate(pairwise(widths)):
            layers |= {f"{2 * k + 1}": nn.Linear(before, after), f"{2 * k + 2}": nn.ReLU()}
        layers[f"{2 * len(widths) - 1}"] = nn.Linear(widths[-1], n_outputs)
        if output_center is not None or output_scale is not None:
            center = output_center or [0.0] * n_outputs
            layers["outputs"] = Unstandardized(center, output_scale or [1.0] * n_outputs)
        self.layers = nn.Sequential(layers)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Outputs (n_rows, n_outputs) of rows (n_rows, ...)."""
        return self.layers(X)

    @property
    def input_units(self) -> Units | None:
        """Units that features are brought to before the network is trained on them, if any are."""
        return self._units(Standardized)

    def standardized_outputs(self, y: np.ndarray) -> np.ndarray:
        """Responses, an array (n_rows, n_outputs), as the network is trained on them."""
        units = self._units(Unstandardized)
        return y if units is None else units.standardized(y)

    def _units(self, kind):
        return next((layer for layer in self.layers if isinstance(layer, kind)), None)


def default_recipe(is_classifier: bool) -> NeuralNet:
    """Recipe of an estimator that was given none."""
    if is_classifier:
        return NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss, lr=0.1, batch_size=20)
    return NeuralNetRegressor(MLP, lr=0.02, batch_size=20)
