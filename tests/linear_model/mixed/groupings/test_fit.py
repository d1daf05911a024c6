"""Fits with further groupings against the covariance of all rows written out."""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import norm

from pfl_sklearn import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.linear_model._mixed._groupings import _equations, _products, _scaled_rows
from pfl_sklearn.priors import GaussianPrior, GroupingPrior
from tests.helpers.dense_groupings import Effects, predict, solve

N_ROWS, N_CLIENTS, NAMES = 200, 12, ("intercept", "x0", "x1")
DIAG = GaussianPrior()
FULL = GaussianPrior(covariance_type="full")
SLOPE = ["intercept", "x1"]


def table(seed=5, **sds):
    """Rows with clients, items (crossed), regions of clients (nested), weights and a target."""
    rng = np.random.default_rng(seed)
    sds = {"client": 1.0, "slope": 0.4, "item": 0.7, "item_slope": 0.5, "region": 0.6} | sds
    client, item = rng.integers(0, N_CLIENTS, N_ROWS), rng.integers(0, 7, N_ROWS)
    rows = pd.DataFrame({"x0": rng.normal(5, 2, N_ROWS), "x1": rng.normal(-3, 1, N_ROWS)})
    rows = rows.assign(item=item, region=client // 3)
    weights = rng.uniform(0.5, 2, N_ROWS)
    y = 1 + 0.5 * rows["x0"] - 0.2 * rows["x1"] + rng.normal(size=N_ROWS) / np.sqrt(weights)
    y += (sds["client"] * rng.normal(size=N_CLIENTS))[client]
    y += (sds["slope"] * rng.normal(size=N_CLIENTS))[client] * rows["x0"]
    y += (sds["item"] * rng.normal(size=7))[item]
    y += (sds["item_slope"] * rng.normal(size=7))[item] * rows["x1"]
    y += (sds["region"] * rng.normal(size=4))[client // 3]
    return rows, y.to_numpy(), client, weights


class Model(NamedTuple):
    """Priors of the clients and of the columns that group rows."""

    random: Any
    prior: GaussianPrior
    groupings: dict

    def fitted(self, rows, y, client, weights=None, **params):
        model = PersonalizedLinearRegression(
            self.prior,
            random=self.random,
            groupings=self.groupings,
            uncertainty="plug_in",
            unseen="population",
            tol=1e-8,
            **params,
        )
        return model.fit(
            rows[["x0", "x1", *self.groupings]], y, groups=client, sample_weight=weights
        )


MODELS = {
    "crossed and nested": Model(
        "all", DIAG, {"item": GroupingPrior(["intercept", "x1"]), "region": GroupingPrior()}
    ),
    "full clients": Model(["intercept", "x0"], FULL, {"item": GroupingPrior("x1")}),
    "full levels": Model("intercept", DIAG, {"item": GroupingPrior(SLOPE, "full", centered=False)}),
    "full both": Model(["intercept", "x0"], FULL, {"item": GroupingPrior(SLOPE, "full")}),
    "spherical": Model(
        "all", GaussianPrior(covariance_type="spherical"), {"region": GroupingPrior()}
    ),
    "slopes alone": Model("x1", DIAG, {"item": GroupingPrior(["x0", "x1"], centered=False)}),
}
KNOWN = {
    "client": Model("intercept", GaussianPrior(covariance=0.8), {"item": GroupingPrior(SLOPE)}),
    "levels": Model("intercept", DIAG, {"item": GroupingPrior(SLOPE, covariance=[0.5, 0.3])}),
    "both": Model(
        "intercept",
        GaussianPrior(covariance=0.8),
        {"item": GroupingPrior(SLOPE, covariance=[[0.5, 0.1], [0.1, 0.3]])},
    ),
    "none of the levels": Model(
        "all", DIAG, {"item": GroupingPrior(covariance=0.0), "region": GroupingPrior()}
    ),
    "mean": Model("intercept", GaussianPrior(mean=2.0), {"item": GroupingPrior()}),
}


def columns_of(rows, random):
    names = NAMES if isinstance(random, str) and random == "all" else np.atleast_1d(random)
    design = np.column_stack([np.ones(len(rows)), rows[["x0", "x1"]]])
    return design[:, [NAMES.index(name) for name in names]]


def effects_of(model, fitted, rows, client):
    """Effects of the clients and of all groupings at the fitted covariances."""
    clients = Effects(client, columns_of(rows, model.random), fitted.prior_.covariance)
    levels = [
        Effects(rows[name].to_numpy(), columns_of(rows, prior.random), prior.covariance)
        for name, prior in fitted.groupings_.items()
    ]
    return [clients, *levels]


def brute_force(model, fitted, rows, y, client, weights=None, factors=None):
    """Dense fit at the fitted variances; `factors` multiply the covariances and the noise."""
    effects = effects_of(model, fitted, rows, client)
    noise = fitted.noise_variance_
    if factors is not None:
        pairs = zip(effects, factors, strict=False)
        effects = [e._replace(covariance=factor * e.covariance) for e, factor in pairs]
        noise *= factors[-1]
    weights = np.ones(len(y)) if weights is None else weights
    design = columns_of(rows, "all")
    return solve(design, y, weights, effects, noise, fitted.method == "reml"), effects


SETTINGS = [("reml", None, False), ("ml", None, True), ("reml", 1.3, True), ("ml", 1.3, False)]
# With a covariance known and the noise not, a fit is a search in searches.
FEWER = [("reml", None, True), ("ml", 1.3, False)]
CASES = [(name, each) for k, name in enumerate(MODELS) for each in SETTINGS[k % 2 :: 2]]
CASES += product([name for name in KNOWN if name != "mean"], FEWER)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_fit(name, settings):
    """Everything at the estimated variances, and that the likelihood is maximal there."""
    model, (method, noise, weighted) = (MODELS | KNOWN)[name], settings
    rows, y, client, weights = table()
    weights = weights if weighted else None
    fitted = model.fitted(rows, y, client, weights, method=method, noise_variance=noise)
    dense, effects = brute_force(model, fitted, rows, y, client, weights)
    assert fitted.log_likelihood_ == pytest.approx(dense.log_likelihood, abs=1e-8)
    population = [fitted.population_intercept_, *fitted.population_coef_]
    assert_allclose(population, dense.population, atol=1e-8)
    errors = [fitted.population_intercept_std_, *fitted.population_coef_std_]
    assert_allclose(errors, np.sqrt(np.diag(dense.population_covariance)), rtol=1e-8)
    check_predictions(fitted, dense, rows, effects)
    assert_maximal(model, fitted, dense.log_likelihood, (rows, y, client, weights))


def check_predictions(fitted, dense, rows, effects):
    """Means, deviations and intervals of known and unknown clients and levels."""
    new = rows[:12].assign(x0=np.linspace(0, 9, 12), x1=np.linspace(-5, 1, 12))
    client = np.array([0, 3, -1, 5, -1, 2] * 2)
    for name in fitted.groupings_:
        new[name] = [0, -1, 2, 1, -1, 3, -1, 3, 2, -1, 0, -1]
    # Codes of -1 are ids that the fit did not see.
    clients = effects[0]._replace(codes=client, columns=_columns_like(effects[0], rows, new))
    others = [
        each._replace(codes=new[name].to_numpy(), columns=_columns_like(each, rows, new))
        for name, each in zip(fitted.groupings_, effects[1:], strict=True)
    ]
    design = columns_of(rows, "all")
    mean, variance = predict(dense, design, effects, columns_of(new, "all"), [clients, *others])
    features = new[fitted.feature_names_in_]
    found, std = fitted.predict(features, groups=client, return_std=True)
    assert_allclose(found, mean, atol=1e-7)
    assert_allclose(std, np.sqrt(variance), rtol=1e-8)
    for noise in (0.0, fitted.noise_variance_):
        bounds = fitted.predict_interval(features, groups=client, level=0.9, new_row=noise > 0)
        margin = norm.ppf(0.95) * np.sqrt(variance + noise)
        assert_allclose(bounds, [mean - margin, mean + margin], atol=1e-7)


def _columns_like(effects, rows, new):
    """The columns of new rows that those of the effects are of the rows of a fit."""
    design, target = columns_of(rows, "all"), columns_of(new, "all")
    return target @ np.linalg.lstsq(design, effects.columns)[0].round(6)


def test_known_mean():
    model = KNOWN["mean"]
    rows, y, client, weights = table()
    fitted = model.fitted(rows, y, client, weights)
    assert fitted.population_intercept_ == 2.0
    assert fitted.population_intercept_std_ == 0.0
    noise, effects = fitted.noise_variance_, effects_of(model, fitted, rows, client)
    design = columns_of(rows, ["x0", "x1"])
    dense = solve(design, y - 2.0, weights, effects, noise)
    assert fitted.log_likelihood_ == pytest.approx(dense.log_likelihood, abs=1e-8)
    assert_allclose(fitted.population_coef_, dense.population, atol=1e-8)


def test_a_slope_that_one_client_informs_stays_where_it_is():
    """The likelihood is the same for all its variances, which no rounding error may choose."""
    rng = np.random.default_rng(1)
    client, item, x = np.repeat(np.arange(20), 30), rng.integers(0, 15, 600), rng.normal(size=600)
    one = np.where(client == 3, np.arange(600) % 2, 0.0)
    slopes = np.array([[1.0, 0.5]]) * rng.normal(size=(20, 2))
    y = slopes[client, 0] + (1 + slopes[client, 1]) * x + rng.normal(size=15)[item] + 2 * one
    X, y = pd.DataFrame({"x": x, "one": one, "item": item}), y + rng.normal(size=600)
    fits = [
        PersonalizedLinearRegression(random=random, groupings=["item"]).fit(X, y, groups=client)
        for random in ("all", ["intercept", "x"])
    ]
    assert fits[0].log_likelihood_ == pytest.approx(fits[1].log_likelihood_, abs=1e-8)
    first, second = (fit.population_coef_[1] for fit in fits)
    assert first == pytest.approx(second, abs=0.5)  # rounding errors led to 11.9 for 2.2


@pytest.mark.parametrize("method", ["reml", "ml"])
def test_variances_at_zero(method):
    """A likelihood may be maximal at a variance of zero; the answers are those without it."""
    rows, y, client, _ = table(item=0.0, item_slope=0.0)
    # What items explain beyond the other columns is taken out.
    design = np.column_stack([np.ones(N_ROWS), rows[["x0", "x1"]], pd.get_dummies(client)])
    dummies = pd.get_dummies(rows["item"]).to_numpy(float)
    left = dummies - design @ np.linalg.lstsq(design, dummies)[0]
    y = y - left @ np.linalg.lstsq(left, y)[0]
    groupings = {"item": GroupingPrior(), "region": GroupingPrior()}
    fitted = Model("intercept", DIAG, groupings).fitted(rows, y, client, method=method)
    assert fitted.groupings_["item"].covariance == 0
    features = rows[["x0", "x1", "item", "region"]]
    std = fitted.predict(features, groups=client, return_std=True)[1]
    del groupings["item"]
    without = Model("intercept", DIAG, groupings).fitted(rows, y, client, method=method)
    assert fitted.log_likelihood_ == pytest.approx(without.log_likelihood_, abs=1e-8)
    expected = without.predict(features.drop(columns="item"), groups=client, return_std=True)
    assert_allclose(fitted.predict(features, groups=client), expected[0], atol=1e-7)
    assert_allclose(std, expected[1], rtol=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_singular_covariances(seed):
    """A full covariance whose maximum has rank one: turned a little it has a lower likelihood."""
    rows, y, client, weights = table(seed)
    model = MODELS["full levels"]
    fitted = model.fitted(rows, y, client, weights)
    dense, effects = brute_force(model, fitted, rows, y, client, weights)
    values, vectors = np.linalg.eigh(effects[1].covariance)
    assert values[0] < 1e-10 * values[1]
    root, rng = vectors * np.sqrt(np.maximum(values, 0)), np.random.default_rng(0)
    design = columns_of(rows, "all")
    for size in np.repeat([0.003, 0.03, 0.3], 10):
        turned = root + size * np.sqrt(values[1]) * rng.normal(size=(2, 2))
        others = [effects[0], effects[1]._replace(covariance=turned @ turned.T)]
        worse = solve(design, y, weights, others, fitted.noise_variance_)
        assert worse.log_likelihood < dense.log_likelihood + 1e-10


def assert_maximal(model, fitted, best, rows):
    """Other variances, one or all of them, have a lower likelihood."""
    known = [model.prior.covariance is not None]
    known += [model.groupings[name].covariance is not None for name in fitted.groupings_]
    known += [fitted.get_params()["noise_variance"] is not None]
    free = ~np.array(known)
    for signs in [*np.eye(len(free)), np.ones(len(free))]:
        for step in (0.98, 1.02):
            factors = np.where(free, step**signs, 1.0)
            if (factors != 1).any():
                worse, _ = brute_force(model, fitted, *rows, factors=factors)
                assert worse.log_likelihood < best + 1e-10


def answers(fitted, rows, client):
    """Estimates and predictions of a fit as one array."""
    mean, std = fitted.predict(rows, groups=client, return_std=True)
    levels = [fitted.groupings_[name].covariance.ravel() for name in sorted(fitted.groupings_)]
    scalars = [fitted.log_likelihood_, fitted.noise_variance_, fitted.population_intercept_]
    return np.concatenate([scalars, fitted.prior_.covariance.ravel(), *levels, mean, std])


@pytest.fixture(params=["dense", "iterative"])
def solver(request, monkeypatch):
    """Exact equations, and those of conjugate gradients with draws and random signs."""
    if request.param == "iterative":
        monkeypatch.setattr(_scaled_rows, "MOST_DENSE", 0)
        for module in (_products, _equations):
            monkeypatch.setattr(module, "MOST_EXACT", 10)
    return request.param


@pytest.mark.slow_but_first
def test_the_same_bits_for_every_run(solver):
    rows, y, client, weights = table()
    model = MODELS["crossed and nested"]
    first, second = (
        answers(model.fitted(rows, y, client, weights), rows, client) for _ in range(2)
    )
    assert_array_equal(first, second)


def test_the_order_of_groupings_changes_no_estimate(solver):
    """Neither that of the columns nor that of the priors."""
    rows, y, client, weights = table()
    model = MODELS["crossed and nested"]
    turned = model._replace(groupings=dict(reversed(model.groupings.items())))
    expected = answers(model.fitted(rows, y, client, weights), rows, client)
    found = turned.fitted(rows, y, client, weights)
    columns = rows[["x0", "x1", *turned.groupings]]
    found = answers(found, columns, client)
    n = len(found) - 2 * N_ROWS  # predictions add the same effects in another order
    assert_array_equal(found[:n], expected[:n])
    assert_allclose(found[n:], expected[n:], rtol=1e-12)


def test_the_order_of_rows_and_names_does_not_matter():
    rows, y, client, weights = table()
    model = MODELS["full both"]
    rows = rows[["x0", "x1", *model.groupings]]
    expected = answers(model.fitted(rows, y, client, weights), rows, client)
    order = np.random.default_rng(0).permutation(N_ROWS)
    fitted = model.fitted(rows.iloc[order], y[order], client[order], weights[order])
    assert_allclose(answers(fitted, rows, client), expected, rtol=1e-6, atol=1e-7)
    # Levels in the opposite order.
    renamed, ids = rows.assign(item=9 - rows["item"]), np.array([f"c{k:02}" for k in 99 - client])
    fitted = model.fitted(renamed, y, ids, weights)
    assert_allclose(answers(fitted, renamed, ids), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["reml", "ml"])
def test_clients_and_levels_change_places(method):
    """The model is the same whichever grouping is eliminated first."""
    rows, y, client, weights = table()
    rows = rows[["x0", "x1", "item"]]
    clients = Model(["intercept", "x0"], FULL, {"item": GroupingPrior(SLOPE, "full")})
    items = Model(SLOPE, FULL, {"person": GroupingPrior(["intercept", "x0"], "full")})
    first = clients.fitted(rows, y, client, weights, method=method)
    turned = rows.assign(person=client).drop(columns="item")
    second = items.fitted(turned, y, rows["item"], weights, method=method)
    assert first.log_likelihood_ == pytest.approx(second.log_likelihood_, abs=1e-8)
    assert first.noise_variance_ == pytest.approx(second.noise_variance_, rel=1e-6)
    assert_allclose(first.prior_.covariance, second.groupings_["person"].covariance, rtol=1e-4)
    assert_allclose(first.groupings_["item"].covariance, second.prior_.covariance, rtol=1e-4)
    expected = first.predict(rows, groups=client, return_std=True)
    found = second.predict(turned, groups=rows["item"], return_std=True)
    assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", [*MODELS, *KNOWN])
def test_small_groupings_are_exact_beside_large_ones(name, monkeypatch):
    """The iterative fit of groupings with up to `MOST_EXACT` effects uses no random signs."""
    rows, y, client, weights = table()
    model = (MODELS | KNOWN)[name]
    noise = 1.3 if name in KNOWN else None
    exact = model.fitted(rows, y, client, weights, noise_variance=noise)
    monkeypatch.setattr(_scaled_rows, "MOST_DENSE", 0)
    near = model.fitted(rows, y, client, weights, noise_variance=noise)
    assert np.isnan(near.log_likelihood_)
    columns = rows[["x0", "x1", *model.groupings]]
    scale = np.maximum(np.abs(answers(exact, columns, client)), 0.1)[1:]
    difference = (answers(near, columns, client) - answers(exact, columns, client))[1:]
    assert np.abs(difference / scale).max() < 1e-3


@pytest.fixture(scope="module")
def large():
    """Rows of 600 persons, 5,000 items, 150 places and 8 kinds, and their exact covariances."""
    n, sizes = 30_000, {"person": 600, "item": 5000, "place": 150, "kind": 8}
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({name: rng.integers(0, size, n) for name, size in sizes.items()})
    x = rng.normal(size=n)
    effects = rng.normal(size=(600, 2)) @ np.linalg.cholesky([[0.5, 0.1], [0.1, 0.2]]).T
    y = 1 + 0.5 * x + rng.normal(size=n) + (effects[rows["person"]] * np.stack([x**0, x], 1)).sum(1)
    for name, sd in (("item", 0.6), ("place", 0.3), ("kind", 0.4)):
        y += (sd * rng.normal(size=sizes[name]))[rows[name]]
    rows = rows.assign(x=x)
    # With the items eliminated there is room for all else in a dense factor.
    model = PersonalizedLinearRegression(
        random="intercept",
        groupings={
            "person": GroupingPrior(["intercept", "x"], "full"),
            "place": GroupingPrior(),
            "kind": GroupingPrior(),
        },
    ).fit(rows.drop(columns="item"), y, groups=rows["item"])
    assert np.isfinite(model.log_likelihood_)
    covariances = {name: prior.covariance for name, prior in model.groupings_.items()}
    return rows, y, covariances | {"item": model.prior_.covariance}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_traces_by_random_signs(large, seed, monkeypatch):
    monkeypatch.setattr(_equations, "PROBE_SEED", seed)
    rows, y, exact = large
    model = PersonalizedLinearRegression(FULL, groupings=["item", "place", "kind"])
    model.fit(rows.drop(columns="person"), y, groups=rows["person"])
    assert np.isnan(model.log_likelihood_)
    found = {name: prior.covariance for name, prior in model.groupings_.items()}
    for name, covariance in (found | {"person": model.prior_.covariance}).items():
        sds = np.sqrt(np.diag(exact[name]))
        difference = (covariance - exact[name]) / np.outer(sds, sds)
        assert np.abs(difference).max() < (0.002 if len(sds) > 1 or name == "item" else 1e-4)


@pytest.mark.slow
def test_a_search_by_random_signs_settles(monkeypatch):
    """Solutions are exact enough for twenty entries of two covariances, which would not stop."""
    monkeypatch.setattr(_scaled_rows, "MOST_DENSE", 0)
    for module in (_products, _equations):
        monkeypatch.setattr(module, "MOST_EXACT", 15)
    rng, q = np.random.default_rng(1), 4
    x, client, level = rng.normal(2, 1, (6000, q - 1)), *rng.integers(0, [[300], [100]], (2, 6000))
    design = np.column_stack([np.ones(6000), x])
    effects = rng.normal(size=(300, q)) @ rng.normal(size=(q, q)) / 2
    of_levels = rng.normal(size=(100, q)) @ rng.normal(size=(q, q)) / 2
    y = np.sum(design * (1 + effects[client] + of_levels[level]), axis=1) + rng.normal(size=6000)
    rows = pd.DataFrame(x, columns=["a", "b", "c"]).assign(level=level)
    prior = GroupingPrior(["intercept", "a", "b", "c"], "full")
    model = PersonalizedLinearRegression(FULL, groupings={"level": prior}, max_iter=30)
    assert model.fit(rows, y, groups=client).n_iter_ < 30


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
def test_rounding_to_single_precision_makes_no_column():
    """Coefficients of 170,000 forecast the next year by -1,400 where targets are 0 to 100."""
    rng = np.random.default_rng(0)
    groups, year = np.repeat(np.arange(100), 6), np.tile(np.arange(6.0), 100)
    prices, spent = 1 + 0.03 * year + 0.002 * year**2, np.exp(rng.normal(8.9, 0.2, 600))
    single = {"nominal": np.log(spent), "real": np.log(spent / prices)}
    X = pd.DataFrame({name: np.float32(values) for name, values in single.items()})
    X["prices"] = np.log(prices)
    X["school"] = [f"school {k}" for k in rng.integers(20, size=600)]
    y = rng.normal(size=100)[groups] + rng.normal(size=600)
    model = PersonalizedLinearRegression(groupings=["school"], random="intercept")
    model.fit(X, y, groups=groups)
    assert np.abs(model.population_coef_).max() < 1000


def test_columns_of_double_precision_may_nearly_agree():
    """Times in seconds that end minutes later, and powers of years, are columns of their own."""
    rng = np.random.default_rng(0)
    begin = 1.7e9 + np.floor(rng.uniform(0, 3.15e7, 600))
    double = np.column_stack(
        [begin, begin + np.floor(rng.uniform(0, 300, 600)), rng.normal(size=600)]
    )
    least = _scaled_rows._smallest_addition(double)
    assert least == 1e-9
    year = rng.integers(2000, 2020, 600).astype(float)
    for columns in (double, np.column_stack([year, year**2, year**3])):
        centred = columns - columns.mean(axis=0)
        assert len(_scaled_rows._independent(centred, columns, None)) == 3
    single = np.float32(rng.normal(8.9, 0.2, 600)).astype(float)
    single[:200] = single.mean()  # filled in
    assert 1e-6 < _scaled_rows._smallest_addition(np.column_stack([double, single])) < 1e-4


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
@pytest.mark.parametrize("error", [0.1, 0.01, 1e-3])  # of the total, in cents
@pytest.mark.parametrize("kind", [PersonalizedLinearRegression, PersonalizedLogisticRegression])
def test_a_total_of_amounts_in_cents_makes_no_column(kind, error):
    """Each amount adds enough to those before it; all together leave differences of cents."""
    rng = np.random.default_rng(0)
    n = 600
    principal = np.round(rng.gamma(2, 3000, n), 2)
    interest = np.round(principal * rng.uniform(0.05, 0.2, n), 2)
    fees = np.round(rng.gamma(1, 30, n) * (rng.random(n) < 0.05), 2)
    total = principal + interest + fees + error * rng.choice([-0.01, 0, 0.01], n)
    X = pd.DataFrame({"total": total, "principal": principal, "interest": interest, "fees": fees})
    groups, level = rng.integers(0, 20, n), rng.integers(0, 30, n).astype(str)
    y = total / 1000 + rng.normal(size=20)[groups] + rng.normal(size=n)
    y = (y > np.median(y)) if kind is PersonalizedLogisticRegression else y
    plain = kind(random="intercept").fit(X, y, groups=groups)
    model = kind(groupings=["level"], random="intercept")
    model.fit(X.assign(level=level), y, groups=groups)
    largest = np.abs(plain.population_coef_).max()
    assert np.abs(model.population_coef_).max() < 2 * largest
