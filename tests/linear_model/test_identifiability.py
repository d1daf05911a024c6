"""What the rows of a linear model leave open: flat variances, close columns, exact fits."""

import time
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.linear_model._mixed._identifiability import flat_variances
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.dense_mixed_model import reduce_rows
from tests.helpers.slow import slow


def hospitals(n_level_columns=3):
    """Four hospitals of 20 rows: a row-level column, and columns that differ between hospitals."""
    rng = np.random.default_rng(0)
    codes, levels = np.repeat(np.arange(4), 20), rng.normal(size=(4, 3))
    x = rng.normal(size=80)
    y = x + levels[codes] @ [1.0, -1.0, 0.5] + rng.normal(size=4)[codes] + rng.normal(size=80)
    names = ["dose", "beds", "staff", "age"][: 1 + n_level_columns]
    X = np.column_stack([x, levels[codes, :n_level_columns]])
    return pd.DataFrame(X, columns=names), y, codes


@pytest.mark.parametrize(
    ("shape", "random", "uncertainty"),
    [
        ("diag", "intercept", "full"),
        ("diag", "all", "plug_in"),
        ("full", ["intercept", "dose"], "plug_in"),
    ],
)
def test_columns_that_tell_all_clients_apart_leave_no_variance(shape, random, uncertainty):
    X, y, codes = hospitals()
    prior = GaussianPrior(covariance_type=shape)
    model = PersonalizedLinearRegression(prior, random=random, uncertainty=uncertainty)
    message = r"between clients of 'intercept'.*'intercept', 'beds', 'staff', 'age' .*\b4 clients"
    with pytest.warns(UserWarning, match=message) as caught:
        model.fit(X, y, groups=codes)
    assert len(caught) == 1
    assert model.prior_.covariance[0, 0] == 0.0
    lower, upper = model.conf_int().loc[("between", "intercept")]
    assert (lower, upper) == (0.0, np.inf)


def test_the_clients_own_predictions_do_not_depend_on_a_flat_variance():
    X, y, codes = hospitals()
    with pytest.warns(UserWarning, match="'intercept'"):
        model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=codes)
    for variance in (0.0, 5.0):
        known = PersonalizedLinearRegression(
            GaussianPrior(covariance=variance),
            random="intercept",
            noise_variance=model.noise_variance_,
        ).fit(X, y, groups=codes)
        np.testing.assert_allclose(known.coef_, model.coef_, rtol=1e-8)
        np.testing.assert_allclose(
            known.predict(X, groups=codes), model.predict(X, groups=codes), rtol=1e-8
        )
        assert known.log_likelihood_ == pytest.approx(model.log_likelihood_, abs=1e-8)


@pytest.mark.parametrize("shape", ["spherical", "diag"])
def test_a_variance_of_which_some_rows_tell_is_estimated(shape):
    """One column fewer; or one variance for slopes as well, which rows tell of."""
    X, y, codes = hospitals(2 if shape == "diag" else 3)
    prior = GaussianPrior(covariance_type=shape)
    model = PersonalizedLinearRegression(prior, uncertainty="plug_in")
    model.fit(X, y, groups=codes)  # warnings are errors
    assert np.isfinite(model.conf_int().loc[("between", "intercept"), "upper"])


def test_which_variances_are_flat_by_ranks():
    """The definition: client by client a column's values, beside the population's columns."""
    rng = np.random.default_rng(1)
    codes = np.repeat(np.arange(3), 6)
    a, b = rng.normal(size=18), rng.normal(size=18)
    own_slopes = a[:, None] * (codes[:, None] == [0, 1])
    tables = {
        "level": np.column_stack([np.ones(18), b, a, codes == 0, codes == 1]),
        "slope": np.column_stack([np.ones(18), b, a, own_slopes]),
        "neither": np.column_stack([np.ones(18), b, a, codes == 0, rng.normal(size=18)]),
    }
    for name, columns in tables.items():
        reduced = reduce_rows(columns, a, codes, 3, 3, spectral=False)
        flat, spanning = flat_variances(reduced, 0)
        rank = np.linalg.matrix_rank(columns)
        for k in range(3):
            blocks = columns[:, [k]] * (codes[:, None] == np.arange(3))
            assert flat[k] == (np.linalg.matrix_rank(np.hstack([columns, blocks])) == rank)
        assert flat.tolist() == [name == "level", False, name == "slope"]
        needed = {"level": [0, 3, 4], "slope": [2, 3, 4], "neither": []}[name]
        assert np.flatnonzero(spanning).tolist() == needed


def test_many_clients_are_cheap_to_check():
    m = 200_000
    reduced = reduce_rows(np.ones((m, 2)), np.zeros(m), np.arange(m), m, 1, spectral=False)
    start = time.process_time()
    assert not flat_variances(reduced, 0)[0].any()
    assert time.process_time() - start < 1.0  # measured: 1 ms


EXACT = {"constant": (3.3, 0.0, 0.0), "line": (1.0, 2.0, 0.0), "levels": (1.0, 2.0, 1.0)}


@pytest.mark.parametrize("target", EXACT)
@pytest.mark.parametrize("random", ["intercept", *slow(["all"])])
def test_exact_fits_say_so(target, random):
    rng = np.random.default_rng(0)
    codes, X = np.repeat(np.arange(8), 6), rng.normal(size=(48, 2)) + 100.0
    level, slope, spread = EXACT[target]
    exact = level + slope * X[:, 0] + spread * rng.normal(size=8)[codes]
    who = "clients'" if spread else "population's"
    model = PersonalizedLinearRegression(random=random)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, exact, groups=codes)
    messages = [
        str(w.message) for w in caught if w.category is not ConvergenceWarning or not spread
    ]
    assert len(messages) == 1
    assert f"{who} coefficients fit all 48 rows exactly" in messages[0]
    noisy = exact + 1e-6 * rng.normal(size=48)
    model.fit(X, noisy, groups=codes)  # warnings are errors
    assert model.noise_variance_ == pytest.approx(1e-12, rel=0.6)


def test_a_known_noise_variance_is_no_matter_of_exact_fits():
    X, _, codes = hospitals(1)
    PersonalizedLinearRegression(noise_variance=1.0).fit(X, np.ones(80), groups=codes)


@pytest.mark.parametrize(("distance", "groups"), [(1e-6, "one"), (1e-8, "many")])
def test_columns_too_close_for_standard_errors_are_named(distance, groups):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(60, 3)), columns=["age", "weight", "dose"])
    X["index"] = X["age"] + X["dose"] + distance * rng.normal(size=60)
    codes = np.repeat(np.arange(10), 6) if groups == "many" else np.zeros(60)
    y = X["age"] + rng.normal(size=60)
    model = PersonalizedLinearRegression(random="intercept")
    with pytest.warns(UserWarning, match="'age', 'dose', 'index' are NaN") as caught:
        model.fit(X, y, groups=codes)
    assert len(caught) == 1
    assert np.isnan(model.population_coef_std_).tolist() == [True, False, True, True]
    exact = X.assign(index=X["age"] + X["dose"], none=0.0)
    with pytest.warns(UserWarning, match="'index' is 'age' [+] 'dose', 'none' is 0:") as caught:
        model.fit(exact, y, groups=codes)
    assert len(caught) == 1
    assert np.isnan(model.population_coef_std_).tolist() == [True, False, True, True, True]
