"""FedPer: shared first layers, and last ones that clients keep to themselves."""

from functools import partial

from pfl_sklearn._parameters import with_parameters
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import train
from pfl_sklearn.neural_network._engine._personal_layers import (
    KeepsLayers,
    own_layers,
    split,
    with_own,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def fedper_steps(setup, server, t, block):
    """Nets of a block after their steps, and the losses (g,) before them."""
    start = with_own(server, block.clients["personal"])
    # All layers move at once; which of them are sent is up to `split`.
    return train(setup.engines.client, block, start, setup.rates[t], own=True)


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
        own = own_layers(setup, self.personal_layers)
        return split(setup, own, partial(fedper_steps, setup))


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
