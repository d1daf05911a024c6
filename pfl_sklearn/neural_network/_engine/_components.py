"""Mixtures of networks: predictions of several as those of one."""

import copy
from typing import Any

import torch
from skorch import NeuralNet, NeuralNetRegressor
from torch import nn

from pfl_sklearn.neural_network._engine._probe import materialize
from pfl_sklearn.neural_network._engine._recipe import initialized, log_probabilities, twin


class MixtureOfNets(nn.Module):
    """Weighted means of what modules predict, as the criterion of the network takes it.

    Its parameters are the weights (M,), then those of one module after the other; buffers follow.
    """

    def __init__(self, modules: list[nn.Module], criterion: nn.Module, regresses: bool) -> None:
        super().__init__()
        first = next(modules[0].parameters())
        self.weights = nn.Parameter(first.new_full((len(modules),), 1 / len(modules)))
        self.components = nn.ModuleList(modules)
        # In a tuple: torch would take the criterion alone for one more module of the mixture.
        self._reading = criterion, regresses

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Outputs of rows, as the criterion takes them."""
        outputs = torch.stack([component(X) for component in self.components], dim=-1)
        criterion, regresses = self._reading
        if regresses:
            return (outputs * self.weights).sum(dim=-1)
        log_p = log_probabilities(criterion, outputs.movedim(-1, 0)).movedim(0, -1)
        log_p = torch.logsumexp(log_p + torch.log(self.weights), dim=-1)
        # Log probabilities are logits, too: their softmax is themselves.
        return log_p.exp() if isinstance(criterion, nn.NLLLoss) else log_p


def mixture_of(net: NeuralNet, modules: list[nn.Module]) -> NeuralNet:
    """Copy of a network that has a mixture of modules like its own."""
    mixture = twin(net)
    regresses = isinstance(net, NeuralNetRegressor)
    mixture.module_ = MixtureOfNets(modules, net.criterion_, regresses)
    return mixture


def drawn_modules(recipe: NeuralNet, engine: Any, seeds: Any, earlier: Any = None) -> list[Any]:
    """Modules of components: the engine's and others drawn from seeds, or those before.

    Raises ValueError if they would all be the same.
    """
    if earlier is not None:
        # Copies: if these rounds fail, the earlier ones are as they were.
        return [copy.deepcopy(module) for module in earlier.components]
    modules, first = [engine.net.module_], list(engine.net.module_.parameters())
    for seed in seeds:
        other = initialized(recipe, seed)
        materialize(other, engine.example, seed)
        # Equal networks get equal shares of every row, and would stay equal in all rounds.
        if all(map(torch.equal, other.module_.parameters(), first)):
            raise ValueError(
                "the module of the net starts from the same weights every time, so that components "
                "would never differ; give one that draws them, or n_components=1."
            )
        modules.append(other.module_)
    return modules
