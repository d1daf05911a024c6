"""pFedMe: personal networks by proximal steps, and a global network that follows them."""

from functools import partial
from typing import ClassVar

from pfl_sklearn._parameters import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, parameter, with_parameters
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import (
    as_float64,
    averaging_method,
    personal_nets_phase,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def pfedme_steps(setup, settings, server, t, block):
    """Global networks of a block after their steps, nothing to keep, and personal losses."""
    proximal, n_steps, rate = settings
    engine, first = setup.engines.client, None
    shared = engine.models(server["global"], block.n_clients)
    # From the global network in every round, and on from batch to batch, as in the authors' code.
    personal = engine.models(server["global"], block.n_clients)
    for X, y in block.steps():
        before = proximal_steps(personal, X, y, setup.rates[t], proximal, shared.tensors, n_steps)
        first = before if first is None else first
        for values, target in zip(shared.tensors, personal.tensors, strict=True):
            # w - rate * proximal * (w - theta), as a step of that share of the way.
            values.lerp_(target, rate * proximal)
    # Rows went through the personal networks alone, so running statistics are theirs.
    shared.take_buffers(personal)
    return shared, {}, as_float64(first)


def proximal_steps(models, X, y, rate, proximal, centre, n_steps):
    """Take gradient steps on a loss plus `proximal` times half the squared distance from tensors.

    Returns the losses (g,) before them.
    """
    first = None
    for _ in range(n_steps):
        outputs, before = models(X), models.copies()
        first = models.losses(outputs, y).detach() if first is None else first
        models.learn(outputs, y, rate)
        for values, start, target in zip(models.tensors, before, centre, strict=True):
            # The pull from where this step began, explicit as in Algorithm 1 of Dinh et al.: rate
            # times proximal must stay below 2.
            values.sub_(start - target, alpha=rate * proximal)
    return first


def proximal_personal_steps(setup, settings, server, t, block):
    """Personal networks of a block around the global one, after the rounds, and their losses."""
    proximal, n_steps, _ = settings
    models, first = setup.engines.client.models(server["global"], block.n_clients), None
    centre = models.copies()
    for X, y in block.steps():
        before = proximal_steps(models, X, y, setup.rates[t], proximal, centre, n_steps)
        first = before if first is None else first
    return models, as_float64(first)


@with_parameters
class _PFedMe:
    r"""pFedMe: personal networks by proximal steps, and a global network that follows them.

    The global network follows the personal ones, which stay near it.

    See Also
    --------
    Ditto%(kind)s : another pull towards a global network, which is that of FedAvg.

    Notes
    -----
    Algorithm 1 of Dinh et al. (2020). Of each of `local_steps` batches a sampled client takes
    `personal_steps` steps :math:`\theta \leftarrow \theta - \eta_p (g + \lambda (\theta - w))` with
    its personal network, whose step :math:`\eta_p` is the ``lr`` of the network, and then moves its
    copy w of the global network: :math:`w \leftarrow w - \eta \lambda (w - \theta)`. The personal
    network starts from the global one in every round and goes on from batch to batch, as in the
    authors' code, whose defaults are a `proximal` of 15 and a `local_learning_rate` of 0.005. After
    the rounds every client takes the personal steps of one round around the final global network,
    on its own rows; these are the networks of the clients. That reveals nothing to others. With
    ``n_rounds=None`` the loss is that of the global network. Noise is added to the global network
    alone, as in FedAvg.

    Memory: one vector of parameters for each client; a round needs six for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Dinh, C. T., Tran, N. H. and Nguyen, T. D. (2020). Personalized federated learning with
    Moreau envelopes. NeurIPS.
    """

    proximal: float = parameter(
        default=1.0,
        ranges=[NOT_NEGATIVE],
        text=r"""
            float >= 0
                Weight of half the squared distance between a client's network and its copy of the
                global one, :math:`\lambda`. Steps are explicit: keep the network's ``lr`` times
                this below 2.
            """,
    )
    personal_steps: int = parameter(
        default=5,
        ranges=[AT_LEAST_ONE],
        text="""
            int >= 1
                Gradient steps of a personal network for each step of the client's copy, on the same
                batch: a round has `local_steps` times as many.
            """,
    )
    local_learning_rate: float = parameter(
        default=0.1,
        ranges=[POSITIVE],
        text=r"""
            float > 0
                Learning rate of the copy, :math:`\eta`: in each step it moves towards the personal
                network by `local_learning_rate` times `proximal` of the way, which should be at
                most 1. An ``LRScheduler`` does not change it.
            """,
    )
    server_learning_rate: float = parameter(
        default=1.0,
        ranges=[POSITIVE],
        text=r"""
            float > 0
                Factor on the average change of the global network, :math:`\beta`.
            """,
    )

    _further_rates: ClassVar[tuple[str, ...]] = ("local_learning_rate", "server_learning_rate")

    def _method(self, setup):
        settings = self.proximal, self.personal_steps, self.local_learning_rate
        # Personal networks of earlier rounds belong to earlier global networks.
        near, (n_steps, n_passes) = (
            partial(proximal_personal_steps, setup, settings),
            setup.local_work,
        )
        last = personal_nets_phase(setup, n_steps, near, n_passes=n_passes)
        steps = partial(pfedme_steps, setup, settings)
        return averaging_method(setup, steps, last_phase=last, rate=self.server_learning_rate)


@with_parameters
class PFedMeClassifier(NeuralClassifierMixin, _PFedMe, BaseNeural):
    r"""Classification by pFedMe: personal networks by proximal steps.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import PFedMeClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = PFedMeClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class PFedMeRegressor(NeuralRegressorMixin, _PFedMe, BaseNeural):
    """Regression by pFedMe: personal networks by proximal steps."""
