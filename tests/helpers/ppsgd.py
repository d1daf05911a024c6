"""A small table of clients of unequal size, and what makes two PPSGD fits the same."""

import numpy as np

SEED = 5
SIZES = [1, 7, 4, 1, 12, 3, 25, 2]


def table(sizes=SIZES, d=3, seed=0, n_outputs=None):
    """Rows in no order, of clients of unequal size."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    X = rng.normal(size=(len(groups), d))
    coef = rng.normal(size=(len(sizes), d, n_outputs or 1)) + 1
    y = np.einsum("nd,ndc->nc", X, coef[groups]) + rng.normal(size=(len(groups), n_outputs or 1))
    return X, y if n_outputs else y[:, 0], groups


def assert_same_fit(one, other):
    """The same bits: both fits are of one machine and kernel of the linear algebra."""
    np.testing.assert_array_equal(one.coef_, other.coef_)
    np.testing.assert_array_equal(one.population_coef_, other.population_coef_)
    np.testing.assert_array_equal(one.population_intercept_, other.population_intercept_)
    np.testing.assert_equal(one.history_, other.history_)
    assert one.n_rounds_ == other.n_rounds_ == len(one.history_["loss"])
    assert one.learning_rate_ == other.learning_rate_
    assert one.privacy_ == other.privacy_
