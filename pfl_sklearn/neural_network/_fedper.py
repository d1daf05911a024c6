"""FedPer and FedRep: shared first layers, and last ones that clients keep to themselves.

FedPer trains both at once; FedRep fits the last ones to the first before these move.
"""

from functools import partial

from pfl_sklearn._parameters import AT_LEAST_ONE, parameter, with_parameters
from pfl_sklearn._rounds.rows import Reshuffled
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import personal_nets_phase, train
from pfl_sklearn.neural_network._engine._personal_layers import (
    KeepsLayers,
    merge_personal_layers,
    personal_layer_mask,
    shared_layers_method,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def fedper_steps(setup, server, t, block):
    """Networks of a block after their steps, and the losses (g,) before them."""
    start = merge_personal_layers(server, block.personal)
    # All layers move at once; which of them are sent is up to `shared_layers_method`.
    return train(setup.engines.client, block, start, setup.rates[t], personal=True)


@with_parameters
class _FedPer(KeepsLayers):
    r"""FedPer: shared first layers, and last ones that clients keep to themselves.

    Clients learn a representation together, and each its own way to read it.

    See Also
    --------
    FedRep%(kind)s : the same, with personal layers trained first in every round.

    Notes
    -----
    Algorithm 1 of Arivazhagan et al. (2019), with a number of steps in place of epochs, and
    with equal weights. In every round a sampled client trains the shared layers and its own
    together, keeps its own and sends what changed in the shared ones. A client that ``fit`` did
    not see gets the personal layers that all clients started from, which nobody trained, so its
    predictions are much worse, and so are those of a released model: use FedAvg or PPSGDNet for
    such clients. Noise is added to the shared layers alone.

    Memory: one vector of parameters for each client; a round needs three for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Arivazhagan, M. G., Aggarwal, V., Singh, A. K. and Choudhary, S. (2019). Federated learning
    with personalization layers. arXiv 1912.00818.
    """

    def _method(self, setup):
        is_personal = personal_layer_mask(setup, self.personal_layers)
        return shared_layers_method(setup, is_personal, partial(fedper_steps, setup))


@with_parameters
class FedPerClassifier(NeuralClassifierMixin, _FedPer, BaseNeural):
    r"""Classification by FedPer: shared first layers and personal last ones.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import FedPerClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = FedPerClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class FedPerRegressor(NeuralRegressorMixin, _FedPer, BaseNeural):
    """Regression by FedPer: shared first layers and personal last ones."""


def fedrep_steps(setup, is_personal, head_steps, server, t, block):
    """Networks of a block after their steps, and the losses (g,) before them.

    The first `head_steps` move a client's own layers (p,) alone, the others the shared ones.
    """
    engine, rate = setup.engines.client, setup.rates[t]
    # Each part has batches of its own: of a client with many rows they are different rows.
    first, others = block.part(0, head_steps), block.part(head_steps)
    start = merge_personal_layers(server, block.personal)
    # Losses before anything moves, as in other methods, so that histories compare.
    fitted, losses = train(engine, first, start, rate, personal=True, moving=is_personal)
    shared, _ = train(engine, others, fitted.array(), rate, personal=True, moving=~is_personal)
    return shared, losses


def fit_personal_layers(setup, is_personal, server, t, block):
    """Networks of a block after steps of their own layers alone, and losses (g,) before."""
    start = merge_personal_layers(server, block.personal)
    return train(
        setup.engines.client, block, start, setup.rates[t], personal=True, moving=is_personal
    )


@with_parameters
class _FedRep(KeepsLayers):
    r"""FedRep: personal layers are fitted to the shared ones before these move.

    In every round clients fit their own layers first, then the shared ones.

    See Also
    --------
    FedPer%(kind)s : the same, with all layers trained together.

    Notes
    -----
    Algorithm 1 of Collins et al. (2021), with steps on batches. In every round a sampled client
    fits its own layers to the shared ones by `head_steps` steps, then moves the shared ones by
    `local_steps` steps and sends what changed. After the rounds all clients fit their own
    layers to the final shared ones, by as many steps. A client that ``fit`` did not see gets
    the personal layers that all clients started from, which nobody trained, so its predictions
    are much worse, and so are those of a released model: use FedAvg or PPSGDNet for such
    clients. Noise is added to the shared layers alone.

    Memory: one vector of parameters for each client; a round needs five for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Collins, L., Hassani, H., Mokhtari, A. and Shakkottai, S. (2021). Exploiting shared
    representations for personalized federated learning. ICML.
    """

    head_steps: int = parameter(
        default=10,
        ranges=[AT_LEAST_ONE],
        text="""
            int >= 1
                Gradient steps of the personal layers in a round, before `local_steps` of the shared
                layers alone.
            """,
    )

    def _method(self, setup):
        is_personal = personal_layer_mask(setup, self.personal_layers)
        steps = partial(fedrep_steps, setup, is_personal, self.head_steps)
        fit_heads = partial(fit_personal_layers, setup, is_personal)
        # Heads were fitted to the shared layers before the server's last step.
        after = personal_nets_phase(setup, self.head_steps, fit_heads, start=merge_personal_layers)
        return shared_layers_method(setup, is_personal, steps, last_phase=after)

    @property
    def _batches(self):
        n_steps, n_passes = self._local_work  # type: ignore[attr-defined]  # BaseNeural's
        size = self._batch_size  # type: ignore[attr-defined]
        return Reshuffled(size, self.head_steps + n_steps, n_passes)


@with_parameters
class FedRepClassifier(NeuralClassifierMixin, _FedRep, BaseNeural):
    r"""Classification by FedRep: shared first layers and personal last ones.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import FedRepClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = FedRepClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class FedRepRegressor(NeuralRegressorMixin, _FedRep, BaseNeural):
    """Regression by FedRep: shared first layers and personal last ones."""
