"""Classes and counts whose rows belong to several groupings."""

import pickle

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy.special import expit
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from pfl_sklearn import (
    ClientColumn,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    TableEncoder,
)
from pfl_sklearn.inspection import likelihood_ratio_test
from pfl_sklearn.inspection._residual_values import residuals_of
from pfl_sklearn.linear_model import NotEstimableWarning, SeparationWarning
from pfl_sklearn.linear_model._mixed._groupings import _scaled_rows
from pfl_sklearn.priors import GaussianPrior, GroupingPrior

N, N_USERS, N_MOVIES = 900, 30, 36
rng = np.random.default_rng(0)
USERS, MOVIES = rng.integers(N_USERS, size=N), rng.integers(N_MOVIES, size=N)
AGE, YEARS = rng.normal(size=N), rng.uniform(0.5, 2.0, size=N)
ETA = 0.5 * AGE + rng.normal(size=N_USERS)[USERS] + 0.8 * rng.normal(size=N_MOVIES)[MOVIES]
LIKED = np.where(rng.random(N) < expit(ETA), "yes", "no")
VIEWS = rng.poisson(YEARS * np.exp(ETA - 1))
TABLE = pd.DataFrame({"age": AGE, "movie": [f"movie {k:02d}" for k in MOVIES]})
NEW = pd.DataFrame({"age": [0.0, 0.0], "movie": ["movie 03", "unseen"]})


def classes(groupings="auto", X=TABLE, y=LIKED, groups=USERS, sample_weight=None, **params):
    params = {"random": "intercept", "groupings": groupings, "unseen": "population", **params}
    model = PersonalizedLogisticRegression(**params)
    return model.fit(X, y, groups=groups, sample_weight=sample_weight)


def counts(groupings="auto", X=TABLE, y=VIEWS, **params):
    params = {"random": "intercept", "groupings": groupings, "unseen": "population", **params}
    return PersonalizedPoissonRegression(**params).fit(X, y, groups=USERS, exposure=YEARS)


@pytest.fixture(scope="module")
def liked():
    return classes()


@pytest.fixture(scope="module")
def viewed():
    return counts()


@pytest.mark.slow
def test_groupings_take_part_in_a_fit(liked, viewed):
    for model in (liked, viewed):
        assert list(model.groupings_) == list(model.levels_) == ["movie"]
        assert model.coef_names_.tolist() == ["age"]
        assert len(model.effects("movie")) == N_MOVIES
        assert {"client", "movie"} == set(model.iccs_.index)
        assert 0.2 < model.groupings_["movie"].covariance[0, 0] < 2
        assert model.aic_ == pytest.approx(8 - 2 * model.log_likelihood_)


def test_expected_responses_sum_to_the_observed(liked, viewed):
    """The intercept's score is 0 at the maximum; what is left is Laplace's error."""
    chances = liked.predict_proba(TABLE, groups=USERS)
    assert chances[:, 1].sum() == pytest.approx((LIKED == "yes").sum(), rel=3e-3)
    expected = viewed.predict(TABLE, groups=USERS, exposure=YEARS)
    assert expected.sum() == pytest.approx(VIEWS.sum(), rel=3e-3)
    for model, total in ((liked, chances[:, 1].sum()), (viewed, expected.sum())):
        assert model.summary().loc[("fit", slice(None)), "estimate"].iloc[-1] == pytest.approx(
            total
        )


def test_predictions_average_over_clients_and_levels(liked):
    """By draws of an effect that was not seen: its variance counts, its mean is 0."""
    effects = liked.effects().set_index(["grouping", "level"])["estimate"]
    modes = liked.decision_function(NEW, groups=[3, 3], integrate=False)
    base = liked.population_intercept_ + effects["client", 3]
    assert_allclose(modes, [base + effects["movie", "movie 03"], base])
    draws = np.random.default_rng(0).normal(size=200_000)
    conditional = liked.effects("client").set_index("level")["sd"][3]
    spread = np.hypot(conditional, liked.groupings_["movie"].covariance[0, 0] ** 0.5)
    expected = expit(base + spread * draws).mean()
    assert liked.predict_proba(NEW, groups=[3, 3])[1, 1] == pytest.approx(expected, abs=0.01)
    lower, upper = liked.predict_interval(NEW, groups=[3, 3])
    widths = (upper - lower)[:, 1]
    assert widths[1] > 1.05 * widths[0]


def test_counts_of_new_levels_have_longer_intervals(viewed):
    ones = {"groups": [3, 3], "exposure": [1.0, 1.0]}
    mean, std = viewed.predict(NEW, return_std=True, **ones)
    assert std[1] / mean[1] > 1.5 * std[0] / mean[0]
    lower, upper = viewed.predict_interval(NEW, new_row=True, **ones)
    assert np.all(lower <= mean) and np.all(mean <= upper)


def test_errors_count_that_variances_are_estimated(liked):
    plain = classes(uncertainty="plug_in")
    assert liked.population_coef_ == pytest.approx(plain.population_coef_)
    assert liked.population_intercept_std_ > plain.population_intercept_std_


@pytest.mark.slow
def test_errors_are_those_of_all_parameters_together(liked):
    found = np.diag(liked.population_covariance_) ** 0.5
    assert_allclose(found, numerical_errors(), rtol=2e-3)


def numerical_errors():
    """Standard errors by differences of the likelihood that fits with known parameters report."""

    def value(parameters):
        beta, variances = parameters[:2], np.exp(parameters[2:])
        model = classes(
            {"movie": GroupingPrior(covariance=variances[1])},
            random=["intercept", "age"],
            prior=GaussianPrior(mean=beta, covariance=[variances[0], 0.0]),
            uncertainty="plug_in",
        )
        return model.log_likelihood_

    model = classes()
    variances = model.prior_.covariance[0, 0], model.groupings_["movie"].covariance[0, 0]
    beta = [model.population_intercept_, *model.population_coef_]
    best, steps = np.array([*beta, *np.log(variances)]), np.diag([0.05, 0.05, 0.1, 0.1])
    hessian = np.empty((4, 4))
    for a in range(4):
        for b in range(a + 1):
            ends = [
                one * two * value(best + one * steps[a] + two * steps[b])
                for one in (1, -1)
                for two in (1, -1)
            ]
            hessian[a, b] = hessian[b, a] = -sum(ends) / (4 * steps[a, a] * steps[b, b])
    return np.diag(np.linalg.inv(hessian))[:2] ** 0.5


@pytest.mark.slow
def test_weights_are_repeated_rows():
    again = np.random.default_rng(1).integers(3, size=N)
    rows = np.repeat(np.arange(N), again)
    repeated = classes(X=TABLE.iloc[rows], y=LIKED[rows], groups=USERS[rows])
    weighted = classes(sample_weight=again)
    assert weighted.log_likelihood_ == pytest.approx(repeated.log_likelihood_, rel=1e-8)
    assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-4)


@pytest.mark.slow
def test_exposure_is_an_offset(viewed):
    model = PersonalizedPoissonRegression(random="intercept", unseen="population")
    model.fit(TABLE, VIEWS, groups=USERS, offset=np.log(YEARS))
    assert model.log_likelihood_ == pytest.approx(viewed.log_likelihood_)
    with pytest.raises(ValueError, match="was fitted with exposure or offset"):
        model.predict(TABLE, groups=USERS)


@pytest.mark.slow
def test_row_levels_stand_for_overdispersion():
    """For counts, where the column is named; single classes say nothing of a variance."""
    noise = 0.6 * np.random.default_rng(2).normal(size=N)
    y = np.random.default_rng(3).poisson(YEARS * np.exp(ETA - 1 + noise))
    X = TABLE.assign(row=[f"row {k}" for k in range(N)])
    model = counts(["movie", "row"], X, y)
    assert 0.15 < model.groupings_["row"].covariance[0, 0] < 0.7
    with pytest.raises(ValueError, match="'row' has as many levels as rows"):
        classes(["movie", "row"], X)
    with pytest.raises(ValueError, match="'row' has as many levels as rows"):
        counts(["movie", "row"], X, y, family="negative_binomial")


@pytest.mark.slow
def test_dispersion_of_rows():
    noise = np.random.default_rng(2).gamma(2.0, 0.5, size=N)
    y = np.random.default_rng(3).poisson(YEARS * np.exp(ETA) * noise)
    model = counts(y=y, family="negative_binomial")
    assert 0.3 < model.dispersion_ < 0.75
    values = [
        model.log_likelihood_ - counts(y=y).log_likelihood_,
        counts(y=VIEWS, family="negative_binomial").log_likelihood_ - counts().log_likelihood_,
    ]
    assert values[0] > 20 and values[1] > -1e-3


@pytest.mark.slow
def test_dispersion_of_rows_whose_levels_are_far_apart():
    """The differences between levels would be taken for dispersion if a fit without them began."""
    draws = np.random.default_rng(1)
    means = np.exp(4 * ETA) * draws.gamma(20.0, 0.05, size=N)
    model = counts(y=draws.poisson(YEARS * means), family="negative_binomial")
    assert 0.03 < model.dispersion_ < 0.08
    assert model.groupings_["movie"].covariance[0, 0] > 3


@pytest.mark.slow
def test_a_penalty_keeps_dependent_columns_but_no_constant_ones():
    X = TABLE.assign(again=AGE, constant=3.0)
    with pytest.warns(NotEstimableWarning, match=r"of 'intercept', 'constant' are NaN"):
        model = classes(X=X, population_penalty=5.0)
    halves = model.population_coef_
    assert halves[0] == pytest.approx(halves[1]) and halves[2] == 0
    # Two equal columns share the penalty of one, at half the precision.
    alone = classes(population_penalty=2.5)
    assert_allclose(model.predict_proba(X, groups=USERS), alone.predict_proba(TABLE, groups=USERS))


def test_wide_tables_are_fitted_by_conjugate_gradients(liked, monkeypatch):
    monkeypatch.setattr(_scaled_rows, "_MOST_CELLS", N_MOVIES)
    model = classes()
    assert np.isnan(model.log_likelihood_)
    chances = model.predict_proba(TABLE, groups=USERS)
    assert_allclose(chances, liked.predict_proba(TABLE, groups=USERS), atol=0.03)


@pytest.mark.slow
def test_a_known_covariance_of_clients_has_no_shape_beside_larger_groupings():
    """It is the user's, at the user's zeros; only an estimated one is diagonal at the means."""
    assert classes()._centre is not None
    assert classes(prior=GaussianPrior(covariance=1.0))._centre is None


def test_offsets_without_information_are_refused():
    model = PersonalizedLogisticRegression(random="intercept")
    with pytest.raises(ValueError, match=r"the offset \(up to 200 in size\)"):
        model.fit(TABLE, LIKED, groups=USERS, offset=np.where(LIKED == "yes", -200.0, 200.0))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"quadrature": 7}, "quadrature=7 does not go with groupings"),
        ({"y": np.arange(N) % 3}, "groupings go with two classes; got 3 classes"),
        ({"prior": GaussianPrior(covariance_type="low_rank")}, "not of low rank"),
        ({"groupings": ["film"]}, "groupings names 'film'"),
    ],
    ids=["quadrature", "classes", "low rank", "unknown"],
)
def test_what_does_not_go_with_groupings(params, message):
    with pytest.raises(ValueError, match=message):
        classes(**params)


@pytest.mark.slow
def test_levels_of_one_class_get_a_weak_prior():
    y = np.where(MOVIES % 2, "yes", "no")
    with pytest.warns(SeparationWarning, match="No level of 'movie' has rows of two classes"):
        model = classes(y=y)
    assert np.isfinite(model.effects("movie")["estimate"]).all()


def test_comparisons_use_one_approximation(liked):
    plain = PersonalizedLogisticRegression(random="intercept").fit(
        TABLE[["age"]], LIKED, groups=USERS
    )
    with pytest.raises(ValueError, match="laplace"):
        likelihood_ratio_test(plain, liked)
    again = clone(plain).set_params(quadrature="laplace").fit(TABLE[["age"]], LIKED, groups=USERS)
    assert likelihood_ratio_test(again, liked).p_value < 1e-5


def test_copies_know_the_levels(liked):
    one = liked.for_client(3)
    rows = TABLE[USERS == 3]
    expected = liked.predict_proba(rows, groups=USERS[USERS == 3])
    assert_allclose(one.predict_proba(rows), expected)
    assert_allclose(
        pickle.loads(pickle.dumps(liked)).predict_proba(rows, groups=[3] * len(rows)), expected
    )


def test_residuals_use_the_levels(liked, viewed):
    """Without the effects of movies, residuals would differ by movie."""
    for model, y, options in ((liked, LIKED, None), (viewed, VIEWS, {"exposure": YEARS})):
        values = residuals_of(model, TABLE, y, USERS, None, False, 0, options)["residuals"]
        means = pd.Series(values).groupby(MOVIES).mean() * np.sqrt(np.bincount(MOVIES))
        assert 0.1 < np.mean(means**2) < 1.1
        # Residuals of levels that fit did not see have the spread of a level in their quantile.
        new = residuals_of(model, TABLE.assign(movie="new"), y, USERS, None, False, 0, options)[
            "residuals"
        ]
        means = pd.Series(new).groupby(MOVIES).mean() * np.sqrt(np.bincount(MOVIES))
        assert np.mean(means**2) > 2
        assert np.std(new) == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_pipelines_and_searches():
    X = TABLE.assign(user=USERS)
    passed = TableEncoder(many_levels="pass").set_output(transform="pandas")
    model = ClientColumn(
        make_pipeline(passed, PersonalizedLogisticRegression(random="intercept")), "user"
    )
    values = [None, {"movie": GroupingPrior()}]
    steps = "estimator__personalizedlogisticregression__groupings"
    without = X.drop(columns="movie")
    plain = clone(model).fit(without, LIKED).score(without, LIKED)
    assert model.fit(X, LIKED).score(X, LIKED) > plain
    search = GridSearchCV(model, {steps: values[1:]}, cv=3, error_score="raise").fit(X, LIKED)
    assert search.best_score_ > 0.6


@pytest.mark.slow
def test_a_variance_of_zero_changes_no_error():
    """The others still count as estimated."""
    y = np.where(np.random.default_rng(4).random(N) < expit(ETA), "yes", "no")
    model = classes(y=y, random=["intercept", "age"])
    assert model.prior_.covariance[1, 1] == 0
    alone = classes(y=y)
    assert_allclose(model.population_coef_std_, alone.population_coef_std_, rtol=1e-4)
    assert model.population_coef_std_ > classes(y=y, uncertainty="plug_in").population_coef_std_


@pytest.mark.slow
def test_errors_count_that_the_dispersion_is_estimated():
    """Against differences of the profile of a coefficient, which moves all other parameters."""
    draws = np.random.default_rng(5)
    y = draws.poisson(YEARS * np.exp(ETA - 1) * draws.gamma(0.5, 2.0, size=N))
    model, plug_in = (
        counts(y=y, family="negative_binomial", uncertainty=each) for each in ("full", "plug_in")
    )
    best, error = model.population_coef_[0], model.population_coef_std_[0]

    def profile(slope):
        offset = np.log(YEARS) + slope * AGE
        fit = PersonalizedPoissonRegression(
            random="intercept", family="negative_binomial", unseen="population"
        ).fit(TABLE[["movie"]], y, groups=USERS, offset=offset)
        return fit.log_likelihood_

    ends = profile(best + error), profile(best), profile(best - error)
    curvature = (2 * ends[1] - ends[0] - ends[2]) / error**2
    assert error == pytest.approx(curvature**-0.5, rel=0.01)
    assert error > plug_in.population_coef_std_[0]
