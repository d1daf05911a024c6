"""random="auto": held-out rows choose between a level that varies and coefficients that all do."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss

from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.linear_model._design import resolve_design
from pfl_sklearn.linear_model._glmm._random_choice import _folds_within
from pfl_sklearn.linear_model._glmm._table import RegressionTable
from pfl_sklearn.priors import GaussianPrior
from tests.helpers import public_tasks


def draw(m, n, d, slopes, seed=0, kind="classes"):
    """X (m n, d), classes or counts, and clients whose slopes have a standard deviation."""
    rng = np.random.default_rng(seed)
    groups, X = np.repeat(np.arange(m), n), rng.normal(size=(m * n, d))
    own = slopes * rng.normal(size=(m, d)) + rng.normal(size=d) / np.sqrt(d)
    predictors = 0.8 * rng.normal(size=m)[groups] + np.sum(X * own[groups], axis=1)
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


@pytest.mark.parametrize("kind", ["classes", "three", "counts"])
@pytest.mark.parametrize("slopes", [0.0, 1.0])
def test_it_is_the_fit_of_what_it_chooses(kind, slopes):
    X, y, groups = draw(40, 24, 3, slopes, kind=kind)
    model = model_of(kind).fit(X, y, groups=groups)
    chosen = "all" if slopes else "intercept"
    assert model.random_ == (["intercept", "x0", "x1", "x2"] if slopes else ["intercept"])
    gain = 1 - model.random_losses_["all"] / model.random_losses_["intercept"]
    assert gain > 0.02 if slopes else gain < 0.005
    asked = model_of(kind, random=chosen).fit(X, y, groups=groups)
    assert asked.random_losses_ is None
    np.testing.assert_array_equal(model.coef_, asked.coef_)
    assert model.log_likelihood_ == asked.log_likelihood_
    assert model.aic_ == asked.aic_


@pytest.mark.parametrize("kind", ["classes", "three"])
def test_losses_are_those_of_averaged_probabilities(kind):
    X, y, groups = draw(30, 12, 2, 0.3, kind=kind)
    found = model_of(kind).fit(X, y, groups=groups).random_losses_
    table = RegressionTable(X, y, groups, 30, None, 2, 0, [], True)
    folds = _folds_within(table, np.random.default_rng(0))
    for random, loss in found.items():
        held = []
        for k in range(3):
            options = {"random": random, "quadrature": "laplace", "uncertainty": "plug_in"}
            model = model_of(kind, tol=0.1, **options)
            model.fit(X[folds != k], y[folds != k], groups=groups[folds != k])
            chances = model.predict_proba(X[folds == k], groups=groups[folds == k])
            held.append(log_loss(y[folds == k], chances, labels=np.unique(y)))
        # Folds are as large as each other, and are asked in their order until it is clear.
        means = np.cumsum(held) / np.arange(1, 4)
        assert np.abs(means - loss).min() < 2e-5


def test_every_client_and_every_class_is_in_all_folds():
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 30, 20)
    codes = rng.permutation(np.repeat(np.arange(20), sizes))
    y = rng.integers(0, 2, len(codes))
    table = RegressionTable(np.ones((len(y), 1)), y, codes, 20, None, 1, 0, [], True)
    folds = _folds_within(table, rng)
    for code in range(20):
        rows = np.bincount(folds[codes == code], minlength=3)
        assert rows.max() - rows.min() <= 1
        ones = np.bincount(folds[(codes == code) & (y == 1)], minlength=3)
        assert ones.max() - ones.min() <= 1


@pytest.mark.parametrize(
    ("m", "n", "d"), [(50, 8, 26), (200, 2, 5), (100, 6, 5)], ids=["8x26", "2x5", "as many"]
)
def test_clients_with_few_rows_get_a_level_without_a_trial(m, n, d):
    X, y, groups = draw(m, n, d, 0.0)
    model = model_of("classes").fit(X, y, groups=groups)
    assert model.random_ == ["intercept"]
    assert model.random_losses_ is None


def test_large_clients_decide_for_many_small_ones():
    X, y, groups = draw(40, 40, 2, 1.2)
    keep = (groups < 20) | (np.arange(len(groups)) % 40 == 0)
    model = model_of("classes").fit(X[keep], y[keep], groups=groups[keep])
    assert len(model.random_) == 3


def test_no_slope_can_vary():
    """A column that is constant within clients stays common, so "all" is the level."""
    _, y, groups = draw(30, 20, 1, 0.0)
    own = np.random.default_rng(1).normal(size=30)[groups, None]
    model = model_of("classes").fit(own, y, groups=groups)
    assert (model.random_, model.random_losses_) == (["intercept"], None)


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
    X, y, groups = draw(30, 20, 2, 0.0)
    model = model_of("classes", **params).fit(X, y, groups=groups)
    asked = model_of("classes", random="all", **params).fit(X, y, groups=groups)
    assert len(model.random_) == 2 + (params != {"fit_intercept": False})
    assert model.random_losses_ is None
    np.testing.assert_array_equal(model.coef_, asked.coef_)


def test_a_class_that_only_one_fold_has_leaves_the_level():
    X, y, groups = draw(20, 20, 2, 1.0)
    y[0] = 2
    model = model_of("classes").fit(X, y, groups=groups)
    assert (model.random_, model.random_losses_) == (["intercept"], None)


def test_weights_and_offsets_take_part():
    X, y, groups = draw(40, 30, 2, 0.0, kind="counts")
    offset = 2.0 * np.random.default_rng(1).normal(size=40)[groups] * X[:, 0]
    y = np.random.default_rng(2).poisson(np.exp(offset) + y)
    weights = np.where(np.arange(len(y)) % 3, 1.0, 0.0)
    known = model_of("counts").fit(X, y, groups=groups, offset=offset, sample_weight=weights)
    present = weights > 0
    few = X[present], y[present]
    again = model_of("counts").fit(*few, groups=groups[present], offset=offset[present])
    assert known.random_losses_ == again.random_losses_
    unknown = model_of("counts").fit(X, y, groups=groups)
    assert len(unknown.random_) == 3  # slopes differ by client, if no offset says so
    assert unknown.random_losses_["all"] != known.random_losses_["all"]


def test_the_summary_and_a_client_say_what_was_chosen():
    X, y, groups = draw(40, 24, 2, 1.0)
    model = model_of("classes").fit(X, y, groups=groups)
    losses = model.summary().loc["fit", "estimate"].filter(like="held-out log-loss")
    assert losses.to_dict() == {
        f"held-out log-loss: {name}": loss for name, loss in model.random_losses_.items()
    }
    assert model.for_client(3).random_ == model.random_
    asked = model_of("classes", random="all").fit(X, y, groups=groups)
    assert not asked.summary().loc["fit"].index.str.startswith("held-out").any()


def test_the_word_is_ambiguous_or_unknown():
    X, y, groups = draw(20, 20, 1, 0.0)
    named = pd.DataFrame(X, columns=["auto"])
    with pytest.raises(ValueError, match=r"random='auto' is ambiguous.*\['auto'\]"):
        model_of("classes").fit(named, y, groups=groups)
    with pytest.raises(ValueError, match="random holds 'auto', which is neither"):
        PersonalizedLinearRegression(random="auto").fit(X, y, groups=groups)
    design = resolve_design("auto", 1, True, ["auto"])  # not a word of the linear model
    assert design.random_names == ["auto"]


def held_out(X, y, groups, n_folds=5):
    """Mean losses of held-out rows by `random`, and that of the classes' frequencies."""
    codes = np.unique(groups, return_inverse=True)[1]
    table = RegressionTable(X, y, codes, codes.max() + 1, None, 1, 0, [], True)
    folds = _folds_within(table, np.random.default_rng(1))
    losses = {name: [] for name in ("auto", "intercept", "all", "constant")}
    for k in range(3):
        kept, held = folds != k, folds == k
        for name in ("auto", "intercept", "all"):
            model = model_of("classes", random=name, uncertainty="plug_in")
            model.fit(X[kept], y[kept], groups=groups[kept])
            losses[name].append(
                log_loss(y[held], model.predict_proba(X[held], groups=groups[held]))
            )
        losses["constant"].append(log_loss(y[held], np.full(held.sum(), y[kept].mean())))
    return {name: np.mean(values) for name, values in losses.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.parametrize(("m", "n", "d"), [(50, 12, 26), (200, 3, 5)], ids=["8x26", "2x5"])
@pytest.mark.parametrize("slopes", [0.0, 0.3])
def test_the_default_is_safe_where_rows_are_few(m, n, d, slopes):
    """Two thirds of the rows are fitted: 8 of 26 columns, or 2 of 5."""
    X, y, groups = draw(m, n, d, slopes)
    losses = held_out(X, y, groups)
    assert losses["auto"] <= 1.01 * losses["intercept"]
    assert losses["auto"] <= losses["constant"]


@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.parametrize("name", ["heart", "landmine", "verbagg", "contraception"])
def test_the_default_is_safe_on_public_tables(name, data_home):
    X, y, groups = getattr(public_tasks, name)(data_home)
    losses = held_out(X.to_numpy(), y, groups)
    assert losses["auto"] <= 1.01 * losses["intercept"]
    assert losses["auto"] <= losses["constant"]
    if name in ("verbagg", "contraception"):
        assert losses["auto"] <= 1.01 * losses["all"]
