"""FedPer: shared first layers, and last ones that clients keep to themselves."""

import math
from functools import partial

from pfl_sklearn._docs import fill_doc
from pfl_sklearn.neural_network._docs import NEURAL
from pfl_sklearn.neural_network._pieces import train
from pfl_sklearn.neural_network._split import KeepsLayers, own_layers, split, with_own
from pfl_sklearn.neural_network._targets import NeuralClassifierMixin, NeuralRegressorMixin


def fedper_steps(setup, server, t, block):
    """Nets of a block after their steps, and the losses (g,) before them."""
    start = with_own(server, block.clients["personal"])
    return train(setup.engines.client, block, start, setup.rates[t], own=True)


class _FedPer(KeepsLayers):
    def __init__(
        self,
        estimator=None,
        *,
        n_rounds=100,
        tol=1e-3,
        max_rounds=1000,
        validation_fraction=0.2,
        local_steps=10,
        personal_layers="last",
        client_fraction=1.0,
        sampling="poisson",
        epsilon=math.inf,
        noise_multiplier=None,
        delta=1e-5,
        clip_norm=None,
        clip_quantile=None,
        ledger=None,
        warm_start=False,
        checkpoint=None,
        checkpoint_every=10,
        unseen="warn",
        n_jobs=None,
        random_state=None,
    ):
        self._keep(locals())

    def _method(self, setup):
        own = own_layers(setup, self.personal_layers)
        return split(setup, own, partial(fedper_steps, setup))

    @staticmethod
    def _nets(server, clients):
        return with_own(server, clients["personal"])


FEDPER = {
    **NEURAL,
    "fedper_parameters": """
        personal_layers : "last" or sequence of str, default="last"
            Modules or parameters of the net, by name, that every client keeps to itself, such as
            ``["layers.4", "last"]``. "last" is the ``torch.nn.Linear`` that gives the logits.
            Without any name all layers are shared.
        """,
    "fedper_notes": """
        Algorithm 1 of Arivazhagan et al. (2019), with a number of steps in place of epochs, and
        with equal weights. In every round a sampled client trains the shared layers and its own
        together, keeps its own and sends what changed in the shared ones. A client that ``fit`` did
        not see gets the personal layers that all clients started from, which nobody trained, so its
        predictions are much worse, and so are those of a released model: use FedAvg or PPSGDNet for
        such clients. Noise is added to the shared layers alone.

        Memory: one vector of parameters for each client; a round needs three for each client of a
        block, and two messages for each sampled client.
        """,
    "fedper_references": """
        Arivazhagan, M. G., Aggarwal, V., Singh, A. K. and Choudhary, S. (2019). Federated learning
        with personalization layers. arXiv 1912.00818.
        """,
}


@fill_doc(FEDPER)
class FedPerClassifier(NeuralClassifierMixin, _FedPer):
    r"""Classification by FedPer: shared first layers and personal last ones.

    Clients learn a representation together, and each its own way to read it.

    Parameters
    ----------
    %(recipe)s
    %(rounds)s
    %(tol)s
    %(max_rounds)s
    %(validation_fraction)s
    %(steps)s
    %(fedper_parameters)s
    %(sampling)s
    %(privacy)s
    %(warm_start)s
    %(checkpoint)s

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels.
    %(net_attributes)s
    %(rounds_attributes)s

    See Also
    --------
    FedRepClassifier : the same, with personal layers trained first in every round.

    Notes
    -----
    %(fedper_notes)s

    %(common_notes)s

    References
    ----------
    %(fedper_references)s

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


@fill_doc(FEDPER)
class FedPerRegressor(NeuralRegressorMixin, _FedPer):
    r"""Regression by FedPer: shared first layers and personal last ones.

    Clients learn a representation together, and each its own way to read it.

    Parameters
    ----------
    %(recipe)s
    %(rounds)s
    %(tol)s
    %(max_rounds)s
    %(validation_fraction)s
    %(steps)s
    %(fedper_parameters)s
    %(sampling)s
    %(privacy)s
    %(warm_start)s
    %(checkpoint)s

    Attributes
    ----------
    %(net_attributes)s
    %(rounds_attributes)s

    See Also
    --------
    FedRepRegressor : the same, with personal layers trained first in every round.

    Notes
    -----
    %(fedper_notes)s

    %(common_notes)s

    References
    ----------
    %(fedper_references)s
    """
