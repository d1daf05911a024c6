"""Searches over private estimators, on a small table of 30 clients with 6 rows each."""

import functools
import math
import warnings

import numpy as np
import sklearn
from sklearn.model_selection import GridSearchCV

from pfl_sklearn import ClientColumn, GaussianMean
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.privacy import gdp_epsilon, gdp_mu

DELTA = 1e-5
GENERATOR = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(30), 6)
Y = GENERATOR.normal(size=30)[GROUPS] + GENERATOR.normal(size=180)
X = GENERATOR.normal(size=(180, 1))
TABLE = np.column_stack([GROUPS, X])
MEAN = GaussianMean(noise_variance=1.0, epsilon=1.0, clip_norm=3.0)
SCORER = ClientScorer("neg_mean_squared_error")
CLIPS = {"clip_norm": [1.0, 2.0, 3.0]}


def fitted(search, *, groups=GROUPS, data=X, quiet=True):
    with sklearn.config_context(enable_metadata_routing=True), warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        return search.fit(data, Y, **({} if groups is None else {"groups": groups}))


def grid(estimator=MEAN, params=CLIPS, **more):
    options = {"cv": ClientKFold(2, random_state=0), "scoring": SCORER, **more}
    return GridSearchCV(estimator, params, **options)


@functools.cache
def searched():
    """A search over three clip norms, fitted once: six fits on folds, and the refit."""
    return fitted(grid())


def by_hand(n_fits, epsilon=1.0):
    """Epsilon of Gaussian releases that spend `epsilon` each: squared parameters add up."""
    return gdp_epsilon(gdp_mu(epsilon, DELTA) * math.sqrt(n_fits), DELTA)


def column(estimator=MEAN, **more):
    return ClientColumn(estimator.__sklearn_clone__().set_params(**more), 0)


FOLDS = {"cv": ClientKFold(2, client_column=0, random_state=0), "scoring": "r2"}
