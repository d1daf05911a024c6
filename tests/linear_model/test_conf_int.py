"""Confidence intervals of population coefficients and variance components."""

from functools import cache

import numpy as np
import pytest

from pfl_sklearn import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.inspection import likelihood_ratio_test
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import ProfiledLikelihood
from pfl_sklearn.priors import GaussianMixturePrior, GaussianPrior
from tests.helpers.dense_mixed_model import reduce_rows
from tests.helpers.slow import slow


def draw(m, n=6, seed=0):
    rng = np.random.default_rng(seed)
    codes, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, 1)) + 1.0
    theta = rng.normal(size=(m, 2)) * [1.0, 0.5]
    return X, theta[codes, 0] + X[:, 0] * (1 + theta[codes, 1]) + rng.normal(size=m * n), codes


def linear(prior, m=40, **params):
    X, y, codes = draw(m)
    return PersonalizedLinearRegression(prior, **params).fit(X, y, groups=codes)


@cache
def correlated():
    """A fit of slopes that are correlated with intercepts, whose errors are averaged in full."""
    return linear(GaussianPrior(covariance_type="full"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("covariance_type", ["diag", "full"])
def test_quantiles_and_information_agree_where_clients_are_many(covariance_type):
    prior = GaussianPrior(covariance_type=covariance_type)
    full, plug_in = (
        linear(prior, 400, uncertainty=kind).conf_int() for kind in ("full", "plug_in")
    )
    assert full.index.equals(plug_in.index)
    width = plug_in["upper"] - plug_in["lower"]
    assert np.all(width > 0)
    np.testing.assert_allclose(full.div(width, axis=0), plug_in.div(width, axis=0), atol=0.25)


def test_information_is_the_curvature_of_the_likelihood():
    """A random intercept: two parameters, by differences of the profile's own criterion."""
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(400), 5)
    y = rng.normal(size=400)[codes] + rng.normal(size=2000)
    X = rng.normal(size=(2000, 1))
    model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in", method="ml")
    model.fit(X, y, groups=codes)
    table = model.conf_int(0.9)
    columns = np.column_stack([np.ones(2000), X])
    reduced = reduce_rows(columns, y, codes, 400, 1, spectral=False)

    def criterion(between, noise):
        ratio = between / noise / reduced.scale[0] ** 2
        likelihood = ProfiledLikelihood(reduced, False, 0, noise)
        return likelihood.at(np.array([[np.sqrt(ratio)]])).criterion / 2

    at, step = np.array([model.prior_.covariance[0, 0], model.noise_variance_]), 1e-3
    curvature = np.empty((2, 2))
    for j, a in enumerate(np.eye(2) * step):
        for k, b in enumerate(np.eye(2) * step):
            curvature[j, k] = (
                criterion(*(at + a + b)) - criterion(*(at + a - b))
                - criterion(*(at - a + b)) + criterion(*(at - a - b))
            ) / (4 * step**2)  # fmt: skip
    std = np.sqrt(np.linalg.inv(curvature)[0, 0])
    lower, upper = table.loc[("between", "intercept")]
    assert (upper - lower) / 2 == pytest.approx(1.645 * std, rel=0.05)


@pytest.mark.slow
def test_rows_are_those_of_the_summary():
    model = correlated()
    table = model.conf_int(feature_names=["dose"])
    summary = model.summary(feature_names=["dose"])
    assert set(table.index) <= set(summary.index)
    assert ("between", "intercept, dose") in table.index
    inside = summary.loc[table.index, "estimate"].between(table["lower"], table["upper"])
    assert inside.all()


def test_given_variances_have_no_row():
    model = linear(GaussianPrior(covariance=0.5), noise_variance=1.0)
    assert set(model.conf_int().index.get_level_values("part")) == {"fixed"}
    model = linear(GaussianPrior(covariance=0.5))
    assert set(model.conf_int().index.get_level_values("part")) == {"fixed", "within"}


@pytest.mark.slow
def test_draws_beside_a_known_mean_write_nothing_to_the_terminal(capfd):
    """There is no population to draw, and LAPACK complains of a system of no equations."""
    table = linear(GaussianPrior(mean=1.0), 10).conf_int()
    assert np.all(table.loc["between"].notna())
    assert capfd.readouterr() == ("", "")


def test_low_rank_components_are_unknown():
    table = linear(GaussianPrior(covariance_type="low_rank")).conf_int()
    assert table.loc["between"].isna().all(axis=None)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_logistic_components(n_classes):
    X, y, codes = draw(60)
    classes = np.digitize(y, np.quantile(y, np.arange(1, n_classes) / n_classes))
    model = PersonalizedLogisticRegression(random="intercept").fit(X, classes, groups=codes)
    lower, upper = model.conf_int().loc[("between", "intercept")]
    assert 0 < lower < model.prior_.covariance[0, 0] < upper < 3 * model.prior_.covariance[0, 0]


def test_the_level_counts():
    model = correlated()
    narrow, wide = model.conf_int(0.5), model.conf_int(0.95)
    assert np.all(wide["upper"] - wide["lower"] > narrow["upper"] - narrow["lower"])
    for level in (0, 1, 95, "a"):
        with pytest.raises(ValueError, match=rf"level must be a number in \(0, 1\); got {level!r}"):
            model.conf_int(level)


def test_models_without_all_clients_have_none():
    model = linear(GaussianPrior(), random="intercept", uncertainty="plug_in")
    with pytest.raises(ValueError, match=r"conf_int.*all clients"):
        model.for_client(3).conf_int()
    X, y, codes = draw(40)
    private = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5),
        noise_variance=1.0,
        epsilon=5.0,
        feature_bound=6.0,
        target_bound=10.0,
    ).fit(X, y, groups=codes)
    with pytest.raises(ValueError, match=r"conf_int.*released"):
        private.release().conf_int()
    assert set(private.conf_int().index.get_level_values("part")) == {"fixed"}


def test_other_priors_and_single_clients_have_none():
    X, y, codes = draw(40)
    mixture = PersonalizedLinearRegression(GaussianMixturePrior(2)).fit(X, y, groups=codes)
    with pytest.raises(ValueError, match=r"conf_int needs a GaussianPrior.*GaussianMixturePrior"):
        mixture.conf_int()
    alone = PersonalizedLinearRegression().fit(X, y, groups=np.zeros(len(y)))
    with pytest.raises(ValueError, match=r"conf_int.*1 clients"):
        alone.conf_int()


@pytest.mark.parametrize("covariance", [np.inf, 1e12])
def test_clients_without_a_population_have_no_intervals(covariance):
    model = linear(GaussianPrior(covariance=covariance))
    with pytest.raises(ValueError, match="conf_int needs clients that share a population"):
        model.conf_int()


@pytest.mark.parametrize("uncertainty", ["full", "plug_in"])
def test_a_constant_response_has_intervals_of_no_length(uncertainty):
    X, _, codes = draw(6, 10)
    model = PersonalizedLinearRegression(uncertainty=uncertainty)
    with pytest.warns(UserWarning, match="population's coefficients fit all 60 rows exactly"):
        model.fit(X, np.full(60, 3.3), groups=codes)
    table = model.conf_int()
    assert (table["upper"] - table["lower"]).max() < 1e-12


def null_tables(n_tables, m=10, n=10, seed=3):
    """Tables of clients that are alike: the variance between them is 0."""
    rng, codes = np.random.default_rng(seed), np.repeat(np.arange(m), n)
    for _ in range(n_tables):
        yield rng.normal(size=(m * n, 1)), rng.normal(size=m * n), codes


@pytest.mark.parametrize(
    ("random", "uncertainty"),
    [*slow([("all", "full")]), ("all", "plug_in"), ("intercept", "full")],
)
def test_an_interval_contains_its_estimate(random, uncertainty):
    n_zeros = 0
    for X, y, codes in null_tables(2):
        model = PersonalizedLinearRegression(random=random, uncertainty=uncertainty)
        table = model.fit(X, y, groups=codes).conf_int()
        estimates = model.summary()["estimate"].reindex(table.index).fillna(0.0)
        assert np.all(table["lower"] <= estimates)
        assert np.all(estimates <= table["upper"])
        for term in ("intercept", "x0")[: len(estimates["between"])]:
            if estimates["between", term] == 0:
                n_zeros += 1
                assert table.loc[("between", term), "lower"] == 0
    assert n_zeros > 0


@pytest.mark.slow
def test_intervals_contain_a_true_variance_of_zero():
    """Fewer than 21 of 25 have a probability of .007 at a rate of .95, as many .01 at .6."""
    bounds = [
        PersonalizedLinearRegression(random="intercept")
        .fit(X, y, groups=codes)
        .conf_int()
        .loc[("between", "intercept"), "lower"]
        for X, y, codes in null_tables(25)
    ]
    assert np.sum(np.array(bounds) == 0) >= 21


def nested(X, y, codes, kind):
    """A model, the one in which a coefficient does not vary, and the name of that coefficient."""
    full, diag = (GaussianPrior(covariance_type=kind) for kind in ("full", "diag"))
    pooled = GaussianPrior(covariance=0.0)
    larger, smaller, term = {
        "intercept": ((diag, "intercept"), (pooled, "all"), "intercept"),
        "diag, intercept": ((diag, "all"), (pooled, "all"), "intercept"),
        "full, slope": ((full, "all"), (full, "intercept"), "x0"),
    }[kind]
    models = [
        PersonalizedLinearRegression(prior, random=random).fit(X, y, groups=codes)
        for prior, random in (larger, smaller)
    ]
    return *models, term


@pytest.mark.parametrize("kind", ["intercept", *slow(["full, slope", "diag, intercept"])])
def test_an_interval_starts_at_zero_where_the_likelihood_ratio_does_not_reject_zero(kind):
    rng = np.random.default_rng(2)
    codes, X = np.repeat(np.arange(12), 6), rng.normal(size=(72, 1)) + 0.5
    theta = rng.normal(size=(12, 2)) * [0.9, 0.54]
    y = theta[codes, 0] + theta[codes, 1] * X[:, 0] + rng.normal(size=72)
    larger, smaller, term = nested(X, y, codes, kind)
    p_value = likelihood_ratio_test(smaller, larger).p_value
    assert 1e-3 < p_value < 0.3
    for level, at_zero in ((1 - 1.01 * p_value, False), (1 - 0.99 * p_value, True)):
        lower = larger.conf_int(level).loc[("between", term), "lower"]
        assert (lower == 0) == at_zero


def test_single_rows_of_classes_do_not_count_as_informative_clients():
    """Errors are averaged in full as long as at most 100 clients have several rows."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(300), [1] * 240 + [2] * 60)
    X = rng.normal(size=(len(groups), 1))
    effects = rng.normal(size=300)[groups]
    labels = rng.random(len(groups)) < 1 / (1 + np.exp(-effects))
    classes = PersonalizedLogisticRegression(random="intercept").fit(X, labels, groups=groups)
    counts = PersonalizedPoissonRegression(random="intercept")
    counts.fit(X, rng.poisson(np.exp(effects)), groups=groups)
    assert classes._errors.averaged.share == 1
    assert 0 < counts._errors.averaged.share < 1
