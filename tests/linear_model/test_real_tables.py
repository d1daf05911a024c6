"""Held-out errors on public tables: each client alone, one model for all, and personalized."""

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.slow import slow

# File: group, target, features, random, covariance_type; mean squared errors of five folds, local,
# pooled and personalized. Two or three nearly collinear rows make a school's own line of chem97
# nonsense.
TABLES = {
    "sleepstudy": ("subject reaction", "days", "all", "full", (877.9, 2261.9, 858.6)),
    "radon_mn": (
        *("county_fips log_radon", "floor log_uranium", "intercept", "spherical"),
        (0.7055, 0.5993, 0.5930),
    ),
    "hsb82": ("school mAch", "cses meanses", "intercept cses", "full", (38.88, 39.65, 37.71)),
    "chem97": ("school score", "gcsecnt age", "intercept gcsecnt", "full", (np.inf, 6.171, 5.441)),
    "insteval": ("student y", "service lectage", "intercept", "diag", (1.9733, 1.7702, 1.7106)),
    "parkinsons_telemonitoring": (
        *("subject total_UPDRS", "test_time PPE HNR", "intercept test_time", "diag"),
        (2.0673, 110.52, 2.0607),
    ),
}


def load(data_home, name):
    names, features, *_ = TABLES[name]
    group, target = names.split()
    table = pd.read_csv(data_home / f"{name}.csv.gz")
    X, y = table[features.split()].astype(float), table[target].to_numpy(float)
    return X, y, table[group].to_numpy()


def scaled(model):
    return make_pipeline(StandardScaler().set_output(transform="pandas"), model)


@pytest.mark.parametrize("name", ["hsb82", *slow(name for name in TABLES if name != "hsb82")])
def test_personalized_beats_local_and_pooled(name, data_home):
    X, y, groups = load(data_home, name)
    *_, random, shape, expected = TABLES[name]
    random = random if random == "all" else random.split()
    models = [
        PersonalizedLinearRegression(GaussianPrior(covariance=np.inf)),
        PersonalizedLinearRegression(GaussianPrior(covariance=0.0)),
        PersonalizedLinearRegression(GaussianPrior(covariance_type=shape), random=random),
    ]
    with sklearn.config_context(enable_metadata_routing=True):
        folds, scorer = ClientKFold(5, random_state=0), ClientScorer("neg_mean_squared_error")
        how = {"params": {"groups": groups}, "cv": folds, "scoring": scorer}
        scores = [cross_validate(scaled(model), X, y, **how)["test_score"] for model in models]
    local, pooled, personalized = -np.mean(scores, axis=1)
    assert personalized < min(local, pooled)
    np.testing.assert_allclose([pooled, personalized], expected[1:], rtol=1e-3)
    if np.isfinite(expected[0]):
        assert local == pytest.approx(expected[0], rel=1e-3)
    else:
        assert local > 1e3
