"""PPSGD on networks: a common representation, and heads that are a common one plus a client's."""

import math
from functools import partial
from numbers import Real

import numpy as np

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn._rounds.step_sizes import alpha_of, step_sizes
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import as_float64
from pfl_sklearn.neural_network._engine._personal_layers import (
    KeepsLayers,
    personal_layer_mask,
    shared_part_update,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def ppsgd_net(setup, alpha, head, representation_step):
    """PPSGD as a method, where `head` (p,) says which parameters belong to the head."""
    engine, n_expected = setup.engines.client, setup.n_expected
    # In units of the network's learning rate, which may follow a scheduler.
    steps = step_sizes(alpha_of(alpha, n_expected), 1.0, n_expected)
    representation = steps.population if representation_step == "common_head" else 1.0
    # A head is a sum, so its step is the sum of the steps of the common and the own one.
    factors = np.where(head, steps.population + steps.local, representation)
    factors[engine.n_trained :] = 1.0  # running statistics are averages of rows and no steps
    if representation == 0 and not head[engine.n_trained :].all():
        raise ValueError(
            "with alpha=0 nothing is sent, and the running statistics of the net's module would "
            "stay as they start; give alpha above 0, or representation_step='lr'."
        )
    sends_head = steps.population or head.all()  # without one as PPSGDClassifier, if all is head
    shared = np.ones_like(head) if sends_head else ~head
    server_update, shapes = shared_part_update(setup, shared)

    def init():
        # At zero, so that clients start from the common head, which those get that fit never sees.
        deviations = np.zeros((setup.n_clients, int(head.sum())), dtype=engine.array_dtype)
        return {"global": engine.start(), "is_own": head}, {"deviation": deviations}

    client_update = partial(ppsgd_update, setup, steps, head, shared, factors)
    return Method(init, partial(setup.engines.update, client_update), server_update, shapes)


def ppsgd_update(setup, steps, head, shared, factors, server, t, block):
    """What a block's clients changed in the representation and the common head, and their own."""
    deviations = block.clients["deviation"]
    models, losses = ppsgd_steps(setup, factors, with_deviation(server, deviations), t, block)
    change = models.change()
    # What the head moved is shared out between the two as their steps are; both see one gradient.
    descent = change[:, head] * (1 / (steps.population + steps.local))
    change[:, head] = steps.population * descent
    clients = {"deviation": deviations + (steps.local * descent).astype(deviations.dtype)}
    return Update(setup.message(shared=change[:, shared]), clients, losses)


def ppsgd_steps(setup, factors, start, t, block):
    """Networks of a block after steps of the rate times `factors` (p,), and first losses."""
    models, first = setup.engines.client.models(start, block.n_clients), None
    factors = models.parts(factors)
    for X, y in block.steps():
        before, outputs = models.copies(), models(X)
        first = models.losses(outputs, y).detach() if first is None else first
        models.learn(outputs, y, setup.rates[t])
        for values, old, factor in zip(models.tensors, before, factors, strict=True):
            values.copy_(old + factor * (values - old))
    return models, as_float64(first)


def with_deviation(server, deviation):
    """Networks (g, p) of clients whose heads deviate from the common one."""
    nets = np.tile(server["global"].astype(deviation.dtype), (len(deviation), 1))
    nets[:, server["is_own"]] += deviation
    return nets


@with_parameters
class _PPSGDNet(KeepsLayers):
    r"""PPSGD on networks: a common representation, and heads that are a common one plus a client's.

    A client's head is the sum of a common one and one of its own.

    See Also
    --------
    PPSGD%(kind)s : the same for linear models.

    Notes
    -----
    The model of Figure 1d of Bietti et al. (2022): client i has the head :math:`w + \theta_i` on a
    representation W that is common. A sampled client steps along the gradient of its network: with
    :math:`\theta_i`, which it keeps, and with its copies of w and W, whose change it sends. For one
    step a round this is Algorithm 3 of the paper, whose global parameters are w and W together:
    both take steps of alpha :math:`\eta`, :math:`\theta_i` of :math:`\eta / (q N)`. The larger of
    the two is the ``lr`` of the network. W and w are clipped together and get noise once;
    :math:`\theta_i` is neither clipped nor sent. The bound is on the change, where the paper's is
    on the gradient, and `clip_norm` is needed with noise: unlike in PPSGD%(kind)s, no step fits all
    messages of length one. Own heads start at zero, so unseen clients get the common one.

    Memory: one vector of parameters for each client; a round needs five for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, S. (2022). Personalization improves
    privacy-accuracy tradeoffs in federated learning. ICML.
    """

    alpha: float | str = parameter(
        default="auto",
        ranges=[Interval(Real, 0, math.inf, closed="both"), StrOptions({"auto"})],
        text="""
            float in [0, inf] or "auto"
                Ratio of the step of the common parameters to that of the clients' own heads,
                divided by the number of clients expected in a round. With 0 nothing is sent unless
                `representation_step` is "lr"; with inf there is the common network alone, which is
                FedAvg. "auto" is 30 over that number.
            """,
    )
    representation_step: str = parameter(
        default="common_head",
        ranges=[StrOptions({"common_head", "lr"})],
        text="""
            {"common_head", "lr"}
                Step of the representation: that of the common head, as published, or always the
                ``lr`` of the network. They differ where `alpha` times the number of clients
                expected in a round is below 1. With "lr" and an `alpha` of 0 it is FedPer's.
            """,
    )
    personal_layers = parameter(
        text="""
            "last" or sequence of str
                Modules or parameters of the network, by name, that make the head, such as
                ``["layers.4", "last"]``. "last" is the ``torch.nn.Linear`` that gives the logits.
            """,
    )
    _own_steps = True
    _clients_keep = "other"

    @property
    def _communicates(self):
        # With alpha=0 nothing common takes steps, so nothing leaves the clients.
        moves = isinstance(self.alpha, str) or self.alpha > 0
        return moves or self.representation_step == "lr"

    _equal_clients = "whose alpha is a ratio for clients that count equally"
    _plain_server = "whose alpha sets the server's steps"

    def _method(self, setup):
        head = personal_layer_mask(setup, self.personal_layers)
        return ppsgd_net(setup, self.alpha, head, self.representation_step)

    @staticmethod
    def _nets(server, clients):
        return with_deviation(server, clients["deviation"])


@with_parameters
class PPSGDNetClassifier(NeuralClassifierMixin, _PPSGDNet, BaseNeural):
    r"""Classification by PPSGD: a common representation and additive heads.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import PPSGDNetClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = PPSGDNetClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class PPSGDNetRegressor(NeuralRegressorMixin, _PPSGDNet, BaseNeural):
    """Regression by PPSGD: a common representation and additive heads."""
