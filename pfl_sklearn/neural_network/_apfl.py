"""APFL: every client mixes a network of its own with the global one."""

from functools import partial

import numpy as np

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import FROM_0_TO_1, parameter, with_parameters
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import (
    as_float64,
    averaging_method,
    personal_or_global,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin

_FIRST_SHARE = 0.5  # share of the own network where it is to adapt


def apfl_steps(setup, adaptive, server, t, block):
    """Global networks of a block after their steps, what clients keep, and losses of mixtures."""
    engine, rate, first = setup.engines.client, setup.rates[t], None
    shared, mixed = (engine.models(server["global"], block.n_clients) for _ in range(2))
    personal = engine.models(block.personal, block.n_clients)
    share = shared.values.new_tensor(block.clients["mixing"])
    for X, y in block.steps():
        set_interpolation(mixed.tensors, personal.tensors, shared.tensors, share)
        before, outputs = mixed.copies(), mixed(X)
        losses = mixed.losses(outputs, y).detach()
        mixed.learn(outputs, y, rate)
        changes = [after - start for after, start in zip(mixed.tensors, before, strict=True)]
        better = share
        if adaptive and first is None:
            # Once a round, from the first batch, before either network has moved.
            better = step_mixing(share, personal.tensors, shared.tensors, changes)
        first = losses if first is None else first
        for values, change in zip(personal.tensors, changes, strict=True):
            # The mixture's slope along the own network is the share times that along the mixture.
            values.add_(per_client(share, change) * change)
        share = better
        shared.learn(shared(X), y, rate)
    # Rows went through the mixture alone, so running statistics are its own.
    personal.take_buffers(mixed)
    shares = as_float64(share) if adaptive else block.clients["mixing"]
    return shared, {"personal": personal.array(), "mixing": shares}, as_float64(first)


def set_interpolation(mixed, personal, shared, share):
    """Set tensors to mixtures (g, ...) of the clients' own and shared ones."""
    for values, one, other in zip(mixed, personal, shared, strict=True):
        weight = per_client(share, values)
        values.copy_(weight * one + (1 - weight) * other)


def interpolated_nets(server, clients):
    """Networks (g, p) of clients. What they keep of buffers is the mixture's already."""
    personal, share = clients["personal"], clients["mixing"][:, None]
    shared, weight = server["global"].astype(personal.dtype), share.astype(personal.dtype)
    nets = weight * personal + (1 - weight) * shared
    # Statistics of a mixture are no mixture of statistics; with a share of 0 they are the global
    # ones.
    if server["is_buffer"].any():
        nets = np.where(server["is_buffer"] & (share > 0), personal, nets)
    return personal_or_global(server, {**clients, "personal": nets})


def step_mixing(share, personal, shared, changes):
    """Shares (g,) after a gradient step, of which `changes` are the mixture's; they stay in [0, 1].

    The mixture's change is minus the rate times its gradient, the slope of which along the share is
    personal less shared.
    """
    for one, other, change in zip(personal, shared, changes, strict=True):
        share = share + ((one - other) * change).flatten(1).sum(dim=1)
    # Outside, the mixture would be no mean of two networks any more.
    return share.clamp(0, 1)


def per_client(share, tensor):
    """Shares (g,) reshaped to multiply a tensor (g, ...)."""
    return share.view(-1, *(1,) * (tensor.ndim - 1))


@with_parameters
class _APFL:
    r"""APFL: every client mixes a network of its own with the global one.

    Every client predicts with a weighted mean of the parameters of both.

    Attributes
    ----------
    mixing_ : ndarray of shape (n_clients,)
        Share of each client's own network in its mixture.

    See Also
    --------
    Ditto%(kind)s : networks that are pulled towards the global one.

    Notes
    -----
    Algorithm 1 of Deng et al. (2020), with all sampled clients synchronizing after `local_steps`
    steps. A sampled client trains its copy w of the global network as in FedAvg, and also a network
    v of its own by the gradient of the mixture's loss: :math:`v \leftarrow v - \eta \alpha \nabla
    f(\alpha v + (1 - \alpha) w)`. It predicts with the mixture of v and the latest global network.
    A personal network starts as the global one does. A client that never took part has the global
    network, and one that comes later starts from it. Running statistics are those of the mixture,
    through which the rows went. An adaptive share takes one gradient step a round, within [0, 1],
    with the rate of the network. Noise is added to the global network alone, as in FedAvg.

    Memory: one vector of parameters for each client; a round needs eight for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Deng, Y., Kamani, M. M. and Mahdavi, M. (2020). Adaptive personalized federated learning.
    arXiv 2003.13461.
    """

    mixing: float | str = parameter(
        default=0.5,
        ranges=[FROM_0_TO_1, StrOptions({"adaptive"})],
        text="""
            float in [0, 1] or "adaptive"
                Share of a client's own network in its mixture with the global one. With 0 all
                clients have the global network, with 1 each trains alone. "adaptive" starts from
                0.5 and moves every client's share along the gradient, once a round.
            """,
    )
    _clients_keep = "net"
    _client_results = {"mixing_": "mixing"}

    def _method(self, setup):
        adaptive, before = self.mixing == "adaptive", setup.before
        mixing = None if before is None else before.clients.get("mixing")
        if mixing is not None and not adaptive and np.any(mixing != self.mixing):
            raise ValueError(
                f"mixing={self.mixing!r} is not that of the rounds before, which these rounds "
                "continue; fit anew."
            )
        shares = np.full(setup.n_clients, _FIRST_SHARE if adaptive else float(self.mixing))
        steps, engine = partial(apfl_steps, setup, adaptive), setup.engines.client
        constants = {"is_buffer": np.arange(engine.n_parameters) >= engine.n_trained}
        return averaging_method(setup, steps, {"mixing": shares}, constants=constants)

    _nets = staticmethod(interpolated_nets)


@with_parameters
class APFLClassifier(NeuralClassifierMixin, _APFL, BaseNeural):
    r"""Classification by APFL: mixtures of personal networks and a global one.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import APFLClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = APFLClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class APFLRegressor(NeuralRegressorMixin, _APFL, BaseNeural):
    """Regression by APFL: mixtures of personal networks and a global one."""
