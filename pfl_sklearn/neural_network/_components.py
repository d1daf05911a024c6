"""Mixtures of nets: predictions of several as those of one, and rounds that train them."""

import copy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from skorch import NeuralNet, NeuralNetRegressor
from torch import nn

from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._averaging import Averaging, in_double, running_shares
from pfl_sklearn.neural_network._recipe import initialized, log_probabilities, materialize, twin

_SMALLEST_WEIGHT = 1e-8  # of a component, from which it can come back; 0 would stay 0


class Reading(NamedTuple):
    """How outputs of a net are read: by which criterion, and as classes or responses."""

    criterion_: nn.Module
    is_regressor: bool


class MixtureOfNets(nn.Module):
    """Weighted means of what modules predict, as the criterion of the net takes it.

    Its parameters are the weights (M,), then those of one module after the other; buffers follow.
    """

    def __init__(self, modules: list[nn.Module], reading: Reading) -> None:
        super().__init__()
        first = next(modules[0].parameters())
        self.weights = nn.Parameter(first.new_full((len(modules),), 1 / len(modules)))
        self.components = nn.ModuleList(modules)
        self._reading = reading

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Outputs of rows, as the criterion takes them."""
        outputs = torch.stack([component(X) for component in self.components], dim=-1)
        if self._reading.is_regressor:
            return (outputs * self.weights).sum(dim=-1)
        log_p = log_probabilities(self._reading, outputs.movedim(-1, 0)).movedim(0, -1)
        log_p = torch.logsumexp(log_p + torch.log(self.weights), dim=-1)
        # Log probabilities are logits, too: their softmax is themselves.
        return log_p.exp() if isinstance(self._reading.criterion_, nn.NLLLoss) else log_p


def mixture_of(net: NeuralNet, modules: list[nn.Module]) -> NeuralNet:
    """Net whose module is the mixture of modules like that of a net."""
    mixture = twin(net)
    reading = Reading(net.criterion_, isinstance(net, NeuralNetRegressor))
    mixture.module_ = MixtureOfNets(modules, reading)
    return mixture


def drawn_modules(recipe: NeuralNet, engine: Any, seeds: Any, earlier: Any = None) -> list[Any]:
    """The module of an engine's net and others that the recipe gives from seeds; or earlier ones.

    Raises
    ------
    ValueError
        If they would all be the same.
    """
    if earlier is not None:
        return [copy.deepcopy(module) for module in earlier.components]
    modules, first = [engine.net.module_], list(engine.net.module_.parameters())
    for seed in seeds:
        other = initialized(recipe, seed)
        materialize(other, engine.example, seed)
        if all(map(torch.equal, other.module_.parameters(), first)):
            raise ValueError(
                "the module of the net starts from the same weights every time, so that components "
                "would never differ; give one that draws them, or n_components=1."
            )
        modules.append(other.module_)
    return modules


def fedem(setup: Any, n_components: int) -> Method:
    """The method; the vector of a mixture has its weights first."""
    engine, mixture = setup.engines.component, setup.engines.population
    averaging = Averaging(setup.n_expected, setup.divides_by_count)
    n, p, start = n_components, engine.n_parameters, mixture.start()
    places = places_of(engine, mixture, n)

    def init():
        clients = {"weights": np.full((setup.n_clients, n), 1 / n)}
        return {"global": start, "nets": start[places]}, clients

    def server_update(server, total, t):
        sums = {name: values for name, values in total.items() if name != "weights"}
        moved = averaging.server_update(server, sums, t)
        vector = server["global"].copy()
        vector[places] = moved["nets"]
        # With a bound on messages weights are not sent, and the population's stay equal.
        if "weights" in total:
            vector[:n] = running_shares(vector[:n], total["weights"], setup.n_clients)
        return {"global": vector, "nets": moved["nets"]}

    shapes: dict[str, tuple[int, ...]] = {"nets": (n, p)}
    if setup.divides_by_count:
        shapes["weights"] = (n,)
    return Method(
        init, partial(fedem_update, setup, averaging), server_update, averaging.shapes(**shapes)
    )


def places_of(engine, mixture, n_components):
    """Where the parameters (p,) of each component are among those of the mixture: (M, p)."""
    where = {part.name: part.place for part in mixture.parts}
    order = np.arange(mixture.n_parameters)
    return np.array(
        [
            np.concatenate([order[where[f"components.{c}.{part.name}"]] for part in engine.parts])
            for c in range(n_components)
        ]
    )


def fedem_update(setup, averaging, server, t, batch, clients):
    """What a block's clients changed in every net, and their weights."""

    def local_steps(block):
        models, weights, losses = fedem_steps(setup, server, t, block)
        message = {"nets": np.stack([each.change() for each in models], axis=1)}
        if setup.divides_by_count:
            message["weights"] = weights
        return Update(averaging.message(**message), {"weights": weights}, losses)

    return setup.engines.component.run(local_steps, batch, clients)


def fedem_steps(setup, server, t, block):
    """Nets of a block after their steps, the clients' weights (g, M), and losses before."""
    engine, rate = setup.engines.component, setup.rates[t]
    models = [engine.models(vector, block.n_clients) for vector in server["nets"]]
    weights = models[0].values.new_tensor(np.maximum(block.clients["weights"], _SMALLEST_WEIGHT))
    losses = torch.stack(
        [
            torch.stack([engine.row_losses(model.evaluate(X), y, by=2) for model in models], dim=2)
            for X, y in block.steps()
        ],
        dim=1,
    )
    # The E-step on all rows of the round, before any net moves: shares of rows in the components.
    odds = torch.log(weights)[:, None, None] - losses
    before = -torch.logsumexp(odds - torch.logsumexp(torch.log(weights), 1)[:, None, None, None], 3)
    shares = torch.softmax(odds, dim=3)  # (g, steps, rows, M)
    for k, (X, y) in enumerate(block.steps()):  # M-step: losses of rows, weighted by the shares
        for c, model in enumerate(models):
            values = engine.row_losses(model(X), y, by=2)
            model.step((shares[:, k, :, c] * values).mean(dim=1), rate)
    return models, in_double(shares.mean(dim=(1, 2))), in_double(before[:, 0].mean(dim=1))
