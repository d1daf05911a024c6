"""Tables and fits for the tests of the printed algorithms of linear regression."""

import numpy as np

from pfl_sklearn import PersonalizedLinearRegression


def table(m=8, seed=0, d=3, groups=False):
    """Rows without an intercept: clients around one vector, or around plus and minus it."""
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(m), rng.integers(2, 7, m))
    signs = rng.choice([-1, 1], size=(m, 1)) if groups else 1
    theta = signs * np.arange(1, d + 1) + 0.5 * rng.normal(size=(m, d))
    X = rng.normal(size=(len(codes), d))
    y = np.einsum("nd,nd->n", X, theta[codes]) + 0.3 * rng.normal(size=len(codes))
    return X, y, codes


def fit(X, y, codes, prior, sample_weight=None, **params):
    model = PersonalizedLinearRegression(prior, fit_intercept=False, **params)
    return model.fit(X, y, groups=codes, sample_weight=sample_weight)
