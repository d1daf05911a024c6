"""Checks that every public estimator passes, from one registry."""

import math
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

import pfl_sklearn
from pfl_sklearn import BernoulliMean, ClientColumn, GaussianMean

# Every public estimator, with default parameters: scikit-learn's checks and ours.
ESTIMATORS = [GaussianMean(), BernoulliMean()]
# Wrappers, for scikit-learn's checks. The client column is one of their float features there, so
# every row is a client and the noise variance has to be known.
WRAPPERS = [ClientColumn(GaussianMean(noise_variance=1.0), 0)]
# Private configurations, for our checks only.
PRIVATE = [
    GaussianMean(epsilon=1.0, clip_norm=8.0, random_state=0),
    GaussianMean(epsilon=1.0, clip_norm=8.0, trust="local", noise_variance=1.0, random_state=0),
    BernoulliMean(epsilon=1.0, random_state=0),
    BernoulliMean(epsilon=1.0, mechanism="two_bit", random_state=0),
    BernoulliMean(epsilon=1.0, delta=1e-3, trust="central", random_state=0),
]
RELEASING = [
    *PRIVATE,
    GaussianMean(
        mechanism="quantizer", n_bits=4, clip_norm=8.0, noise_variance=1.0, random_state=0
    ),
]
every = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
every_private = pytest.mark.parametrize("estimator", PRIVATE, ids=repr)
every_configuration = pytest.mark.parametrize("estimator", [*ESTIMATORS, *RELEASING], ids=repr)


def make_table(estimator, n_clients=12, seed=0):
    """Rows of clients of unequal size, a client of one row among them (common size if private)."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, n_clients)
    sizes[0] = 1
    common = isinstance(estimator, BernoulliMean) and math.isfinite(estimator.epsilon)
    if common and estimator.mechanism != "two_bit":
        sizes[:] = 6
    groups = rng.permutation(np.repeat(np.arange(n_clients), sizes))
    centres = rng.normal(size=n_clients)
    if isinstance(estimator, BernoulliMean):
        y = (rng.random(len(groups)) < 1 / (1 + np.exp(-centres[groups]))).astype(int)
    else:
        y = 3 * centres[groups] + rng.normal(size=len(groups))
    return rng.normal(size=(len(groups), 2)), y, groups


def fit_quietly(estimator, X, y, **params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pfl_sklearn.PrivacyWarning)
        warnings.filterwarnings("ignore", "The released noise variance drowns")
        return clone(estimator).fit(X, y, **params)


def response(model, X, groups=None):
    method = "predict_proba" if hasattr(model, "predict_proba") else "predict"
    return getattr(model, method)(X, groups=groups)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
@parametrize_with_checks(ESTIMATORS)
def test_sklearn_checks(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.UnseenClientsWarning")
@parametrize_with_checks(WRAPPERS)
def test_sklearn_checks_of_wrappers(estimator, check):
    check(estimator)
