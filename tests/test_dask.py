"""A local dask cluster runs the same fits as one process.

To the bit, as its workers are on the same machine and have the same kernel of the linear algebra.
"""

import dataclasses
import os
import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.model_selection import GridSearchCV

from pfl_sklearn import (
    ClientColumn,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PPSGDClassifier,
    PPSGDRegressor,
    neural_network,
)
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import PrivacyLedger

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
tokenize = pytest.importorskip("dask.base").tokenize


@pytest.fixture(scope="module")
def cluster():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dask's own, while it starts and stops
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=4, processes=True, dashboard_address=None
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            yield client


class ScaledPrior(GaussianPrior):
    """A user's, with a parameter of its own."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale


def two_fits():
    """Models with equal parameters, of different responses."""
    X, groups = np.arange(40.0)[:, None] / 40, np.repeat([0, 1], 20)
    model = PPSGDRegressor(learning_rate=0.1, n_rounds=3, random_state=0)
    fits = [sklearn.clone(model).fit(X, y, groups=groups) for y in (X[:, 0], -X[:, 0])]
    return X, groups, fits


def test_fits_with_equal_parameters_have_tokens_of_their_own():
    X, groups, (first, second) = two_fits()
    frame = pd.DataFrame({"client": groups, "x": X[:, 0]})
    columns = [
        ClientColumn(PersonalizedLinearRegression(), "client").fit(frame, y)
        for y in (np.sin(99 * X[:, 0]), np.cos(99 * X[:, 0]))
    ]
    selections = [PrivateSelectCV(PPSGDRegressor(), {}) for _ in (first, second)]
    for selection, fitted in zip(selections, (first, second), strict=True):
        selection.best_estimator_ = fitted
    for one, other in ((first, second), columns, selections):
        assert repr(one) == repr(other)
        assert tokenize(one) != tokenize(other)
        assert tokenize(one) == tokenize(one)


def test_priors_of_users_have_tokens_of_their_own():
    assert tokenize(ScaledPrior(scale=1.0)) != tokenize(ScaledPrior(scale=2.0))


@pytest.mark.parametrize("estimator", [GaussianMean(), PPSGDRegressor(), GaussianPrior()])
def test_dask_hands_estimators_on_as_they_are(estimator):
    """It rebuilds dataclasses from their fields, which would lose everything that a fit found."""
    estimator.fitted_ = 3
    _, computed = dask.compute(dask.delayed(abs)(-1), estimator)
    assert computed is estimator
    assert not dataclasses.is_dataclass(estimator)
    assert pd.DataFrame([estimator, estimator]).shape == (2, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_does_not_take_one_fit_for_another(cluster):
    X, groups, fits = two_fits()
    remote = [cluster.submit(each.predict, X, groups=groups).result() for each in fits]
    for each, predicted in zip(fits, remote, strict=True):
        np.testing.assert_array_equal(predicted, each.predict(X, groups=groups))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        PersonalizedLogisticRegression(random="intercept"),
        PPSGDClassifier(n_rounds=10, random_state=0),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_a_cluster_gives_the_same_bits(estimator, cluster):
    rng = np.random.default_rng(0)
    groups = np.sort(rng.integers(0, 3000, 60_000))
    X = rng.normal(size=(60_000, 4))
    y = X.sum(axis=1) + rng.normal(size=3000)[groups] + rng.normal(size=60_000) > 0
    alone = estimator.fit(X, y, groups=groups).coef_.copy()
    before = _tasks(cluster)
    with joblib.parallel_config(backend="dask"):
        together = estimator.fit(X, y, groups=groups).coef_
    np.testing.assert_array_equal(alone, together)
    assert _tasks(cluster) > before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_eleven_fits_on_a_cluster_are_eleven_entries(cluster, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    clients = make_gaussian_clients(60, 6, random_state=0)
    model = GaussianMean(
        GaussianPrior(covariance=1.0), noise_variance=1.0, clip_norm=4.0, ledger=ledger
    )
    search = GridSearchCV(
        model,
        {"epsilon": [0.25, 0.5, 1.0, 2.0, 4.0]},
        scoring=ClientScorer("r2"),
        cv=ClientKFold(2, random_state=0),
    )
    with sklearn.config_context(enable_metadata_routing=True), joblib.parallel_config("dask"):
        search.fit(clients.data, clients.target, groups=clients.groups)
    assert [entry["entry"] for entry in ledger.entries] == list(range(1, 12))
    assert {entry["process"] for entry in ledger.entries[:10]}.isdisjoint({os.getpid()})
    assert ledger.entries[10]["process"] == os.getpid()  # the refit


@pytest.fixture
def threads():
    """A cluster whose workers are threads of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with distributed.Client(
            processes=False, n_workers=1, threads_per_worker=4, dashboard_address=None
        ) as client:
            yield client


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nets_in_threads_of_a_cluster_give_the_same_bits(threads):
    _check_net("AdaPeDClassifier", threads)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["FedEMClassifier", "ScaffoldClassifier"])
def test_nets_on_a_cluster_give_the_same_bits(name, cluster):
    _check_net(name, cluster)


def _check_net(name, client):
    pytest.importorskip("torch")
    pytest.importorskip("skorch")
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 9)
    X = rng.normal(size=(360, 7))
    y = X[:, :3].argmax(axis=1) if name.endswith("Classifier") else X[:, :2] + X[:, 2:4]
    model = getattr(neural_network, name)(n_rounds=2, local_steps=2, random_state=0)
    alone = model.fit(X, y, groups=groups).parameters_.copy()
    before = _tasks(client)
    with joblib.parallel_config(backend="dask"):
        together = model.fit(X, y, groups=groups).parameters_
    np.testing.assert_array_equal(alone, together)
    assert _tasks(client) > before


def _tasks(client):
    """Tasks that the workers have seen."""
    return client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
