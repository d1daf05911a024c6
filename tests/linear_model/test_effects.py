"""The table of effects: clients and levels, given the population or in all."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.priors import GaussianPrior, LaplacePrior
from tests.helpers.dense_groupings import Effects, posterior

COLUMNS = ["grouping", "level", "term", "estimate", "sd", "lower", "upper", "n_rows"]


def table(m=8, n=12, seed=0):
    rng = np.random.default_rng(seed)
    client, x = np.repeat(np.arange(m), n), rng.normal(1.0, 1.0, m * n)
    predictor = 0.3 + 0.5 * x + rng.normal(size=m)[client]
    return x[:, None], predictor, client, rng


@pytest.mark.parametrize("errors", ["conditional", "total"])
@pytest.mark.parametrize("covariance_type", ["diag", "full", "spherical"])
def test_one_grouping_equals_dense_algebra(covariance_type, errors):
    X, predictor, client, rng = table()
    y = predictor + rng.normal(size=8)[client] * X[:, 0] + rng.normal(size=len(client))
    prior = GaussianPrior(covariance_type=covariance_type)
    model = PersonalizedLinearRegression(prior, uncertainty="plug_in").fit(X, y, groups=client)
    columns = np.column_stack([np.ones(len(y)), X])
    grouping = Effects(client, columns, model.prior_.known_covariance(2))
    dense = posterior(columns, y, np.ones(len(y)), [grouping], model.noise_variance_)
    effects = model.effects(errors=errors)
    assert list(effects.columns) == COLUMNS
    assert_allclose(effects["estimate"], dense.estimates[:16], rtol=1e-7, atol=1e-9)
    variances = np.diag(getattr(dense, errors))[:16]
    assert_allclose(effects["sd"] ** 2, variances, rtol=1e-8)
    assert_array_equal(effects["term"], ["intercept", "x0"] * 8)
    assert_array_equal(effects["level"], np.repeat(np.arange(8), 2))
    assert set(effects["n_rows"]) == {12}


def test_total_errors_count_the_variances():
    X, predictor, client, rng = table(m=5)
    y = predictor + rng.normal(size=len(client))
    params = {"random": "intercept"}
    full = PersonalizedLinearRegression(**params).fit(X, y, groups=client)
    plug_in = PersonalizedLinearRegression(**params, uncertainty="plug_in").fit(X, y, groups=client)
    assert np.all(full.effects(errors="total")["sd"] > plug_in.effects(errors="total")["sd"])
    assert_array_equal(full.effects()["sd"], plug_in.effects()["sd"])


@pytest.mark.parametrize("random", ["intercept", pytest.param("all", marks=pytest.mark.slow)])
def test_averaged_deviations_from_a_known_mean_have_the_error_of_the_coefficients(random):
    X, predictor, client, rng = table()
    y = predictor + rng.normal(size=len(client))
    X = X[:, random == "intercept" :]
    prior = GaussianPrior(mean=np.zeros(1 + X.shape[1]))
    model = PersonalizedLinearRegression(prior, random=random).fit(X, y, groups=client)
    stds = np.column_stack([model.intercept_std_, model.coef_std_])
    assert_allclose(model.effects(errors="total")["sd"], stds.ravel(), rtol=1e-10)


@pytest.mark.parametrize(
    ("estimator", "n_terms"),
    [
        (PersonalizedLogisticRegression(random="all"), 2),
        (PersonalizedLogisticRegression(random="intercept"), 1),
        (PersonalizedPoissonRegression(random="intercept"), 1),
    ],
)
def test_links_have_the_clients_effects(estimator, n_terms):
    X, predictor, client, rng = table()
    if isinstance(estimator, PersonalizedPoissonRegression):
        y = rng.poisson(np.exp(predictor - 0.5))
    else:
        y = rng.random(len(client)) < 1 / (1 + np.exp(-predictor))
    model = estimator.fit(X, y, groups=client)
    conditional, total = model.effects(), model.effects(errors="total")
    assert len(conditional) == 8 * n_terms
    values = (model.intercept_ - model.population_intercept_)[:, None]
    if n_terms == 2:
        values = np.column_stack([values, model.coef_ - model.population_coef_])
    assert_allclose(conditional["estimate"], values.ravel())
    design = np.eye(2)[model._design.order]
    rows = np.tile(design[:n_terms], (8, 1, 1))
    given = model._posterior.given_population(rows, np.arange(8))
    assert_allclose(conditional["sd"] ** 2, np.einsum("naa->na", given).ravel(), rtol=1e-8)
    varies = conditional["sd"] > 0
    assert varies.any()
    assert np.all((total["sd"] > conditional["sd"])[varies])


def test_three_classes_have_terms_by_class():
    X, predictor, client, rng = table(m=6, n=30)
    y = np.digitize(predictor + rng.logistic(size=len(client)), [-0.5, 1.5])
    model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=client)
    effects = model.effects()
    assert_array_equal(effects["term"][:3], ["0: intercept", "1: intercept", "2: intercept"])
    values = model.intercept_ - model.population_intercept_
    assert_allclose(effects["estimate"], values.ravel(), atol=1e-12)
    assert np.all(effects["sd"] > 0)


def grouped():
    X, predictor, client, rng = table()
    frame = pd.DataFrame({"x": X[:, 0], "room": np.array(["a", "b", "c"])[rng.integers(0, 3, 96)]})
    y = predictor + rng.normal(size=3)[frame["room"].factorize()[0]] + rng.normal(size=96)
    model = PersonalizedLinearRegression(groupings=["room"], random="intercept")
    return frame, y, client, model


def test_levels_follow_the_clients_and_a_name_chooses():
    frame, y, client, model = grouped()
    model.fit(frame, y, groups=client)
    every = model.effects()
    assert_array_equal(every["grouping"], ["client"] * 8 + ["room"] * 3)
    rooms = model.effects("room", level=0.5)
    assert_array_equal(rooms["level"], ["a", "b", "c"])
    assert_array_equal(rooms["n_rows"], frame["room"].value_counts()[["a", "b", "c"]])
    assert_array_equal(rooms["estimate"], every["estimate"][8:])
    half = (rooms["upper"] - rooms["lower"]) / 2
    assert_allclose(half, 0.6744897501960817 * rooms["sd"], rtol=1e-10)
    assert len(model.effects("client")) == 8
    own = model.for_client(3).effects()
    expected = every[(every["grouping"] == "room") | (every["level"] == 3)]
    pd.testing.assert_frame_equal(own, expected.reset_index(drop=True))


def test_wrappers_hand_the_table_on():
    frame, y, client, model = grouped()
    model.set_params(random="all")
    wrapped = ClientColumn(model, "clinic").fit(frame.assign(clinic=client), y)
    expected = model.fit(frame, y, groups=client).effects()
    pd.testing.assert_frame_equal(wrapped.effects(), expected)
    assert_array_equal(wrapped.effects("client")["term"], ["intercept", "x"] * 8)
    assert_array_equal(wrapped.effects(feature_names=["age"])["term"][:2], ["intercept", "age"])


def test_bad_input_gets_a_sentence():
    frame, y, client, model = grouped()
    model.fit(frame, y, groups=client)
    with pytest.raises(ValueError, match=r"grouping must be one of \['client', 'room'\]; got 'x'"):
        model.effects("x")
    with pytest.raises(ValueError, match="'conditional' or 'total'; got 'marginal'"):
        model.effects(errors="marginal")
    with pytest.raises(ValueError, match="level"):
        model.effects(level=95)
    modes = PersonalizedLinearRegression(LaplacePrior()).fit(frame[["x"]], y, groups=client)
    with pytest.raises(AttributeError, match="LaplacePrior"):
        modes.effects()
    alone = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf))
    with pytest.raises(AttributeError, match="share a population"):
        alone.fit(frame[["x"]], y, groups=client).effects()
