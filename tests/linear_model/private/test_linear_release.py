"""Private linear regression: accuracy, stated errors, and the clients' posteriors."""

import math

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from pfl_sklearn.linear_model import PersonalizedLinearRegression, _linear
from pfl_sklearn.linear_model._mixed import _reduction
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.blinded import blind, what_leaves

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning"),
    pytest.mark.filterwarnings("ignore:The released noise variance"),
]
ROW = {"unit": "row", "feature_bound": 1.3 * math.sqrt(5), "target_bound": 5.0}
CLIENT = {"feature_bound": 3.0, "target_bound": 6.0}


def one_table(seed, intercept=0.0, n=3000):
    """The setting of the accuracy bars: five features, |theta| = 1.5, noise 1."""
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=5)
    theta *= 1.5 / np.linalg.norm(theta)
    X = rng.normal(size=(n, 5))
    return X, intercept + X @ theta + rng.normal(size=n), theta


def many_clients(seed, m=2000, largest=15, between=0.25, mean=(0.5, 1.0, -1.0, 0.5)):
    """Clients with 1 to `largest` rows; intercept and three slopes vary."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(m), rng.integers(1, largest + 1, m))
    theta = np.array(mean) + math.sqrt(between) * rng.normal(size=(m, 4))
    X = rng.normal(size=(len(groups), 3))
    y = theta[groups, 0] + np.sum(X * theta[groups, 1:], axis=1) + rng.normal(size=len(groups))
    return X, y, groups, theta


def fit(X, y, groups=None, **params):
    return PersonalizedLinearRegression(**{"epsilon": 1.0, "random_state": 0, **params}).fit(
        X, y, groups=groups
    )


def population(model):
    """Intercept and slopes, and their standard errors."""
    return (
        np.append(model.population_intercept_, model.population_coef_),
        np.append(model.population_intercept_std_, model.population_coef_std_),
    )


def clients(model):
    return np.column_stack([model.intercept_, model.coef_])


# Accuracy and stated errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relation", "intercept", "bound"), [("add_remove", 0.0, 0.085), ("replace_one", 1.0, 0.140)]
)
def test_one_release_of_3000_rows(relation, intercept, bound):
    """Median L2 error over 48 seeds at epsilon 1 and delta 1e-5; noise variance estimated."""
    errors, scores = [], []
    for seed in range(48):
        X, y, theta = one_table(seed, intercept)
        model = fit(
            X, y, relation=relation, fit_intercept=intercept != 0, random_state=10**6 + seed, **ROW
        )
        errors.append(np.linalg.norm(model.population_coef_ - theta))
        scores.append((model.population_coef_ - theta) / model.population_coef_std_)
    assert np.median(errors) < bound
    assert 0.8 < np.mean(np.square(scores)) < 1.2


@pytest.mark.slow
def test_a_tighter_feature_bound_buys_noise_without_bias():
    """Most rows outside a bound of .8 sqrt(5): scaled by their features, they still fit."""
    params = {**ROW, "feature_bound": 0.8 * math.sqrt(5), "fit_intercept": False}
    errors, exact = [], []
    for seed in range(25):
        X, y, theta = one_table(seed)
        model = fit(X, y, random_state=10**6 + seed, **params)
        errors.append(np.linalg.norm(model.population_coef_ - theta))
        exact.append(fit(X, y, **{**params, "epsilon": 1e9}).population_coef_ @ theta / 2.25)
    assert np.median(errors) < 0.1
    assert np.mean(exact) == pytest.approx(1.0, abs=0.004)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "m"),
    [
        ({"epsilon": 1.0}, 1000),
        ({"epsilon": 1000.0, "relation": "add_remove"}, 300),
        ({"epsilon": 2.0, "unit": "row"}, 300),
    ],
)
def test_stated_errors_hold_with_several_clients(params, m):
    """From all noise to next to none, with clients of 1 to 15 rows."""
    scores, noise = [], []
    for seed in range(40):
        X, y, groups, _ = many_clients(seed, m)
        known = GaussianPrior(covariance=0.25)
        model = fit(X, y, groups, prior=known, random_state=seed, **CLIENT, **params)
        estimate, std = population(model)
        scores.append((estimate - [0.5, 1.0, -1.0, 0.5]) / std)
        noise.append(model.noise_variance_)
    assert 0.75 < np.mean(np.square(scores)) < 1.25
    assert np.abs(np.mean(scores, axis=0)).max() < 0.65
    assert np.mean(noise) == pytest.approx(1.0, abs=4 * np.std(noise) / math.sqrt(40) + 0.05)


@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
@pytest.mark.parametrize("intercept", [True, False])
def test_much_epsilon_is_least_squares(relation, intercept):
    X, y, _ = one_table(0, n=400)
    bounds = {"feature_bound": 10.0, "target_bound": 20.0, "relation": relation, "epsilon": 1e9}
    plain = LinearRegression(fit_intercept=intercept).fit(X, y)
    model = fit(X, y, unit="row", fit_intercept=intercept, **bounds)
    np.testing.assert_allclose(model.population_coef_, plain.coef_, atol=2e-3)
    assert model.population_intercept_ == pytest.approx(plain.intercept_, abs=2e-3)
    assert model.noise_variance_ == pytest.approx(np.mean((y - plain.predict(X)) ** 2), rel=2e-3)
    X, y, groups, _ = many_clients(0, 200)
    model = fit(
        X, y, groups, prior=GaussianPrior(covariance=0.25), fit_intercept=intercept, **bounds
    )
    weights = 1 / np.bincount(groups)[groups]
    plain = LinearRegression(fit_intercept=intercept).fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(model.population_coef_, plain.coef_, atol=5e-3)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_clients_keep_their_own_regression_when_the_noise_variance_is_lost(epsilon):
    X, y, groups, theta = many_clients(0, 300, largest=20)
    own = GaussianPrior(covariance=np.inf)
    alone = PersonalizedLinearRegression(own).fit(X, y, groups=groups)
    long = alone.n_samples_per_client_ >= 10  # the others have no error to speak of
    params = {"prior": GaussianPrior(covariance=0.25), "epsilon": epsilon, **CLIENT}
    for seed in range(3):
        with pytest.warns(UserWarning, match="released noise variance"):
            model = fit(X, y, groups, random_state=seed, **params)
        ratio = np.mean((clients(model) - theta)[long] ** 2)
        ratio /= np.mean((clients(alone) - theta)[long] ** 2)
        assert ratio < 1.05
        assert np.isnan(model.coef_std_).all()


def test_a_release_of_noise_is_warned_of_and_harms_nobody():
    """50 clients at epsilon .5: the population is noise, and the clients do not follow it.

    They are not much worse off than alone with the ridge that the population had, around 0.
    """
    X, y, groups, theta = many_clients(0, 50)
    prior = GaussianPrior(covariance=0.25)
    with pytest.warns(UserWarning, match=r"noise_variance.*bound.*epsilon"):
        model = fit(X, y, groups, prior=prior, epsilon=0.5, **CLIENT)
    assert 0 < model.noise_variance_ < 36.1
    errors, params = [], {"prior": prior, "epsilon": 0.5, "noise_variance": 1.0, **CLIENT}
    for seed in range(10):
        model = fit(X, y, groups, random_state=seed, **params)
        errors.append(np.mean((clients(model) - theta) ** 2))
        estimate, std = population(model)
        assert (std < 2 * 6.0 + 1e-9).all()
        assert np.abs(estimate).max() < 10
    ridge = GaussianPrior(mean=0.0, covariance=[144.0, 16.0, 16.0, 16.0])
    wide = PersonalizedLinearRegression(ridge, noise_variance=1.0)
    alone = np.mean((clients(wide.fit(X, y, groups=groups)) - theta) ** 2)
    assert np.mean(errors) < 1.2 * alone


@pytest.mark.parametrize("epsilon", [1.0, 1e9])
def test_rank_deficient_features_are_no_error(epsilon):
    """One feature twice and one that is zero: sums are known, the rest is stated as unknown."""
    X, y, theta = one_table(0)
    table = np.column_stack([X, X[:, 0], np.zeros(3000)])
    model = fit(table, y, **{**ROW, "feature_bound": 4.0, "epsilon": epsilon})
    found = model.population_coef_
    together = np.append(found[:5] + found[5] * np.eye(5)[0], found[6])
    wanted = np.append(theta, 0.0)
    combine = np.eye(7)[[0, 1, 2, 3, 4, 6]] + np.outer(np.eye(6)[0], np.eye(7)[5])
    spread = combine @ model.population_covariance_[1:, 1:] @ combine.T
    assert (np.abs(together - wanted) < 4 * np.sqrt(np.diag(spread))).all()
    assert np.abs(together - wanted)[:5].max() < (0.4 if epsilon == 1.0 else 0.06)
    assert model.population_coef_std_[[0, 5, 6]].min() > 0.5


# The clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("random", "unit"), [("all", "client"), ("intercept", "row"), (["intercept", 1], "client")]
)
def test_clients_are_posteriors_around_what_was_released(random, unit):
    """Against the conditional Gaussian, written out, with the error of the mean in the prior."""
    X, y, groups, _ = many_clients(0, 300, largest=9)
    params = {"prior": GaussianPrior(covariance=0.2), "random": random, "unit": unit, **CLIENT}
    model = fit(X, y, groups, epsilon=60.0, **params)
    design, (mean, _) = np.column_stack([np.ones(len(X)), X]), population(model)
    varies = {"all": [0, 1, 2, 3], "intercept": [0]}.get(random if isinstance(random, str) else "")
    varies = [0, 2] if varies is None else varies
    fixed = np.setdiff1d(np.arange(4), varies)
    prior, error = np.zeros((4, 4)), np.zeros((4, 4))
    prior[np.ix_(varies, varies)] = (0.2 * np.eye(4) + model.population_covariance_)[
        np.ix_(varies, varies)
    ]
    error[np.ix_(fixed, fixed)] = model.population_covariance_[np.ix_(fixed, fixed)]
    stds = np.column_stack([model.intercept_std_, model.coef_std_])
    for client in range(0, 300, 17):
        Z, target = design[groups == client], y[groups == client]
        inner = Z @ prior @ Z.T + model.noise_variance_ * np.eye(len(Z))
        gain = prior @ Z.T @ np.linalg.inv(inner)
        expected = mean + gain @ (target - Z @ mean)
        np.testing.assert_allclose(clients(model)[client], expected, rtol=1e-8)
        moved = np.eye(4) - gain @ Z
        covariance = prior - gain @ Z @ prior + moved @ error @ moved.T
        np.testing.assert_allclose(stds[client], np.sqrt(np.diag(covariance)), rtol=1e-7)
        x = np.array([1.0, 0.3, -0.7, 2.0])
        _, std = model.predict(x[None, 1:], groups=[client], return_std=True)
        assert std[0] == pytest.approx(math.sqrt(x @ covariance @ x))


def test_stated_errors_of_clients_hold():
    scores, params = [], {"prior": GaussianPrior(covariance=0.25), "noise_variance": 1.0, **CLIENT}
    for seed in range(10):
        X, y, groups, theta = many_clients(seed, 500, largest=8)
        model = fit(X, y, groups, random_state=seed, **params)
        stds = np.column_stack([model.intercept_std_, model.coef_std_])
        scores.append(np.mean(((clients(model) - theta) / stds) ** 2))
    assert np.mean(scores) == pytest.approx(1.0, abs=0.05)


def test_a_single_client_keeps_its_own_regression():
    X, y, _ = one_table(0, intercept=1.0)
    for params in ({}, {"prior": GaussianPrior(covariance=1.0)}):
        model = fit(X, y, **ROW, **params)
        plain = PersonalizedLinearRegression().fit(X, y)
        np.testing.assert_array_equal(model.coef_, plain.coef_)
        np.testing.assert_array_equal(model.coef_std_, plain.coef_std_)
        assert np.abs(model.population_coef_ - model.coef_[0]).max() > 1e-3
    assert np.isnan(fit(X, y, **ROW).prior_.covariance).all()


def test_nothing_is_released_of_a_known_population():
    X, y, groups, _ = many_clients(0, 30)
    prior = GaussianPrior(mean=[0.5, 1.0, -1.0, 0.5], covariance=0.25)
    model = fit(X, y, groups, prior=prior, noise_variance=1.0, **CLIENT)
    assert (model.privacy_.epsilon, model.privacy_.noise_std) == (0.0, None)
    plain = PersonalizedLinearRegression(prior, noise_variance=1.0).fit(X, y, groups=groups)
    np.testing.assert_allclose(clients(model), clients(plain), rtol=1e-9)
    np.testing.assert_allclose(model.coef_std_, plain.coef_std_, rtol=1e-9)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("random", "sizes", "d"),
    [
        ("all", np.full(4, 7), 2),
        ([0, 1], np.array([12, 1, 24, 5]), 20),
        ("all", np.array([12, 1, 24, 5]), 9),
        ("all", np.ones(2, dtype=int), 9),
    ],
    ids=["equal", "unequal and many features", "unequal", "two rows"],
)
def test_what_a_client_is_handed_does_not_tell_who_else_was_there(d, sizes, random, monkeypatch):
    """Under add/remove everything but the release is the same bits without any other client."""
    blind(monkeypatch)
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
    X, y = rng.normal(size=(len(groups), d)), rng.normal(size=len(groups))
    params = {"prior": GaussianPrior(covariance=0.25), "noise_variance": 1.0, "random": random}

    def table_and_fit(rows):
        table = X[rows], y[rows], groups[rows]
        return table, fit(*table, relation="add_remove", **params, **CLIENT)

    table, everybody = table_and_fit(groups >= 0)
    for absent in range(len(sizes)):
        smaller, others = table_and_fit(groups != absent)
        for name in ("coef_", "intercept_", "coef_std_", "intercept_std_"):
            present = np.delete(getattr(everybody, name), absent, axis=0)
            np.testing.assert_array_equal(getattr(others, name), present)
        first, second = (
            what_leaves(lambda X, y, groups, model=model: model, *rows, absent)
            for rows, model in ((table, everybody), (smaller, others))
        )
        assert {name for name in first if first[name] != second[name]} == set()


@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
def test_a_single_client_needs_no_covariance(relation):
    X, y, _ = one_table(0)
    wide = fit(X, y, prior=GaussianPrior(covariance=np.inf), relation=relation, **ROW)
    plain = fit(X, y, relation=relation, **ROW)
    np.testing.assert_array_equal(wide.population_coef_, plain.population_coef_)


def test_rows_too_large_to_be_squared_count_as_absent():
    X, y, groups, _ = many_clients(0, 40)
    params = {"prior": GaussianPrior(covariance=0.25), "noise_variance": 1.0, **CLIENT}
    absurd = X.copy()
    absurd[groups == 0] = 1.7e308
    before, after = fit(X, y, groups, **params), fit(absurd, y, groups, **params)
    assert np.isfinite(before.coef_).all()
    np.testing.assert_array_equal(after.coef_[0], after.population_coef_)
    assert np.isfinite(after.coef_).all()
    assert np.isfinite(after.coef_std_).all()


@pytest.mark.parametrize("bound", [1e-300, 1e300, 1e-60])
def test_bounds_that_no_number_can_square(bound):
    X, y, _ = one_table(0)
    with pytest.raises(ValueError, match=r"feature_bound.*1e-50.*1e\+50.*1e[+-]\d+"):
        fit(X, y, **{**ROW, "feature_bound": bound})


# The reduction ------------------------------------------------------------------------------------

KNOWN = GaussianPrior(mean=[0.5, 1.0, -1.0, 0.5], covariance=0.25)
REDUCED = {
    "clients": {},
    "clients without numbers": {"relation": "add_remove"},
    "rows": {"unit": "row"},
    "some coefficients": {"random": ["intercept", 1]},
    "no intercept": {"fit_intercept": False},
    "one client": {"prior": GaussianPrior(), "unit": "row"},
    "known population": {"prior": KNOWN, "noise_variance": 1.0},
}
every_reduction = pytest.mark.parametrize("params", REDUCED.values(), ids=REDUCED)


def fit_many(params, **more):
    """Clients of few rows and of many; a prior that is unknown is for one client."""
    X, y, groups, _ = many_clients(0, 15, largest=60)
    params = {"prior": GaussianPrior(covariance=0.25), **params}
    groups = np.zeros_like(groups) if params["prior"].covariance is None else groups
    model = fit(X.copy(), y.copy(), groups.copy(), epsilon=50.0, **CLIENT, **params, **more)
    mean, std = model.predict(X[:20], groups=groups[:20], return_std=True)
    names = ("population_covariance_", "noise_variance_", "shrinkage_", "n_samples_per_client_")
    found = [getattr(model, name) for name in names]
    return [*population(model), clients(model), mean, std, *found]


@every_reduction
def test_no_row_is_read_after_the_reduction(params, monkeypatch):
    """Rows that are destroyed as soon as they are reduced change no bit."""
    reduce, expected = _linear.private_table, fit_many(params)

    def reduce_and_destroy(design, features, rows, *more):
        table = reduce(design, features, rows, *more)
        features.fill(np.nan)
        rows.y.fill(np.nan)
        rows.clients.codes.fill(-1)
        return table

    monkeypatch.setattr(_linear, "private_table", reduce_and_destroy)
    for one, other in zip(fit_many(params), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@every_reduction
def test_blocks_and_jobs_change_no_bit_and_parts_of_clients_only_rounding(params, monkeypatch):
    expected = fit_many(params)
    whole = 6 * int(expected[-1].max())  # numbers of the longest client
    for cells, n_jobs, tolerance in ((whole, 1, 0.0), (whole, 2, 0.0), (1 << 5, 1, 1e-9)):
        monkeypatch.setattr(_reduction, "CACHED_CELLS", cells)
        for one, other in zip(expected, fit_many(params, n_jobs=n_jobs), strict=True):
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("intercept", [True, False])
def test_rows_in_single_precision_are_clipped_in_double(intercept):
    X, y, groups, _ = many_clients(0, 40)
    X = X.astype(np.float32)
    params = {"prior": GaussianPrior(covariance=0.25), "fit_intercept": intercept, **CLIENT}
    single, double = fit(X, y, groups, **params), fit(X.astype(float), y, groups, **params)
    np.testing.assert_array_equal(single.population_coef_, double.population_coef_)
    np.testing.assert_array_equal(single.coef_, double.coef_)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.filterwarnings("ignore")
def test_a_lone_client_whose_rows_are_all_absent(n):
    """No value of the data may end a private fit: an error would reveal it."""
    rng = np.random.default_rng(0)
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=1.0), epsilon=1.0, feature_bound=2.0, target_bound=5.0
    )
    X = rng.normal(size=(n, 2))
    fitted = model.fit(X, 1e170 * X[:, 0], groups=np.zeros(n, int))
    assert np.isfinite(fitted.coef_).all() and np.isfinite(fitted.population_coef_).all()
