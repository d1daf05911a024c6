"""PersonalizedPoissonRegression: limits, brute force, exposure, predictions, bad input."""

import pickle
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy import stats
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import xlogy
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import d2_tweedie_score
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import ResidualsDisplay, likelihood_ratio_test
from pfl_sklearn.linear_model import PersonalizedPoissonRegression
from pfl_sklearn.linear_model._fit_warnings import pearson_dispersion
from pfl_sklearn.metrics import ClientScorer, client_scores
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior, LaplacePrior
from tests.helpers.exact_posterior import client_posterior
from tests.helpers.oracles import read_oracle
from tests.helpers.slow import slow

NODES = np.linspace(-7, 7, 141)
WEIGHTS = stats.norm.pdf(NODES) / stats.norm.pdf(NODES).sum()
NB = "negative_binomial"


def draw(m=40, n=8, sd=0.7, dispersion=0.0, level=0.2, slopes=0.0, seed=0):
    """X (n_rows, 2), counts, clients and exposure; clients have other log rates."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(m), n))
    X, years = rng.normal(size=(m * n, 2)), rng.uniform(0.5, 2.0, m * n)
    effects = sd * rng.normal(size=m)[groups] + slopes * rng.normal(size=m)[groups] * X[:, 0]
    mean = years * np.exp(level + 0.5 * X[:, 0] - 0.3 * X[:, 1] + effects)
    if dispersion:
        mean = mean * rng.gamma(1 / dispersion, dispersion, m * n)
    return X, rng.poisson(mean), groups, years


def fit(rows, **params):
    X, y, groups, years = rows
    params = {"random": "intercept", **params}
    return PersonalizedPoissonRegression(**params).fit(X, y, groups=groups, exposure=years)


def marginal(rows, beta, sd, dispersion=0.0):
    """Log-likelihood of a random intercept, by a fine grid of effects."""
    X, y, groups, years = rows
    fixed = np.log(years) + np.column_stack([np.ones(len(y)), X]) @ beta
    mean = np.exp(fixed[:, None] + sd * NODES)
    if dispersion > 0:
        k = 1 / dispersion
        logs = stats.nbinom(k, k / (k + mean)).logpmf(y[:, None])
    else:
        logs = stats.poisson(mean).logpmf(y[:, None])
    by_client = np.zeros((groups.max() + 1, len(NODES)))
    np.add.at(by_client, groups, logs)
    highest = by_client.max(axis=1, keepdims=True)
    return float(np.sum(highest[:, 0] + np.log(np.exp(by_client - highest) @ WEIGHTS)))


@pytest.mark.parametrize("weighted", [True, False])
def test_one_client_is_poisson_regression(weighted):
    X, y, _, years = draw()
    weights = np.random.default_rng(1).uniform(0.5, 2, len(y)) if weighted else None
    with pytest.warns(UserWarning, match="one client"):
        model = PersonalizedPoissonRegression().fit(X, y, exposure=years, sample_weight=weights)
    rows = years if weights is None else years * weights
    peer = PoissonRegressor(alpha=0, tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    peer.fit(X, y / years, sample_weight=rows)
    np.testing.assert_allclose(model.coef_[0], peer.coef_, atol=1e-7)
    np.testing.assert_allclose(model.intercept_[0], peer.intercept_, atol=1e-7)
    expected = years * peer.predict(X)
    np.testing.assert_allclose(
        model.predict(X, exposure=years, integrate=False), expected, rtol=1e-6
    )
    logs = stats.poisson(expected).logpmf(y)
    total = logs.sum() if weights is None else weights @ logs
    assert model.log_likelihood_ == pytest.approx(total)


@pytest.mark.parametrize("random", ["intercept", "all"])
def test_no_variance_is_the_pooled_model(random):
    rows = X, y, _, years = draw()
    model = fit(rows, random=random, prior=GaussianPrior(covariance=0.0))
    peer = PoissonRegressor(alpha=0, tol=1e-12, solver="newton-cholesky")
    peer.fit(X, y / years, sample_weight=years)
    np.testing.assert_allclose(model.population_coef_, peer.coef_, atol=1e-7)
    np.testing.assert_allclose(model.coef_ - peer.coef_, 0, atol=1e-7)


@pytest.mark.parametrize("family", [NB, *slow(["poisson"])])
@pytest.mark.slow
def test_the_maximum_by_brute_force(family):
    dispersion = 0.6 if family == NB else 0.0
    rows = draw(m=25, n=10, dispersion=dispersion)
    model = fit(rows, family=family, tol=1e-6)
    sd = model.prior_.covariance[0, 0] ** 0.5
    beta = np.append(model.population_intercept_, model.population_coef_)
    value = marginal(rows, beta, sd, model.dispersion_)
    assert model.log_likelihood_ == pytest.approx(value, abs=1e-5)

    def minus(z):
        return -marginal(rows, z[:3], z[3], z[4] ** 2 if family == NB else 0.0)

    start = np.concatenate([beta, [sd], [model.dispersion_**0.5]])
    result = minimize(minus, start + 0.05, method="BFGS", options={"gtol": 1e-5})
    assert -result.fun <= value + 1e-6
    np.testing.assert_allclose(beta, result.x[:3], atol=2e-4)
    assert sd == pytest.approx(abs(result.x[3]), abs=1e-3)
    if family == NB:
        assert model.dispersion_ == pytest.approx(result.x[4] ** 2, abs=1e-3)


def test_negative_binomial_regression_of_one_client():
    X, y, _, years = rows = draw(sd=0.0, dispersion=0.8)
    with pytest.warns(UserWarning, match="one client"):
        model = PersonalizedPoissonRegression(family=NB).fit(X, y, exposure=years)
    design = np.column_stack([np.ones(len(y)), X])

    def minus(z):
        k, mean = np.exp(-z[3]), years * np.exp(design @ z[:3])
        return -stats.nbinom(k, k / (k + mean)).logpmf(y).sum()

    result = minimize(minus, [0.0, 0.0, 0.0, 0.0], method="BFGS", options={"gtol": 1e-5})
    beta = np.append(model.intercept_[0], model.coef_[0])
    np.testing.assert_allclose(beta, result.x[:3], atol=1e-4)
    assert np.log(model.dispersion_) == pytest.approx(result.x[3], abs=1e-3)
    assert model.log_likelihood_ == pytest.approx(-result.fun, abs=1e-5)
    pooled = fit(rows, family=NB, prior=GaussianPrior(covariance=0.0))
    assert pooled.log_likelihood_ == pytest.approx(-result.fun, abs=1e-5)


def test_published_fit_of_absent_days():
    """Without differences between clients, as R's glm.nb."""
    oracle = read_oracle("quine")
    rows = pd.DataFrame(oracle["rows"])
    levels = {"Eth": "N", "Sex": "M", "Age": ("F1", "F2", "F3"), "Lrn": "SL"}
    X = np.column_stack(
        [rows[name] == level for name in levels for level in np.atleast_1d(levels[name])]
    )
    model = PersonalizedPoissonRegression(GaussianPrior(covariance=0.0), family=NB, tol=1e-6)
    model.fit(1.0 * X, rows["Days"], groups=rows["Age"])
    coefficients = np.append(model.population_intercept_, model.population_coef_)
    # The published ones are up to 7e-5 away from the maximum, ours 3e-8.
    np.testing.assert_allclose(coefficients, oracle["coefficients"], atol=1e-4)
    assert model.log_likelihood_ == pytest.approx(oracle["log_likelihood"], abs=1e-6)
    assert 1 / model.dispersion_ == pytest.approx(oracle["theta"], rel=1e-4)
    # R has errors from the expected information, we have them from the observed one.
    errors = np.append(model.population_intercept_std_, model.population_coef_std_)
    np.testing.assert_allclose(errors, oracle["std_errors"], rtol=0.04)


def test_clients_may_be_far_apart():
    """Counts of .3 to 900: the search begins where clients differ by 3 %."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(10), 10)
    mean = np.array([80, 3, 8, 78, 900, 21, 4, 0.3, 1.6, 41.0])
    rows = np.zeros((100, 1)), rng.poisson(mean[groups]), groups, np.ones(100)
    for quadrature in ("auto", "laplace"):
        model = fit(rows, quadrature=quadrature)
        assert model.prior_.covariance[0, 0] ** 0.5 == pytest.approx(np.log(mean).std(), rel=0.1)
        assert model.population_intercept_ == pytest.approx(np.log(mean).mean(), abs=0.3)
    every = PersonalizedPoissonRegression().fit(rng.normal(size=(100, 1)), rows[1], groups=groups)
    assert every.intercept_.max() == pytest.approx(np.log(900), abs=0.1)


@pytest.mark.slow
def test_counts_without_extra_variance_have_no_dispersion():
    estimates = [fit(draw(seed=seed), family=NB).dispersion_ for seed in range(3)]
    assert min(estimates) == 0.0
    assert max(estimates) < 0.15
    poisson, larger = fit(draw(seed=0)), fit(draw(seed=0), family=NB)
    assert larger.log_likelihood_ >= poisson.log_likelihood_ - 1e-6


def test_slopes_and_a_full_covariance():
    rows = draw(m=150, n=20, slopes=0.4)
    model = fit(rows, random="all", prior=GaussianPrior(covariance_type="full"))
    sds = np.sqrt(np.diag(model.prior_.covariance))
    np.testing.assert_allclose(sds, [0.7, 0.4, 0.0], atol=0.12)


def test_one_row_a_client_tells_of_differences_but_not_beside_a_dispersion():
    rows = draw(m=400, n=1, level=1.0)
    assert fit(rows).prior_.covariance[0, 0] ** 0.5 == pytest.approx(0.7, abs=0.12)
    with pytest.raises(ValueError, match="each of the 400 clients has one row"):
        fit(rows, family=NB)


@pytest.mark.parametrize("family", ["poisson", NB])
def test_exposure_is_a_unit(family):
    X, y, groups, years = rows = draw(dispersion=0.3)
    model, days = fit(rows, family=family), fit((X, y, groups, 365 * years), family=family)
    assert days.log_likelihood_ == pytest.approx(model.log_likelihood_, abs=1e-6)
    shifted = days.population_intercept_ + np.log(365)
    assert shifted == pytest.approx(model.population_intercept_, abs=1e-4)
    other = PersonalizedPoissonRegression(random="intercept", family=family)
    other.fit(X, y, groups=groups, exposure=years**0.5, offset=np.log(years) / 2)
    assert other.log_likelihood_ == pytest.approx(model.log_likelihood_, abs=1e-9)
    np.testing.assert_allclose(
        other.predict(X, groups=groups, offset=np.log(years)),
        model.predict(X, groups=groups, exposure=years),
    )


def test_predictions_average_over_the_posterior():
    X, y, groups, years = rows = draw(n=2)
    model = fit(rows, unseen="population")
    for k in range(5):
        same = groups == groups[k]
        coefficients, weights = client_posterior(model, X[same], y[same], np.log(years[same]))
        expected = years[k] * np.exp(coefficients @ np.append(1.0, X[k]))
        params = {"groups": groups[k : k + 1], "exposure": years[k : k + 1]}
        mean, std = model.predict(X[k : k + 1], return_std=True, **params)
        assert mean[0] == pytest.approx(weights @ expected, rel=1e-4)
        np.testing.assert_array_equal(mean, model.predict(X[k : k + 1], **params))
        # The error of the estimates comes on top.
        spread = np.sqrt(weights @ expected**2 - (weights @ expected) ** 2)
        assert spread < std[0] < 1.3 * spread
    new = {"groups": np.full(5, 1000), "exposure": years[:5]}
    between = model.prior_.covariance[0, 0]
    mode, mean = (model.predict(X[:5], integrate=value, **new) for value in (False, True))
    np.testing.assert_allclose(mean, mode * np.exp(between / 2))
    std = model.predict(X[:5], return_std=True, **new)[1]
    assert np.all(std > mean * np.sqrt(np.expm1(between)))


@pytest.mark.slow
def test_intervals_cover_with_six_clients():
    """Plug-in intervals of clients cover .89, and normal ones of the variance .61."""
    hits, codes = [], np.repeat(np.arange(6), 15)
    for seed in range(50):
        rng = np.random.default_rng(seed)
        X, intercepts = rng.normal(size=(90, 1)), rng.normal(size=6) - 0.7
        y = rng.poisson(np.exp(intercepts[codes] + 0.5 * X[:, 0]))
        fitted = PersonalizedPoissonRegression(random="intercept").fit(X, y, groups=codes)
        lower, upper = (bound[:, 0] for bound in fitted.credible_interval())
        table = fitted.conf_int()
        variance, slope = table.loc[("between", "intercept")], table.loc[("fixed", "x0")]
        known = np.mean((lower <= intercepts) & (intercepts <= upper))
        hits.append([known, np.prod(variance - 1.0) <= 0, np.prod(slope - 0.5) <= 0])
        assert np.isfinite([*variance, *slope]).all()
    # Three standard errors of 50 tables; a coverage of .61 passes with a probability below 1e-4.
    lowest = 0.95 - 3 * np.sqrt(0.05 * 0.95 / 50)
    clients, variance, slope = np.mean(hits, axis=0)
    assert 0.92 < clients < 0.975
    assert min(variance, slope) > lowest


@pytest.mark.slow
def test_a_variance_of_zero_is_in_its_interval():
    hits = []
    for seed in range(20):
        bounds = fit(draw(m=20, n=10, sd=0.0, seed=seed)).conf_int().loc[("between", "intercept")]
        hits.append(bounds["lower"] == 0)
        assert bounds["upper"] > 0
    assert np.mean(hits) > 0.9


def test_models_of_one_coefficient_are_handed_out_without_rows():
    rows = draw()
    model = fit(rows)
    alone, loaded = model.for_client(3), pickle.loads(pickle.dumps(model))
    assert len(pickle.dumps(model)) < 100_000
    assert alone.intercept_std_[0] == pytest.approx(model.intercept_std_[3])
    np.testing.assert_allclose(loaded.intercept_std_, model.intercept_std_)
    pd.testing.assert_frame_equal(loaded.conf_int(), model.conf_int())
    plug_in = fit(rows, uncertainty="plug_in")
    assert np.all(plug_in.intercept_std_ <= model.intercept_std_)


def test_all_zeros_of_a_client_are_data():
    X, y, groups, years = draw()
    y[groups == 3] = 0
    model = fit((X, y, groups, years))
    assert np.isfinite(model.intercept_).all()
    assert model.intercept_[3] == min(model.intercept_)


def test_scores_are_shares_of_deviance():
    X, y, groups, years = rows = draw()
    model = fit(rows)
    predicted = model.predict(X, groups=groups, exposure=years)
    expected = d2_tweedie_score(y / years, predicted / years, power=1, sample_weight=years)
    assert model.score(X, y, groups=groups, exposure=years) == pytest.approx(expected)
    assert 0.2 < expected < 1
    one_rate = years * y.sum() / years.sum()
    deviances = [2 * np.sum(xlogy(y, y / mean) - y + mean) for mean in (predicted, one_rate)]
    assert expected == pytest.approx(1 - deviances[0] / deviances[1])


def test_criteria_and_summary():
    rows = draw(dispersion=0.5)
    poisson, larger = fit(rows), fit(rows, family=NB, uncertainty="plug_in")
    assert larger.aic_ == pytest.approx(2 * (5 - larger.log_likelihood_))
    assert larger.aic_ < poisson.aic_
    test = likelihood_ratio_test(poisson, larger)
    assert test.statistic == pytest.approx(2 * (larger.log_likelihood_ - poisson.log_likelihood_))
    assert test.p_value < 1e-4
    between, mean = larger.prior_.covariance[0, 0], rows[1].mean()
    latent = np.log1p(1 / mean + larger.dispersion_)
    assert larger.icc_ == pytest.approx(between / (between + latent))
    summary = larger.summary()
    assert summary.loc[("within", "dispersion"), "estimate"] == larger.dispersion_
    assert ("within", "dispersion") not in poisson.summary().index
    assert 0 < larger.marginal_r2_ < larger.conditional_r2_ < 1
    bounds = larger.conf_int()
    assert bounds.loc[("fixed", "x0")].between(0, 1).all()


def test_models_with_other_exposure_do_not_compare():
    X, y, groups, years = rows = draw()
    rates = fit(rows)
    slope = fit((X[:, :1], y, groups, years**2))
    with pytest.raises(ValueError, match="exposure or offset"):
        likelihood_ratio_test(slope, rates)


@pytest.mark.slow
def test_exposure_is_routed():
    X, y, groups, years = rows = draw()
    with sklearn.config_context(enable_metadata_routing=True):
        model = PersonalizedPoissonRegression(random="intercept")
        pipeline = make_pipeline(StandardScaler(), model)
        grid = {"personalizedpoissonregression__random": ["intercept", "all"]}
        search = GridSearchCV(pipeline, grid, cv=ClientKFold(2))
        params = {"groups": groups, "exposure": years}
        search.fit(X, y, **params)
        scorer = ClientScorer("neg_mean_poisson_deviance")
        deviance = cross_validate(
            pipeline, X, y, params=params, cv=ClientKFold(2), scoring=scorer, error_score="raise"
        )["test_score"]  # fmt: skip
    assert search.best_score_ > 0.2
    assert -2 < deviance.min() < 0
    table = client_scores(
        fit(rows), X, y, groups=groups, exposure=years, scoring="neg_mean_poisson_deviance"
    )
    assert table["gain"].mean() > 0
    one = search.best_estimator_[-1].for_client(3)
    members = groups == 3
    scaled = search.best_estimator_[0].transform(X[members])
    np.testing.assert_allclose(
        one.predict(scaled, exposure=years[members]),
        search.best_estimator_[-1].predict(scaled, groups=groups[members], exposure=years[members]),
    )


def test_exposure_may_be_a_column():
    X, y, groups, years = rows = draw()
    frame = pd.DataFrame(X, columns=["age", "size"]).assign(garage=groups, years=years)
    model = PersonalizedPoissonRegression(random="intercept")
    column = ClientColumn(model, "garage", exposure="years").fit(frame, y)
    by_hand = fit(rows)
    expected = by_hand.predict(X, groups=groups, exposure=years)
    np.testing.assert_allclose(column.predict(frame), expected)
    assert column.estimator_.feature_names_in_.tolist() == ["age", "size"]
    score = by_hand.score(X, y, groups=groups, exposure=years)
    assert column.score(frame, y) == pytest.approx(score)
    table = np.column_stack([np.log(years), X[:, 0], groups, X[:, 1]])
    positions = ClientColumn(model, 2, offset=0).fit(table, y)
    np.testing.assert_allclose(positions.predict(table), expected)
    scores = cross_val_score(column, frame, y, cv=2, scoring="neg_mean_poisson_deviance")
    assert np.isfinite(scores).all()
    with pytest.raises(ValueError, match="exposure column 'month' is not a column of X"):
        ClientColumn(model, "garage", exposure="month").fit(frame, y)
    with pytest.raises(ValueError, match="one column of X for two purposes"):
        ClientColumn(model, "garage", exposure=2).fit(frame, y)


def test_rates_with_weights_are_counts_with_exposure():
    X, y, groups, years = rows = draw()
    counts = fit(rows)
    model = PersonalizedPoissonRegression(random="intercept")
    with pytest.warns(
        UserWarning, match=r"^y holds.*such as \d.*PoissonRegressor.*exposure="
    ) as caught:
        model.fit(X, y / years, groups=groups, sample_weight=years)
    assert len(caught) == 1
    np.testing.assert_allclose(model.coef_, counts.coef_, rtol=1e-4)
    np.testing.assert_allclose(model.population_coef_std_, counts.population_coef_std_, rtol=1e-4)
    score = model.score(X, y / years, groups=groups, sample_weight=years)
    assert score == pytest.approx(counts.score(X, y, groups=groups, exposure=years), rel=1e-6)
    with pytest.raises(ValueError, match="counts, whole numbers"):  # quantiles of no distribution
        ResidualsDisplay.from_estimator(model, X, y / years, groups=groups)
    with pytest.raises(ValueError, match="counts, whole numbers"):
        model.set_params(family=NB).fit(X, y / years, groups=groups, sample_weight=years)


X4, Y4 = np.arange(8.0)[:, None], np.array([0, 1, 2, 0, 3, 1, 0, 2])


@pytest.mark.parametrize(
    ("y", "params", "message"),
    [
        ([-1, *Y4[1:]], {}, r"y must hold counts, whole numbers from 0 to 1e\+09; got -1"),
        ([0.5, *Y4[1:]], {"exposure": np.ones(8)}, r"y must hold counts.*got 0\.5.*exposure="),
        ([2e9, *Y4[1:]], {}, r"y must hold counts.*got 2e\+09"),
        (np.zeros(8), {}, "all 8 counts in y are 0"),
        (["a", *Y4[1:]], {}, "could not convert|must be"),
        (Y4, {"exposure": np.arange(8.0)}, "exposure must be above 0 in every row; got 0"),
        (Y4, {"exposure": np.ones(7)}, r"exposure must have shape \(8,\); got \(7,\)"),
        (Y4, {"exposure": np.full(8, np.inf)}, "exposure contains infinity"),
        (Y4, {"offset": np.full(8, np.nan)}, "offset contains NaN"),
        (Y4, {"offset": np.ones((8, 2))}, r"offset must have shape \(8,\); got \(8, 2\)"),
    ],
)
def test_bad_rows(y, params, message):
    model = PersonalizedPoissonRegression(random="intercept")
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(X4, y, groups=[0, 0, 1, 1, 2, 2, 3, 3], **params)
    assert not hasattr(model, "coef_")
    assert not hasattr(model, "_with_offset")


def test_bad_parameters_and_rows_to_predict():
    rows = X, y, groups, years = draw()
    with pytest.raises(TypeError, match=r"takes dense X.*\(ColumnTransformer\)\.$"):
        PersonalizedPoissonRegression().fit(csr_matrix(X), y, groups=groups)
    with pytest.raises(ValueError, match=r"does not go with PersonalizedPoissonRegression"):
        fit(rows, prior=LaplacePrior())
    with pytest.raises(ValueError, match=r"quadrature=15.*3 varying"):
        fit(rows, random="all", quadrature=15)
    model = fit(rows)
    with pytest.raises(ValueError, match=r"fitted with exposure.*np\.ones"):
        model.predict(X, groups=groups)
    with pytest.raises(ValueError, match="exposure must be above 0"):
        model.predict(X, groups=groups, exposure=-years)


def overdispersed_counts(seed, dispersion, m=60, n=10):
    """Counts of mean about 5, whose variance is 1 + 5 times the dispersion of their mean."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(m), n)
    X = rng.normal(size=(m * n, 1))
    mean = np.exp(1.6 + 0.5 * rng.normal(size=m)[groups] + 0.2 * X[:, 0])
    noise = rng.gamma(1 / dispersion, dispersion, size=m * n) if dispersion else 1.0
    return X, rng.poisson(mean * noise), groups


def test_overdispersed_counts_warn_once_and_name_the_family():
    X, y, groups = overdispersed_counts(0, 1.0)
    with pytest.warns(UserWarning, match=r"overdispersed.*family='negative_binomial'") as caught:
        PersonalizedPoissonRegression(random="intercept").fit(X, y, groups=groups)
    assert len(caught) == 1
    negative_binomial = PersonalizedPoissonRegression(
        random="intercept", family="negative_binomial"
    ).fit(X, y, groups=groups)
    assert negative_binomial.dispersion_ == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("level", [1.6, -4.0])
def test_poisson_counts_do_not_warn_of_dispersion(level):
    """Also those with rare events, of which single ones have large residuals."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        groups = np.repeat(np.arange(40), 12)
        y = rng.poisson(np.exp(level + 0.7 * rng.normal(size=40))[groups])
        y[0] = max(y[0], 1)
        PersonalizedPoissonRegression(random="intercept").fit(np.zeros((480, 1)), y, groups=groups)


def test_the_dispersion_is_pearsons_over_what_clients_leave():
    """Clients with an effect each take one degree of freedom where their spread is large."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(200), 3)
    y = rng.poisson(np.exp(3 + 2 * rng.normal(size=200))[groups])
    model = PersonalizedPoissonRegression(random="intercept")
    model.fit(np.zeros((600, 1)), y, groups=groups)
    coefficients = np.column_stack([model.intercept_, model.coef_])[:, None]
    estimates = SimpleNamespace(coefficients=coefficients, posterior=model._posterior, rows=None)
    columns = np.tile([1.0, 0.0], (600, 1))
    table = SimpleNamespace(columns=columns, codes=groups, y=y, offset=None, weights=None)
    dispersion, error = pearson_dispersion(estimates, table)
    mean = np.exp(model.intercept_[groups])
    assert dispersion == pytest.approx(np.sum((y - mean) ** 2 / mean) / 400, rel=0.05)
    assert abs(dispersion - 1) < 4 * error
