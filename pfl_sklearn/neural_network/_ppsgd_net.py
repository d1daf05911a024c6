"""PPSGD on nets: a common representation, and heads that are sums of a common and an own one."""

import math
from functools import partial
from numbers import Real

import numpy as np

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.linear_model._ppsgd._updates import alpha_of, step_sizes
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import in_double
from pfl_sklearn.neural_network._engine._personal_layers import (
    KeepsLayers,
    averaged_part,
    own_layers,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def ppsgd_net(setup, alpha, head):
    """PPSGD as a method, where `head` (p,) says which parameters belong to the head."""
    engine, n_expected = setup.engines.client, setup.n_expected
    # In units of the net's learning rate, which may follow a scheduler.
    steps = step_sizes(alpha_of(alpha, n_expected), 1.0, n_expected)
    sends_head = steps.population or head.all()  # without one as PPSGDClassifier, if all is head
    shared = np.ones_like(head) if sends_head else ~head
    server_update, shapes = averaged_part(setup, shared)

    def init():
        # At zero, so that clients start from the common head, which those get that fit never sees.
        own = np.zeros((setup.n_clients, int(head.sum())), dtype=engine.array_dtype)
        return {"global": engine.start(), "is_own": head}, {"deviation": own}

    update = partial(setup.engines.update, partial(ppsgd_update, setup, steps, head, shared))
    return Method(init, update, server_update, shapes)


def ppsgd_update(setup, steps, head, shared, server, t, block):
    """What a block's clients changed in the representation and the common head, and their own."""
    own = block.clients["deviation"]
    models, losses = ppsgd_steps(setup, steps, head, with_deviation(server, own), t, block)
    change = models.change()
    # What the head moved is shared out between the two as their steps are; both see one gradient.
    moved = change[:, head] * (1 / (steps.population + steps.local))
    change[:, head] = steps.population * moved
    kept = {"deviation": own + (steps.local * moved).astype(own.dtype)}
    return Update(setup.message(shared=change[:, shared]), kept, losses)


def ppsgd_steps(setup, steps, head, start, t, block):
    """Nets of a block after their steps, the heads' by both steps together, and first losses."""
    models, first = setup.engines.client.models(start, block.n_clients), None
    # A head is a sum, so its step is the sum of the steps of the common and the own one.
    factors = models.parts(np.where(head, steps.population + steps.local, 1.0))
    for X, y in block.steps():
        before, outputs = models.copies(), models(X)
        first = models.losses(outputs, y).detach() if first is None else first
        models.learn(outputs, y, setup.rates[t])
        for values, old, factor in zip(models.tensors, before, factors, strict=True):
            values.copy_(old + factor * (values - old))
    return models, in_double(first)


def with_deviation(server, deviation):
    """Nets (g, p) of clients whose heads deviate from the common one."""
    nets = np.tile(server["global"].astype(deviation.dtype), (len(deviation), 1))
    nets[:, server["is_own"]] += deviation
    return nets


@with_parameters
class _PPSGDNet(KeepsLayers):
    r"""PPSGD on nets: a common representation, and heads that are sums of a common and an own one.

    A client's head is the sum of a common one and one of its own.

    See Also
    --------
    PPSGD%(kind)s : the same for linear models.

    Notes
    -----
    The model of Figure 1d of Bietti et al. (2022): client i has the head :math:`w + \theta_i`
    on a representation W that is common. In every round a sampled client steps along the
    gradient of its net: with :math:`\theta_i`, which it keeps, and with its copies of w and W,
    whose change it sends. For one step a round this is Algorithm 3 of the paper, for nets. The
    larger of the steps of w and :math:`\theta_i` is the ``lr`` of the net, as in
    :class:`~pfl_sklearn.PPSGDClassifier`, and so is the step of W, whatever `alpha` is. W and w
    are clipped together and get noise once; :math:`\theta_i` is neither clipped nor sent. Own
    heads start at zero, so clients that ``fit`` did not see get the common one. With noise
    `clip_norm` is needed: how far a net has to move depends on its layers, so that no step fits all
    messages of length one, as those of PPSGD%(kind)s are.

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
                Ratio of the step of the common head to that of the clients' own heads, divided by
                the number of clients expected in a round. With 0 heads are the clients' alone, and
                the common one, which new clients get, stays as it was drawn, unless the head is the
                whole net, where noise moves it; with inf there is the common one alone, which is
                FedAvg. "auto" is 30 over that number.
            """,
    )
    personal_layers = parameter(
        text="""
            "last" or sequence of str
                Modules or parameters of the net, by name, that make the head, such as
                ``["layers.4", "last"]``. "last" is the ``torch.nn.Linear`` that gives the logits.
            """,
    )
    _own_steps = True

    _equal_clients = "whose alpha is a ratio for clients that count equally"
    _plain_server = "whose alpha sets the server's steps"

    def _method(self, setup):
        return ppsgd_net(setup, self.alpha, own_layers(setup, self.personal_layers))

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
