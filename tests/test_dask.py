"""A local dask cluster runs the same fits as one process."""

import warnings

import joblib
import numpy as np
import pytest

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dask's own, while it starts and stops
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            yield client


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        PersonalizedLinearRegression(),
        PersonalizedLinearRegression(GaussianPrior(covariance_type="full"), random=["intercept"]),
    ],
    ids=repr,
)
def test_a_cluster_gives_the_same_bits(estimator, cluster):
    rng = np.random.default_rng(0)
    groups = np.sort(rng.integers(0, 3000, 60_000))
    X = rng.normal(size=(60_000, 4))
    y = X.sum(axis=1) + rng.normal(size=3000)[groups] + rng.normal(size=60_000)
    alone = estimator.fit(X, y, groups=groups).coef_.copy()
    before = _tasks(cluster)
    with joblib.parallel_config(backend="dask"):
        together = estimator.fit(X, y, groups=groups).coef_
    np.testing.assert_array_equal(alone, together)
    assert _tasks(cluster) > before


def _tasks(client):
    """Tasks that the workers have seen."""
    return client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
