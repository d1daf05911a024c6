"""Local nets: every client trains alone."""

import math
from functools import partial

import numpy as np

from pfl_sklearn._docs import fill_doc
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._docs import NEURAL
from pfl_sklearn.neural_network._pieces import train
from pfl_sklearn.neural_network._targets import (
    LABEL_PRIOR,
    NeuralClassifierMixin,
    NeuralRegressorMixin,
)


def local_nets(setup):
    """The method: it sends nothing."""
    engine = setup.engines.client

    def init():
        start = engine.start()
        rows = np.tile(start.astype(engine.array_dtype), (setup.n_clients, 1))
        return {"global": start}, {"personal": rows}

    return Method(init, partial(local_update, engine, setup.rates), lambda server, *_: server, {})


def local_update(engine, rates, server, t, batch, clients):
    """Nets of the clients of a block after their steps."""

    def local_steps(block):
        models, losses = train(engine, block, block.clients["personal"], rates[t], own=True)
        return Update({}, {"personal": models.array()}, losses)

    return engine.run(local_steps, batch, clients)


@fill_doc(NEURAL)
class LocalNetClassifier(NeuralClassifierMixin, BaseNeural):
    r"""Classification by local nets: every client trains alone.

    Nothing is communicated. This is the floor that a federated method has to beat.

    Parameters
    ----------
    %(recipe)s
    %(rounds)s
    %(tol)s
    %(max_rounds)s
    %(validation_fraction)s
    %(steps)s
    %(label_prior)s
    %(sampling)s
    %(labels_at_most)s
    %(warm_start)s
    %(checkpoint)s

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels.
    %(label_prior_attribute)s
    %(net_attributes)s
    %(rounds_attributes)s

    See Also
    --------
    FedAvgClassifier : a global net, fine-tuned by every client.

    Notes
    -----
    Every client starts from the same random net, which is also what clients get that ``fit`` did
    not see. A client takes `local_steps` steps in each round that it is sampled in. Nothing is
    released and no noise is added. The parameters of privacy are there so that this floor takes
    those of the method that it is compared with. The one exception is an unknown `label_prior`
    with noise: its noisy sum takes all of `epsilon` and `delta`, or has a standard deviation of
    `noise_multiplier` times its sensitivity, :math:`\sqrt 2`.

    Memory: one vector of parameters for each client.

    %(common_notes)s

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

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

    _parameter_constraints = {**BaseNeural._parameter_constraints, **LABEL_PRIOR}

    def __init__(
        self,
        estimator=None,
        *,
        n_rounds=100,
        tol=1e-3,
        max_rounds=1000,
        validation_fraction=0.2,
        local_steps=10,
        label_prior=None,
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
        super().__init__(
            estimator,
            n_rounds=n_rounds,
            tol=tol,
            max_rounds=max_rounds,
            validation_fraction=validation_fraction,
            local_steps=local_steps,
            client_fraction=client_fraction,
            sampling=sampling,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            clip_norm=clip_norm,
            clip_quantile=clip_quantile,
            ledger=ledger,
            warm_start=warm_start,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            unseen=unseen,
            n_jobs=n_jobs,
            random_state=random_state,
        )
        self.label_prior = label_prior

    _communicates = False

    def _method(self, setup):
        return local_nets(setup)

    @staticmethod
    def _nets(server, clients):
        return clients["personal"]


@fill_doc(NEURAL)
class LocalNetRegressor(NeuralRegressorMixin, BaseNeural):
    r"""Regression by local nets: every client trains alone.

    Nothing is communicated. This is the floor that a federated method has to beat.

    Parameters
    ----------
    %(recipe)s
    %(rounds)s
    %(tol)s
    %(max_rounds)s
    %(validation_fraction)s
    %(steps)s
    %(sampling)s
    %(nothing_sent)s
    %(warm_start)s
    %(checkpoint)s

    Attributes
    ----------
    %(net_attributes)s
    %(rounds_attributes)s

    See Also
    --------
    FedAvgRegressor : a global net, fine-tuned by every client.

    Notes
    -----
    Every client starts from the same random net, which is also what clients get that ``fit`` did
    not see. A client takes `local_steps` steps in each round that it is sampled in. Nothing is
    released and no noise is added. The parameters of privacy are there so that this floor takes
    those of the method that it is compared with.

    Memory: one vector of parameters for each client.

    %(common_notes)s

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

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

    def __init__(
        self,
        estimator=None,
        *,
        n_rounds=100,
        tol=1e-3,
        max_rounds=1000,
        validation_fraction=0.2,
        local_steps=10,
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
        super().__init__(
            estimator,
            n_rounds=n_rounds,
            tol=tol,
            max_rounds=max_rounds,
            validation_fraction=validation_fraction,
            local_steps=local_steps,
            client_fraction=client_fraction,
            sampling=sampling,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            clip_norm=clip_norm,
            clip_quantile=clip_quantile,
            ledger=ledger,
            warm_start=warm_start,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            unseen=unseen,
            n_jobs=n_jobs,
            random_state=random_state,
        )

    _communicates = False

    def _method(self, setup):
        return local_nets(setup)

    @staticmethod
    def _nets(server, clients):
        return clients["personal"]
