"""Local nets: every client trains alone."""

from functools import partial

import numpy as np

from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._rounds.loop import Method
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import further, own_nets_steps
from pfl_sklearn.neural_network._engine._targets import LabelPriorMixin, NeuralRegressorMixin


def local_nets(setup):
    """Local training as a method: clients have their nets, and send nothing."""
    engine = setup.engines.client

    def init():
        start = engine.start()
        nets = np.tile(start.astype(engine.array_dtype), (setup.n_clients, 1))
        return {"global": start}, {"personal": nets}

    update = partial(setup.engines.update, partial(own_nets_steps, partial(further, setup)))
    # No parts of a message: nothing is sent, so the release has nothing to clip or noise.
    return Method(init, update, lambda server, *_: server, {})


_CLIP_NORM = parameter(
    text="""
        float or None
            Has no effect: there are no messages to clip.
        """,
)
_WEIGHTING = parameter(
    text="""
        {"clients", "samples"}
            Has no effect on nets, as there is no server. With ``n_rounds=None`` it weighs the
            losses of held-out rows.
        """,
)
_SERVER_OPTIMIZER = parameter(
    text="""
        callable or None
            Has no effect: there is no server. What is no optimizer is refused all the same.
        """,
)
_CLIP_QUANTILE = parameter(
    text="""
        float in (0, 1) or None
            Has no effect, but is refused without `clip_norm`, as in other methods.
        """,
)


class _LocalNet:
    """Local nets: every client trains alone.

    Nothing is communicated. This is the floor that a federated method has to beat.

    See Also
    --------
    FedAvg%(kind)s : a global net, fine-tuned by every client.

    Notes
    -----
    Every client starts from the same random net, which is also what clients get that ``fit`` did
    not see. A client takes `local_steps` steps in each round that it is sampled in. Nothing is
    released and no noise is added. The parameters of privacy are there so that this floor takes
    those of the method that it is compared with.

    Memory: one vector of parameters for each client.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.
    """

    # Under any finite epsilon the report then states 0 for the rounds.
    _communicates = False

    def _method(self, setup):
        return local_nets(setup)


@with_parameters
class LocalNetClassifier(LabelPriorMixin, _LocalNet, BaseNeural):
    r"""Classification by local nets: every client trains alone.

    Notes
    -----
    An unknown `label_prior` with noise is the one exception to what follows: its noisy sum takes
    all of `epsilon` and `delta`, or has a standard deviation of `noise_multiplier` times its
    sensitivity, :math:`\sqrt 2`.

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

    epsilon = parameter(
        text="""
            float in (0, inf]
                Only the noisy sum for an unknown `label_prior` has a use for it, and takes all of
                it. Otherwise nothing is sent, so nothing gets noise, and the report states an
                epsilon of 0 under any finite value. What a finite value does change is that nothing
                is taken from the rows of all clients together: the default net works in the units
                that the features have, ``BatchNorm`` is refused, and a client whose loss is not
                finite keeps its net rather than ends the fit. With inf those units come from all
                rows, and the report promises nothing.
            """,
    )
    noise_multiplier = parameter(
        text=r"""
            float or None
                Standard deviation of the noise on that sum over its sensitivity, :math:`\sqrt 2`.
                Without the sum a value above 0 does what a finite `epsilon` does.
            """,
    )
    delta = parameter(
        text="""
            float in [0, 1)
                That of the noisy sum, for which it has to be above 0; otherwise without effect.
            """,
    )
    ledger = parameter(
        text="""
            PrivacyLedger or None
                File that records each fit. One with a finite `epsilon` spends what the noisy sum
                spends; one without is recorded as unprotected.
            """,
    )
    clip_norm = _CLIP_NORM
    clip_quantile = _CLIP_QUANTILE
    weighting = _WEIGHTING
    server_optimizer = _SERVER_OPTIMIZER


@with_parameters
class LocalNetRegressor(NeuralRegressorMixin, _LocalNet, BaseNeural):
    """Regression by local nets: every client trains alone.

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

    epsilon = parameter(
        text="""
            float in (0, inf]
                Nothing is sent, so nothing gets noise, and under any finite value the report states
                an epsilon of 0. What a finite value does change is that nothing is taken from the
                rows of all clients together: the default net works in the units that the features
                have, ``BatchNorm`` is refused, and a client whose loss is not finite keeps its net
                rather than ends the fit. With inf those units come from all rows, and the report
                promises nothing.
            """,
    )
    noise_multiplier = parameter(
        text="""
            float or None
                A value above 0 does what a finite `epsilon` does; which one has no effect.
            """,
    )
    delta = parameter(
        text="""
            float in [0, 1)
                Has no effect.
            """,
    )
    ledger = parameter(
        text="""
            PrivacyLedger or None
                File that records each fit. One with a finite `epsilon` spends nothing there; one
                without is recorded as unprotected.
            """,
    )
    clip_norm = _CLIP_NORM
    clip_quantile = _CLIP_QUANTILE
    weighting = _WEIGHTING
    server_optimizer = _SERVER_OPTIMIZER
