"""FedEM: clients mix the predictions of several global networks, each in its own proportions."""

from functools import partial

import numpy as np

from pfl_sklearn._parameters import AT_LEAST_ONE, parameter, with_parameters
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn.neural_network._base import BaseNeural, backend
from pfl_sklearn.neural_network._engine._averaging import (
    Engines,
    as_float64,
    n_components_for,
    running_shares,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin

_SMALLEST_COMPONENT_WEIGHT = 1e-8  # of a component, from which it can come back; 0 would stay 0


def fedem(setup, n_components):
    """FedEM as a method, where the parameters of a mixture start with its weights."""
    engine, mixture = setup.engines.component, setup.engines.population
    n, start = n_components, mixture.start()
    places = component_places(engine, mixture, n)

    def init():
        clients = {"weights": np.full((setup.n_clients, n), 1 / n)}
        return {"global": start, "nets": start[places]}, clients

    def server_update(server, total, t):
        sums = {name: values for name, values in total.items() if name != "weights"}
        averaged = setup.average_into_server(server, sums, part="nets", n_trained=engine.n_trained)
        vector = server["global"].copy()
        vector[places] = averaged["nets"]
        # With a bound on messages weights are not sent, and the population's stay equal.
        if "weights" in total:
            vector[:n] = running_shares(vector[:n], total["weights"], setup.total_weight)
        return {**averaged, "global": vector}

    shapes = setup.shapes(nets=(n, engine.n_parameters))
    if setup.by_count:
        shapes["weights"] = (n,)
    return Method(
        init, partial(setup.engines.update, partial(fedem_update, setup)), server_update, shapes
    )


def component_places(engine, mixture, n_components):
    """Where the parameters (p,) of each component are among those of the mixture: (M, p)."""
    where = {part.name: part.place for part in mixture.parts}
    order = np.arange(mixture.n_parameters)
    return np.array(
        [
            np.concatenate([order[where[f"components.{c}.{part.name}"]] for part in engine.parts])
            for c in range(n_components)
        ]
    )


def fedem_update(setup, server, t, block):
    """What a block's clients changed in every network, and their weights."""
    models, weights, losses = fedem_steps(setup, server, t, block)
    message = {"nets": np.stack([model.change() for model in models], axis=1)}
    if setup.by_count:
        message["weights"] = weights
    return Update(setup.message(**message), {"weights": weights}, losses)


def fedem_steps(setup, server, t, block):
    """Networks of a block after their steps, the clients' weights (g, M), and losses before."""
    import torch

    engine, rate = setup.engines.component, setup.rates[t]
    # Clients keep their weights alone; the networks are the server's in every round.
    models = [engine.models(vector, block.n_clients) for vector in server["nets"]]
    weights = models[0].values.new_tensor(
        np.maximum(block.clients["weights"], _SMALLEST_COMPONENT_WEIGHT)
    )
    losses = torch.stack(
        [
            torch.stack([engine.row_losses(model.evaluate(X), y, by=2) for model in models], dim=2)
            for X, y in block.steps()
        ],
        dim=1,
    )
    # The E-step on all rows of the round, before any network moves: shares of rows in the
    # components.
    odds = torch.log(weights)[:, None, None] - losses
    before = -torch.logsumexp(odds - torch.logsumexp(torch.log(weights), 1)[:, None, None, None], 3)
    shares = torch.softmax(odds, dim=3)  # (g, steps, rows, M)
    for k, (X, y) in enumerate(block.steps()):  # M-step: losses of rows, weighted by the shares
        for c, model in enumerate(models):
            values = engine.row_losses(model(X), y, by=2)
            model.step((shares[:, k, :, c] * values).mean(dim=1), rate)
    return models, as_float64(shares.mean(dim=(1, 2))), as_float64(before[:, 0].mean(dim=1))


@with_parameters
class _FedEM:
    r"""FedEM: clients mix the predictions of several global networks, each in its own proportions.

    Clients differ in the weights of the networks.

    Attributes
    ----------
    responsibilities_ : ndarray of shape (n_clients, n_components)
        Weight of each network in each client's mixture.

    See Also
    --------
    FedAvg%(kind)s : the same with one network.

    Notes
    -----
    Algorithm 1 of Marfoq et al. (2021), with steps on batches. In every round a sampled client
    finds how well each network explains its rows, :math:`q_{jc} \propto \pi_{ic} \exp(-\ell_c(j))`
    for the rows j of the round's batches (the paper takes all rows of a client), and sets its
    weights to their means, :math:`\pi_{ic} = \mathrm{mean}_j \, q_{jc}`. Then it takes the steps of
    FedAvg with each network, in which row j has the weight :math:`q_{jc}`, and sends what changed
    in all of them.

    The criterion :math:`\ell_c` has to be a mean over rows (``CrossEntropyLoss``, ``NLLLoss``,
    ``MSELoss`` or ``L1Loss`` without class weights); squared errors mean a variance of 1/2, so
    bring responses to standard units. The module must be a class rather than an instance, since its
    components are drawn one by one. A client predicts with the weighted mean of the networks'
    probabilities, or of their responses. An unseen client gets a running average of the clients'
    weights, in which a round of a tenth of the clients counts a tenth; with `clip_norm` it gets
    equal ones, since weights are not released. With noise all networks are clipped together, as one
    vector, and get noise once. A vector of parameters has the weights first, then the parameters of
    one network after the other, then buffers.

    Memory: one such vector for each client; a round needs two for each client of a block, and two
    messages of the size of all networks for each sampled client.

    References
    ----------
    Marfoq, O., Neglia, G., Bellet, A., Kameni, L. and Vidal, R. (2021). Federated multi-task
    learning under a mixture of distributions. NeurIPS.
    """

    n_components: int | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int >= 1 or None
                Number of networks that clients mix, at most the number of clients. With 1 this is
                FedAvg. None: 2, but 1 for a single client, and as many as before if the rounds go
                on.
            """,
    )
    _clients_keep = "other"
    _client_results = {"responsibilities_": "weights"}

    def _check_for_method(self, recipe):
        backend().checks.check_losses_of_rows(recipe)
        # One component need not differ from others; None may come to stand for two.
        if self.n_components != 1:
            backend().checks.check_options(recipe, "draws")

    def _make_engines(self, table, plan):
        recipes = backend().recipe
        from pfl_sklearn.neural_network._engine._components import drawn_modules, mixture_of

        earlier = plan.earlier
        before = None if earlier is None else earlier.layout
        n_components = self._n_components_for(len(plan.clients.ids), earlier and earlier.state)
        seeds = np.random.default_rng(plan.setup_seed).integers(1 << 63, size=n_components).tolist()
        looks, recipe = not is_private(self), self._recipe()  # type: ignore[attr-defined]
        batch_size = self._batch_size  # type: ignore[attr-defined]
        earlier_part = None if before is None else before.component
        make = self._make_engine  # type: ignore[attr-defined]
        part = make(recipe, table, earlier_part, seeds[0], looks)
        recipe = recipes.fill_recipe(recipe, table, looks)
        modules = None if before is None else before.client.net.module_
        net = mixture_of(part.net, drawn_modules(recipe, part, seeds[1:], modules))
        mixture = backend().engine.Engine(net, part.example, batch_size, part.protected)
        mixture.columns = part.columns
        mixture.try_out()
        return Engines(mixture, mixture, part)

    def _n_components_for(self, n_clients, before):
        n_before = None if before is None else len(before.server["nets"])
        return n_components_for(self.n_components, n_clients, n_before)

    def _method(self, setup):
        return fedem(setup, self._n_components_for(setup.n_clients, setup.before))

    @staticmethod
    def _nets(server, clients):
        weights = clients["weights"]
        nets = np.tile(server["global"], (len(weights), 1))
        nets[:, : weights.shape[1]] = weights
        return nets


@with_parameters
class FedEMClassifier(NeuralClassifierMixin, _FedEM, BaseNeural):
    r"""Classification by FedEM: every client mixes several global networks.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import FedEMClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = FedEMClassifier(n_rounds=20, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class FedEMRegressor(NeuralRegressorMixin, _FedEM, BaseNeural):
    """Regression by FedEM: every client mixes several global networks."""
