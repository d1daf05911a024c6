"""Local networks: every client trains alone."""

from functools import partial

import numpy as np

from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._rounds.loop import Method
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import continue_personal, keep_personal_nets
from pfl_sklearn.neural_network._engine._targets import LabelPriorMixin, NeuralRegressorMixin


def local_nets(setup):
    """Local training as a method: clients have their networks, and send nothing."""
    engine = setup.engines.client

    def init():
        start = engine.start()
        nets = np.tile(start.astype(engine.array_dtype), (setup.n_clients, 1))
        return {"global": start}, {"personal": nets}

    update = partial(
        setup.engines.update, partial(keep_personal_nets, partial(continue_personal, setup))
    )
    # No parts of a message: nothing is sent, so the release has nothing to clip or noise.
    return Method(init, update, lambda server, *_: server, {})


class _LocalNet:
    """Local networks: every client trains alone.

    Nothing is communicated. This is the floor that a federated method has to beat.

    See Also
    --------
    FedAvg%(kind)s : a global network, fine-tuned by every client.

    Notes
    -----
    Every client starts from the same random network, which is also what clients get that ``fit``
    did not see. A client takes `local_steps` steps in each round that it is sampled in. Nothing is
    released and no noise is added. All neural estimators share one search space, so this one also
    has `clip_norm`, `clip_quantile`, `weighting` and `server_optimizer`, which change no network
    here; under ``n_rounds=None``, `weighting` weighs the losses of held-out rows.

    Under a finite `epsilon`, or a `noise_multiplier` above 0, the report has an epsilon of 0,
    and nothing is taken from the rows of all clients together: the default network works in the
    units of the features, ``BatchNorm`` is refused, and a client whose loss is not finite keeps its
    network rather than ends the fit. Without either the units come from all rows, and the report
    promises nothing.

    Memory: one vector of parameters for each client.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.
    """

    # Under any finite epsilon the report then has 0 for the rounds.
    _communicates = False
    _clients_keep = "net"

    def _method(self, setup):
        return local_nets(setup)


@with_parameters
class LocalNetClassifier(LabelPriorMixin, _LocalNet, BaseNeural):
    r"""Classification by local networks: every client trains alone.

    Notes
    -----
    An unknown `label_prior` with noise is the one release: its noisy sum takes all of `epsilon` and
    `delta`, or has a standard deviation of `noise_multiplier` times its sensitivity,
    :math:`\sqrt 2`.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import LocalNetClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = LocalNetClassifier(random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class LocalNetRegressor(NeuralRegressorMixin, _LocalNet, BaseNeural):
    """Regression by local networks: every client trains alone.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.neural_network import LocalNetRegressor
    >>> rng = np.random.default_rng(0)
    >>> X, groups = rng.normal(size=(600, 3)), np.repeat(np.arange(20), 30)
    >>> y = np.maximum(X[:, 0], 0) + 0.1 * groups * X[:, 1]
    >>> model = LocalNetRegressor(random_state=0).fit(X, y, groups=groups)
    >>> model.score(X, y, groups=groups) > 0.9
    True
    """
