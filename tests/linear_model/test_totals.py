"""Totals of predictions: joint errors against dense formulas, coverage, tables and refusals."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.priors import GaussianPrior, LaplacePrior
from tests.helpers.dense_mixed_model import draw_problem, solve
from tests.helpers.slow import slow
from tests.helpers.three_responses import ALONE, KINDS, draw, mean_of, means_of


@pytest.fixture(scope="module", params=KINDS)
def fitted(request):
    x, y, codes, _ = draw(request.param, np.random.default_rng(0))
    model = KINDS[request.param](**ALONE).fit(x, y, groups=codes)
    return request.param, model, x, codes


# Numbers ------------------------------------------------------------------------------------------


def dense_variance(problem, model, rows, clients, weights):
    """Variance of the weighted sum of predictions, by the covariance of all rows of fit."""
    S, noise = model._design.random_block(model._between), model.noise_variance_
    fit, random = solve(problem, S, noise, restricted=True), problem.random
    a = {}
    for row, client, weight in zip(rows, clients, weights, strict=True):
        a[client] = a.get(client, 0.0) + weight * row
    shared = np.zeros(len(problem.y))
    for client, part in a.items():
        shared += (problem.codes == client) * (problem.X[:, random] @ S @ part[random])
    moved = sum(a.values()) - problem.X.T @ fit.inverse @ shared
    own = sum(part[random] @ S @ part[random] for part in a.values())
    return own - shared @ fit.inverse @ shared + moved @ fit.population_covariance @ moved


@pytest.mark.parametrize("random", [[0], *slow([[0, 1], [1]])])
def test_linear_variances_are_those_of_the_joint_posterior(random):
    rng = np.random.default_rng(1)
    problem = draw_problem(rng, sizes=rng.integers(3, 8, 9), random=random)
    names = ["intercept" if k == 0 else k - 1 for k in random]
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type="full"),
        random=names,
        uncertainty="plug_in",
        unseen="population",
    ).fit(problem.X[:, 1:], problem.y, groups=problem.codes)
    clients = np.array([0, 0, 1, 5, 20, 20, 21, 5])
    features, weights = rng.normal(size=(8, 2)), rng.uniform(0.5, 3, 8)
    by = np.array(["a", "b", "a", "a", "a", "a", "b", "b"])
    table = model.predict_total(features, groups=clients, by=by, weights=weights)
    rows = np.column_stack([np.ones(8), features])
    for label in "ab":
        part = by == label
        expected = dense_variance(problem, model, rows[part], clients[part], weights[part])
        assert table.loc[label, "std"] ** 2 == pytest.approx(expected, rel=1e-6)
        total = weights[part] @ model.predict(features[part], groups=clients[part])
        assert table.loc[label, "total"] == pytest.approx(total)


def test_a_single_row_is_a_prediction(fitted):
    kind, model, x, codes = fitted
    rows = [0, 7, 40]
    table = model.predict_total(x[rows], groups=codes[rows], by=["a", "b", "c"])
    assert_allclose(table["total"], means_of(model, kind, x[rows], codes[rows]))
    if kind == "classes":
        return
    _, std = model.predict(x[rows], groups=codes[rows], return_std=True)
    assert_allclose(table["std"], std, rtol=1e-9 if kind == "linear" else 0.06)
    lower, upper = model.predict_interval(x[rows], groups=codes[rows])
    assert_allclose(table["lower"], lower, rtol=1e-9 if kind == "linear" else 0.1)
    assert_allclose(table["upper"], upper, rtol=1e-9 if kind == "linear" else 0.1)


def test_new_rows_have_noise(fitted):
    kind, model, x, codes = fitted
    params = {"groups": codes, "by": codes % 3}
    means, new = (model.predict_total(x, **params, new_row=new) for new in (False, True))
    assert_allclose(new["total"], means["total"])
    rows = means_of(model, kind, x, codes)
    noise = {
        "linear": np.full(len(rows), getattr(model, "noise_variance_", 0.0)),
        "classes": rows * (1 - rows),
        "counts": rows,
    }[kind]
    added = np.bincount(codes % 3, noise)
    assert_allclose(new["std"] ** 2 - means["std"] ** 2, added, rtol=1e-9)


def test_weights_and_means(fitted):
    _, model, x, codes = fitted
    twice = model.predict_total(
        np.vstack([x, x]), groups=np.tile(codes, 2), by=np.tile(codes % 2, 2)
    )
    weighted = model.predict_total(x, groups=codes, by=codes % 2, weights=np.full(len(x), 2.0))
    assert_allclose(twice.drop(columns="n_rows"), weighted.drop(columns="n_rows"), rtol=1e-9)
    mean = model.predict_total(x, groups=codes, by=codes % 2, mean=True)
    assert list(mean.columns) == ["n_rows", "mean", "std", "lower", "upper"]
    assert_allclose(mean["mean"], weighted["total"] / (2 * mean["n_rows"]))
    assert_allclose(mean["upper"], weighted["upper"] / (2 * mean["n_rows"]))


def test_rows_of_one_client_have_errors_in_common(fitted):
    _, model, x, _ = fitted
    apart, together = np.arange(50) + 100, np.full(50, 100)  # new clients, and one of them
    some = np.tile(x[:1], (50, 1))
    stds = [model.predict_total(some, groups=g)["std"].iloc[0] for g in (apart, together)]
    assert stds[0] < 0.5 * stds[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_cover(kind):
    hits = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x, y, codes, deviations = draw(kind, rng)
        model = KINDS[kind](**ALONE).fit(x, y, groups=codes)
        clients = np.repeat(np.arange(40), 20)  # ten of them are new
        effects = np.append(deviations, 0.7 * rng.normal(size=10))
        features = rng.normal(size=(800, 1))
        means = mean_of(kind, 0.3 + 0.5 * features[:, 0] + effects[clients])
        table = model.predict_total(features, groups=clients, by=clients // 5)
        totals = np.bincount(clients // 5, means)
        hits.append(np.mean((table["lower"] <= totals) & (totals <= table["upper"])))
    assert 0.9 < np.mean(hits) < 0.985


# Tables and refusals ------------------------------------------------------------------------------


def test_labels(fitted):
    _, model, x, codes = fitted
    one = model.predict_total(x, groups=codes)
    assert one.index.tolist() == ["all"]
    assert one["n_rows"].tolist() == [len(x)]
    states = pd.Series(np.where(codes < 9, "north", "south"))
    table = model.predict_total(x, groups=codes, by=states)
    assert table.index.tolist() == ["north", "south"]
    assert table["total"].sum() == pytest.approx(one["total"].iloc[0])


def test_in_a_pipeline():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    frame = pd.DataFrame({"x": x[:, 0], "site": codes})
    steps = make_pipeline(StandardScaler(), PersonalizedLinearRegression(**ALONE))
    model = ClientColumn(steps, column="site").fit(frame, y)
    plain = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    found = model.predict_total(frame, by=codes % 4)
    assert_allclose(found, plain.predict_total(x, groups=codes, by=codes % 4), rtol=1e-4)
    by_name = model.predict_total(frame, by="site")
    assert_allclose(by_name, plain.predict_total(x, groups=codes, by=codes), rtol=1e-4)


def test_totals_of_private_fits_say_whether_they_are_covered():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5),
        noise_variance=1.0,
        epsilon=4.0,
        feature_bound=4.0,
        target_bound=6.0,
        **ALONE,
    ).fit(x, y, groups=codes)
    assert "does not cover" in model.predict_total(x, groups=codes).attrs["privacy"]
    released = model.release().predict_total(x[:10], groups=np.arange(10))  # all clients are new
    assert np.isfinite(released).all(axis=None)
    assert "does not cover" not in released.attrs.get("privacy", "")


def test_exposure_of_counts():
    x, y, codes, _ = draw("counts", np.random.default_rng(0))
    exposure = np.full(len(x), 2.0)
    model = PersonalizedPoissonRegression(**ALONE).fit(x, y, groups=codes, exposure=exposure)
    once, twice = (model.predict_total(x, groups=codes, exposure=e * exposure) for e in (1.0, 2.0))
    assert_allclose(twice["total"], 2 * once["total"])
    assert_allclose(twice["std"], 2 * once["std"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"by": ["a"]}, r"by must have shape \(180,\); got \(1,\)"),
        ({"by": [None, *["a"] * 179]}, "by has no label in row 0"),
        ({"weights": np.full(180, -1.0)}, "weights must be 180 numbers from 0 to 1e100"),
        ({"weights": [1.0, 2.0]}, "weights must be 180 numbers from 0 to 1e100"),
        ({"weights": np.zeros(180)}, "weights are all 0 for 'all'"),
        ({"level": 1.5}, "level must be a number"),
    ],
)
def test_input_that_does_not_fit(params, message):
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match=message):
        model.predict_total(x, groups=codes, **params)


def test_arguments_that_a_model_does_not_take():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    linear = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    classes = PersonalizedLogisticRegression(**ALONE).fit(x, y > 0, groups=codes)
    for model, name in ((linear, "offset"), (classes, "exposure"), (classes, "sample_weight")):
        message = f"predict_total of {type(model).__name__} takes no {name}"
        with pytest.raises(TypeError, match=message):
            model.predict_total(x, groups=codes, **{name: np.ones(180)})


def test_models_without_totals():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    modes = PersonalizedLinearRegression(LaplacePrior()).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match="predict_total needs a posterior"):
        modes.predict_total(x, groups=codes)
    three = PersonalizedLogisticRegression(random="intercept")
    three.fit(x, np.digitize(y, [-0.5, 0.5]), groups=codes)
    with pytest.raises(ValueError, match="predict_total needs two classes; got a model of 3"):
        three.predict_total(x, groups=codes)
    known = PersonalizedLinearRegression(random="intercept", unseen="error")
    known.fit(x, y, groups=codes)
    with pytest.raises(ValueError, match=r"not in fit|did not see|unseen"):
        known.predict_total(x, groups=codes + 1000)
    both = np.column_stack([x[:, 0], codes % 7])
    grouped = PersonalizedLinearRegression(random="intercept", groupings=[1])
    grouped.fit(both, y, groups=codes)
    with pytest.raises(ValueError, match="does not support models with groupings"):
        grouped.predict_total(both, groups=codes)
