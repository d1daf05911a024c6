"""SCAFFOLD: clients correct their steps for how their gradients differ from all clients'."""

from functools import partial

import numpy as np

from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._base import BaseNeural, backend
from pfl_sklearn.neural_network._engine._averaging import as_float64
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def scaffold(setup):
    """SCAFFOLD as a method: server and clients have mean gradients, their controls."""
    engine, p = setup.engines.client, setup.engines.client.n_parameters

    def init():
        controls = np.zeros((setup.n_clients, p), dtype=engine.array_dtype)
        return {"global": engine.start(), "control": np.zeros(p)}, {"control": controls}

    def server_update(server, total, t):
        averaged = setup.average_into_server(server, total | {"control": 0.0})
        # The control is a mean over all clients, of whom only those who took part sent a change.
        unit = step_length(setup, t, setup.local_work[0] or 1)
        control = server["control"] + mean_gradients(total["control"], unit) / setup.total_weight
        return {**averaged, "control": control}

    update = partial(setup.engines.update, partial(scaffold_steps, setup))
    shapes = setup.shapes(**{"global": (p,), "control": (p,)})
    return Method(init, update, server_update, shapes)


def step_length(setup, t, n_steps):
    """Length of so many steps in round t along a gradient of length 1."""
    return setup.rates[t] * n_steps


def mean_gradients(change, path):
    """Mean gradients whose steps change a network so; none if the learning rate was 0."""
    return change / path if path else np.zeros_like(change)


def scaffold_steps(setup, server, t, block):
    """What the clients of a block changed in the global network and in their controls."""
    engine, rate = setup.engines.client, setup.rates[t]
    controls, first_losses = block.clients["control"], None
    models = engine.models(server["global"], block.n_clients)
    corrections = models.parts((server["control"] - controls).astype(controls.dtype))
    for X, y in block.steps():
        outputs = models(X)
        first_losses = models.losses(outputs, y).detach() if first_losses is None else first_losses
        models.learn(outputs, y, rate)
        for values, correction in zip(models.tensors, corrections, strict=True):
            values.sub_(correction, alpha=rate)
    change = models.change()
    # In units of the network's change, so that one clipping bound is for both parts.
    n_steps = block.X.shape[1]
    path = step_length(setup, t, n_steps)
    control_change = -change - (path * server["control"]).astype(controls.dtype)
    control_change[:, engine.n_trained :] = 0.0  # buffers have no gradient
    clients = {"control": controls + mean_gradients(control_change, path).astype(controls.dtype)}
    if not setup.local_work[0]:  # clients differ in their steps, of which the server knows nothing
        control_change /= n_steps
    message = setup.message(**{"global": change, "control": control_change})
    return Update(message, clients, as_float64(first_losses))


@with_parameters
class _Scaffold:
    r"""SCAFFOLD: a global network whose steps are corrected for the drift of clients.

    Clients whose rows differ pull the network of FedAvg apart in every round. Here each step adds
    the difference between all clients' mean gradient and the client's own one.

    See Also
    --------
    FedAvg%(kind)s : the same without corrections.
    Ditto%(kind)s : a network for each client, pulled towards the global one.

    Notes
    -----
    Algorithm 1 of Karimireddy et al. (2020) with option II and a server's learning rate of 1,
    unless `server_optimizer` has another step of the network. A sampled client steps along :math:`g
    - c_i + c`, where the controls :math:`c_i` and c start at 0. After K steps from x to y at rate
    :math:`\eta` it sets :math:`c_i \leftarrow c_i - c + (x - y) / (K \eta)` and sends the changes
    of both, that of :math:`c_i` times :math:`K \eta` (with `local_epochs` times :math:`\eta`), so
    that one `clip_norm` is for both. The server moves c by the sum over the number of all clients,
    or over their total weight. Weight decay is part of the gradients, and momentum is refused. All
    clients get the global network. With noise the network and c are clipped together, as one
    vector, and get noise once.

    Memory: one vector of parameters for each client; a round needs five for each client of a
    block, and four messages for each sampled client.

    References
    ----------
    Karimireddy, S. P., Kale, S., Mohri, M., Reddi, S. J., Stich, S. U. and Suresh, A. T. (2020).
    SCAFFOLD: stochastic controlled averaging for federated learning. ICML.
    """

    _released_names = (*BaseNeural._released_names, "the clients' mean gradient of every round")
    _own_steps = True

    def _check_for_method(self, recipe):
        backend().checks.check_options(recipe, "no momentum")

    def _method(self, setup):
        return scaffold(setup)


@with_parameters
class ScaffoldClassifier(NeuralClassifierMixin, _Scaffold, BaseNeural):
    """Classification by SCAFFOLD: a global network whose steps are corrected for clients' drift.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import ScaffoldClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = ScaffoldClassifier(n_rounds=20, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class ScaffoldRegressor(NeuralRegressorMixin, _Scaffold, BaseNeural):
    """Regression by SCAFFOLD: a global network whose steps are corrected for clients' drift."""
