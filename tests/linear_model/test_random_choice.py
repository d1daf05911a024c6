"""random="auto": rows choose between an intercept that varies and coefficients that all do."""

import re
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logsumexp
from sklearn.metrics import log_loss

from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    _random_choice,
    _random_choice as random_choice,
)
from pfl_sklearn.linear_model._design import resolve_design
from pfl_sklearn.linear_model._mixed._families import Poisson
from pfl_sklearn.linear_model._mixed._predictions import averaged_log_likelihoods
from pfl_sklearn.linear_model._mixed._table import RegressionTable
from pfl_sklearn.linear_model._random_choice import _assign_folds
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.statistics import ClientStatistics
from tests.helpers import public_tasks
from tests.helpers.exact_posterior import client_posterior, row_log_likelihood
from tests.helpers.slow import slow

ROUGH = {"quadrature": "laplace", "uncertainty": "plug_in", "max_iter": 50}


def draw(m, n, d, slopes, seed=0, kind="classes"):
    """X (m n, d), classes or counts, and clients whose slopes have a standard deviation."""
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, d))
    client_slopes = slopes * rng.normal(size=(m, d)) + rng.normal(size=d) / np.sqrt(d)
    predictors = 0.8 * rng.normal(size=m)[groups] + np.sum(X * client_slopes[groups], axis=1)
    if kind == "counts":
        return X, rng.poisson(np.exp(predictors)), groups
    if kind == "three":
        more = np.column_stack([predictors, -predictors, X[:, 0]])
        return X, (more + rng.gumbel(size=more.shape)).argmax(axis=1), groups
    return X, (rng.random(m * n) < expit(predictors)).astype(int), groups


def model_of(kind, **params):
    if kind == "counts":
        return PersonalizedPoissonRegression(unseen="population", **params)
    return PersonalizedLogisticRegression(unseen="population", **params)


@pytest.mark.parametrize(
    ("kind", "slopes"), [("classes", 0.0), *slow([("counts", 1.0), ("three", 1.0)])]
)
def test_it_is_the_fit_of_what_it_chooses(kind, slopes):
    X, y, groups = draw(24, 24, 2, slopes, kind=kind)
    model = model_of(kind).fit(X, y, groups=groups)
    chosen = "all" if slopes else "intercept"
    assert model.random_ == (["intercept", "x0", "x1"] if slopes else ["intercept"])
    gain = 1 - model.random_losses_["all"] / model.random_losses_["intercept"]
    assert gain > 0.02 if slopes else gain < 0.005
    asked = model_of(kind, random=chosen).fit(X, y, groups=groups)
    assert asked.random_losses_ is None
    np.testing.assert_array_equal(model.coef_, asked.coef_)
    assert model.log_likelihood_ == asked.log_likelihood_
    assert model.aic_ == asked.aic_


@pytest.mark.parametrize("kind", ["classes", *slow(["three"])])
def test_losses_are_those_of_averaged_probabilities(kind):
    m = 30 if kind == "classes" else 16
    X, y, groups = draw(m, 12, 2, 0.3, kind=kind)
    result = model_of(kind).fit(X, y, groups=groups).random_losses_
    table = RegressionTable(X, y, groups, m, None, 2, 0, [], True)
    folds = _assign_folds(table, np.random.default_rng(0))
    for random, loss in result.items():
        held = []
        for k in range(3):
            model = model_of(kind, tol=0.1, random=random, **ROUGH)
            model.fit(X[folds != k], y[folds != k], groups=groups[folds != k])
            chances = model.predict_proba(X[folds == k], groups=groups[folds == k])
            held.append(log_loss(y[folds == k], chances, labels=np.unique(y)))
        # Folds are as large as each other, and are asked in their order until it is clear.
        means = np.cumsum(held) / np.arange(1, 4)
        assert np.abs(means - loss).min() < 2e-5


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
# A level alone is no model of these slopes.
@pytest.mark.filterwarnings("ignore:The counts are overdispersed")
@pytest.mark.parametrize(("m", "level"), [(16, 0.0), *slow([(30, 9.0)])])
@pytest.mark.slow
def test_losses_of_counts_have_weights_and_offsets(m, level):
    """Against integrals by exact posteriors; large counts have narrow likelihoods, far off."""
    X, _, groups = draw(m, 12, 2, 0.2, kind="counts")
    X = X[:, :1]
    rng = np.random.default_rng(0)
    offset = level + rng.normal(size=12 * m)
    weights = np.where(offset > level, 4.0, 1.0)  # large losses are not average ones
    effects = rng.normal(size=(m, 2)) * [0.5, 0.1]
    y = rng.poisson(np.exp(offset + effects[groups, 0] + effects[groups, 1] * X[:, 0]))
    params = {"offset": offset, "sample_weight": weights}
    result = model_of("counts").fit(X, y, groups=groups, **params).random_losses_
    table = RegressionTable(X, y, groups, m, weights, 2, 0, [], True, offset)
    held = _assign_folds(table, np.random.default_rng(0)) == 0
    for random, loss in result.items():
        model = model_of("counts", tol=0.1, random=random, **ROUGH)
        more = {name: values[~held] for name, values in params.items()}
        model.fit(X[~held], y[~held], groups=groups[~held], **more)
        losses = np.empty(len(y))
        for client in range(m):
            at, new = ~held & (groups == client), held & (groups == client)
            coefficients, shares = client_posterior(model, X[at], y[at], offset[at], weights[at])
            design = np.column_stack([np.ones(new.sum()), X[new]])
            logs = row_log_likelihood(model, y[new])(coefficients @ design.T + offset[new])
            losses[new] = -logsumexp(logs, b=shares[:, None], axis=0)
        first = np.average(losses[held], weights=weights[held])
        assert first == pytest.approx(loss, rel=0.1)
        law = model._predictor_law(X[held], groups[held], offset[held])[0]
        got = -averaged_log_likelihoods(Poisson(), law, y[held])
        # Losses of hundreds of nats are beyond the reach of the exact posterior's grid.
        near = losses[held] < 200
        np.testing.assert_allclose(got[near], losses[held][near], rtol=5e-3, atol=5e-3)


def test_the_order_of_the_rows_decides_nothing():
    X, y, groups = draw(24, 12, 2, 0.3)
    losses = model_of("classes").fit(X, y, groups=groups).random_losses_
    assert len(losses) == 2
    rows = np.random.default_rng(0).permutation(len(y))
    again = model_of("classes").fit(X[rows], y[rows], groups=groups[rows])
    assert again.random_losses_ == pytest.approx(losses, rel=1e-9)


def test_many_clients_are_drawn_by_their_rows():
    """Slopes of 60 clients with 60 rows differ; among 1,000 of two rows nobody would find them."""
    X, y, groups = draw(1060, 60, 1, 1.5)
    keep = (groups < 60) | (np.arange(len(y)) % 60 < 1 + (groups % 2))
    drawn = []
    choose = random_choice._sample_clients

    def spy(table, rng):
        drawn.append(choose(table, rng))
        return drawn[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_choice, "_sample_clients", spy)
        model = model_of("classes").fit(X[keep], y[keep], groups=groups[keep])
    assert model.random_ == ["intercept", "x0"]
    assert drawn[0].n_clients == 500
    assert drawn[0].sizes.min() == 2
    assert np.sum(drawn[0].sizes == 60) > 30


def test_weights_that_a_fit_takes_are_none_too_small_for_a_trial():
    X, y, groups = draw(20, 30, 3, 1.0)
    model = model_of("classes").fit(X, y, groups=groups, sample_weight=np.full(len(y), 2e-6))
    assert model.random_losses_ is not None


def constant_column():
    X, y, groups = draw(20, 30, 3, 0.7)
    X[:, 2] = 1.0
    return X, y, groups


def one_client_with_several_rows():
    X, y, _ = draw(20, 30, 3, 1.0, kind="counts")
    return X[:33], y[:33], np.append(np.zeros(30), [1, 2, 3])


def a_class_in_one_fold():
    X, y, groups = draw(20, 20, 2, 1.0)
    y[0] = 2
    return X, y, groups


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
@pytest.mark.parametrize(
    ("rows", "kind", "params"),
    [
        (draw(12, 8, 26, 0.0), "classes", {}),  # few rows beside the columns
        (draw(40, 6, 5, 0.0), "classes", {}),
        (draw(12, 30, 3, 1.0), "classes", {"quadrature": 15}),  # of a single coefficient
        (one_client_with_several_rows(), "counts", {}),
        (a_class_in_one_fold(), "classes", {}),
        # Beside the intercept the coefficient of a constant column cannot vary.
        (constant_column(), "classes", {"prior": GaussianPrior(centered=False)}),
    ],
    ids=["8x26", "as many", "points", "one client", "rare class", "constant"],
)
def test_the_level_varies_where_there_is_no_trial(rows, kind, params):
    X, y, groups = rows
    model = model_of(kind, **params).fit(X, y, groups=groups)
    assert (model.random_, model.random_losses_) == (["intercept"], None)


def test_no_slope_of_a_column_of_clients_can_vary():
    _, y, groups = draw(30, 20, 1, 0.0)
    X = np.random.default_rng(1).normal(size=30)[groups, None]
    model = model_of("classes").fit(X, y, groups=groups)
    assert (model.random_, model.random_losses_) == (["intercept"], None)


def test_trials_are_silent():
    rng = np.random.default_rng(5)
    groups, X = np.repeat(np.arange(8), 8), rng.normal(size=(64, 2)) * [1, 1e3]
    X[:, 0] = rng.random(64) < 0.1
    y = rng.poisson(np.exp(3 + 2 * rng.normal(size=8)[groups] + X[:, 0] + X[:, 1] / 1e3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = model_of("counts", uncertainty="plug_in").fit(X, y, groups=groups)
    assert model.random_losses_ is not None


def test_every_client_and_every_class_is_in_all_folds():
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 30, 20)
    codes = rng.permutation(np.repeat(np.arange(20), sizes))
    y = rng.integers(0, 2, len(codes))
    table = RegressionTable(np.ones((len(y), 1)), y, codes, 20, None, 1, 0, [], True)
    folds = _assign_folds(table, rng)
    for code in range(20):
        rows = np.bincount(folds[codes == code], minlength=3)
        assert rows.max() - rows.min() <= 1
        ones = np.bincount(folds[(codes == code) & (y == 1)], minlength=3)
        assert ones.max() - ones.min() <= 1


def test_large_clients_decide_for_many_small_ones():
    X, y, groups = draw(40, 40, 2, 1.2)
    keep = (groups < 20) | (np.arange(len(groups)) % 40 == 0)
    model = model_of("classes").fit(X[keep], y[keep], groups=groups[keep])
    assert len(model.random_) == 3


@pytest.mark.parametrize(
    "params",
    [
        {"prior": GaussianPrior(covariance=0.5)},
        {"prior": GaussianPrior(mean=0.0)},
        {"prior": GaussianPrior(covariance_type="full")},
        {"fit_intercept": False},
    ],
    ids=repr,
)
def test_what_speaks_of_slopes_lets_all_vary(params):
    X, y, groups = draw(12, 20, 2, 0.0)
    model = model_of("classes", **params).fit(X, y, groups=groups)
    asked = model_of("classes", random="all", **params).fit(X, y, groups=groups)
    assert len(model.random_) == 2 + (params != {"fit_intercept": False})
    assert model.random_losses_ is None
    np.testing.assert_array_equal(model.coef_, asked.coef_)


@pytest.mark.slow
def test_rows_of_weight_0_are_absent_and_an_offset_explains_slopes():
    X, y, groups = draw(24, 30, 2, 0.0, kind="counts")
    offset = 0.7 * np.random.default_rng(1).normal(size=24)[groups] * X[:, 0]
    y = np.random.default_rng(2).poisson(np.exp(offset) + y)
    weights = np.where(np.arange(len(y)) % 3, 1.0, 0.0)
    known = model_of("counts").fit(X, y, groups=groups, offset=offset, sample_weight=weights)
    present = weights > 0
    few = X[present], y[present]
    again = model_of("counts").fit(*few, groups=groups[present], offset=offset[present])
    assert known.random_losses_ == pytest.approx(again.random_losses_, rel=1e-6)
    unknown = model_of("counts").fit(X, y, groups=groups)
    assert len(unknown.random_) == 3  # slopes differ by client, if no offset says so


def test_the_summary_and_a_client_say_what_was_chosen():
    X, y, groups = draw(16, 24, 2, 1.0)
    model = model_of("classes").fit(X, y, groups=groups)
    losses = model.summary().loc["fit", "estimate"].filter(like="held-out log-loss")
    assert losses.to_dict() == {
        f"held-out log-loss: {name}": loss for name, loss in model.random_losses_.items()
    }
    assert model.for_client(3).random_ == model.random_
    asked = model_of("classes", random="all").fit(X, y, groups=groups)
    assert not asked.summary().loc["fit"].index.str.startswith("held-out").any()


def test_the_word_comes_before_a_feature_of_that_name():
    """As it is the default, which nobody gave."""
    X, y, groups = draw(20, 20, 1, 0.0)
    named = pd.DataFrame(X, columns=["auto"])
    assert model_of("classes").fit(named, y, groups=groups).random_ == ["intercept"]
    slope = model_of("classes", random=["auto"]).fit(named, y, groups=groups)
    assert slope.random_ == ["auto"]
    design = resolve_design("auto", 1, True, ["auto"], ("all",))  # not a word of groupings
    assert design.random_names == ["auto"]


def test_a_single_client_has_all_coefficients():
    X, y, _ = draw(1, 60, 2, 0.0)
    model = model_of("classes").fit(X, y, groups=np.zeros(60))
    assert (len(model.random_), model.random_losses_) == (3, None)


def held_out(X, y, groups):
    """Mean losses of held-out rows by `random`, and that of the classes' frequencies."""
    codes = np.unique(groups, return_inverse=True)[1]
    table = RegressionTable(X, y, codes, codes.max() + 1, None, 1, 0, [], True)
    folds = _assign_folds(table, np.random.default_rng(1))
    losses = {name: [] for name in ("auto", "intercept", "all", "constant")}
    for k in range(3):
        selected, held = folds != k, folds == k
        for name in ("auto", "intercept", "all"):
            model = model_of("classes", random=name, uncertainty="plug_in")
            model.fit(X[selected], y[selected], groups=groups[selected])
            losses[name].append(
                log_loss(y[held], model.predict_proba(X[held], groups=groups[held]))
            )
        losses["constant"].append(log_loss(y[held], np.full(held.sum(), y[selected].mean())))
    return {name: np.mean(values) for name, values in losses.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.parametrize(
    ("m", "n", "d", "slopes"), [(50, 12, 26, 0.3), (200, 3, 5, 0.0)], ids=["8x26", "2x5"]
)
def test_the_default_is_safe_where_rows_are_few(m, n, d, slopes):
    """Two thirds of the rows are fitted: 8 of 26 columns, or 2 of 5."""
    X, y, groups = draw(m, n, d, slopes)
    losses = held_out(X, y, groups)
    assert losses["auto"] <= 1.01 * losses["intercept"]
    assert losses["auto"] <= losses["constant"]


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
@pytest.mark.parametrize("name", [*slow(["verbagg"]), "contraception"])
def test_the_default_is_safe_on_public_tables(name, data_home):
    X, y, groups = getattr(public_tasks, name)(data_home)[:3]
    losses = held_out(X.to_numpy(), y, groups)
    assert losses["auto"] <= 1.01 * losses["intercept"]
    assert losses["auto"] <= losses["constant"]
    assert losses["auto"] <= 1.01 * losses["all"]


# Linear models ------------------------------------------------------------------------------------


def wide_rows(slope=0.0, m=60, n=12, d=20, seed=0):
    """Clients with fewer rows than features, of which the first few may have slopes that differ."""
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, d))
    slopes = slope * rng.normal(size=(m, d)) * (np.arange(d) < 4)
    y = np.sum(X * slopes[groups], axis=1) + rng.normal(size=m)[groups] + rng.normal(size=m * n)
    return X, y, groups


@pytest.mark.parametrize(("slope", "chosen"), [(0.0, "intercept"), (1.0, "all")])
def test_likelihoods_choose_in_wide_tables(slope, chosen):
    X, y, groups = wide_rows(slope)
    model = PersonalizedLinearRegression().fit(X, y, groups=groups)
    asked = PersonalizedLinearRegression(random=chosen).fit(X, y, groups=groups)
    assert model.random_ == asked.random_
    np.testing.assert_array_equal(model.coef_, asked.coef_)
    pd.testing.assert_frame_equal(model.summary(), asked.summary())
    assert len(model.random_) == (21 if chosen == "all" else 1)
    of_statistics = PersonalizedLinearRegression().fit_statistics(
        ClientStatistics.from_rows(X, y, groups=groups)
    )
    assert of_statistics.random_ == asked.random_
    np.testing.assert_allclose(of_statistics.coef_, asked.coef_, atol=1e-6)
    parts = PersonalizedLinearRegression()
    for rows in np.array_split(np.arange(len(y)), 3):
        parts.partial_fit(X[rows], y[rows], groups=groups[rows])
    assert parts.random_ == asked.random_


def test_varying_slopes_may_fit_every_row_where_they_are_noise():
    X, y, groups = wide_rows(m=40, n=6, d=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = PersonalizedLinearRegression(random="all").fit(X, y, groups=groups)
    model = PersonalizedLinearRegression().fit(X, y, groups=groups)
    assert every.noise_variance_ < 0.5 < model.noise_variance_
    assert model.aic_ < every.aic_


@pytest.mark.parametrize(
    "params",
    [
        {"prior": GaussianPrior(covariance_type="spherical")},
        {"prior": GaussianPrior(covariance=np.eye(21), mean=np.zeros(21))},
        {"prior": "laplace", "noise_variance": 1.0},
        {"fit_intercept": False},
        {
            "epsilon": 500.0,
            "delta": 1e-4,
            "feature_bound": 3.0,
            "target_bound": 3.0,
            "noise_variance": 1.0,
        },
    ],
)
def test_nothing_is_chosen(params):
    X, y, groups = wide_rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PersonalizedLinearRegression(**params).fit(X, y, groups=groups)
    assert len(model.random_) == 20 + params.get("fit_intercept", True)


def many_coefficients(n_clients=12, n_rows=60):
    """Rows of three classes with ten features."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(n_clients), n_rows)
    X = rng.normal(size=(len(groups), 10))
    return X, rng.integers(3, size=len(groups)), groups


def test_long_fits_say_so_before(monkeypatch):
    X, y, groups = many_coefficients()
    monkeypatch.setattr(_random_choice, "_LONG_SECONDS", 0.01)
    model = PersonalizedLogisticRegression(random="all", max_iter=1)
    text = r"about 0 minutes .* since 22 coefficients of 12 clients vary, over 720 rows"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y, groups=groups)
    assert re.search(text, str(caught[0].message))  # first of all
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=groups)


@pytest.mark.parametrize("limit", [0.0, 60.0])
def test_long_trials_are_not_made(monkeypatch, limit):
    X, y, groups = many_coefficients()
    monkeypatch.setattr(_random_choice, "_MOST_TRIAL_SECONDS", limit)
    model = PersonalizedLogisticRegression().fit(X, y, groups=groups)
    assert (model.random_losses_ is None) == (limit == 0.0)


def test_several_classes_need_rows_for_the_coefficients_of_each():
    X, y, groups = many_coefficients(n_rows=15)  # 11 coefficients each of two contrasts
    assert PersonalizedLogisticRegression().fit(X, y, groups=groups).random_losses_ is None
    assert PersonalizedLogisticRegression().fit(X, y > 0, groups=groups).random_losses_ is not None
