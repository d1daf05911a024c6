"""Simulated responses and ranks: moments against totals and the prior, seeds, and refusals."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import ndtr
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.linear_model import (
    NotEstimableWarning,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.priors import GaussianPrior, LaplacePrior
from tests.helpers.slow import slow
from tests.helpers.three_responses import ALONE, KINDS, draw, means_of

N = 2000


@pytest.fixture(scope="module", params=["linear", "classes", *slow(["counts"])])
def fitted(request):
    x, y, codes, _ = draw(request.param, np.random.default_rng(0))
    options = {**ALONE, "uncertainty": "plug_in"}
    return request.param, KINDS[request.param](**options).fit(x, y, groups=codes), x, codes


def test_responses_of_the_same_clients_have_the_moments_of_predictions(fitted):
    kind, model, x, codes = fitted
    drawn = model.simulate(x, groups=codes, n=N, random_state=0)
    assert drawn.shape == (N, len(x))
    spread = drawn.std(axis=0)
    far = (drawn.mean(axis=0) - means_of(model, kind, x, codes)) / spread * np.sqrt(N)
    assert np.sqrt(np.mean(far**2)) < 1.3
    # Also together: rows of a client, and clients through the population.
    labels = codes % 4
    table = model.predict_total(x, groups=codes, by=labels, new_row=True)
    sums = np.array([drawn[:, labels == k].sum(axis=1) for k in range(4)])
    errors = (sums.mean(axis=1) - table["total"]) / table["std"]
    assert np.abs(errors).max() < 0.1
    assert_allclose(sums.std(axis=1), table["std"], rtol=0.08)
    everything = model.predict_total(x, groups=codes, new_row=True)["std"].iloc[0]
    assert_allclose(sums.sum(axis=0).std(), everything, rtol=0.08)


def test_rows_of_new_clients(fitted):
    """Among the same clients, rows of one new id have effects in common."""
    _, model, x, codes = fitted
    groups = np.where(codes < 5, codes + 1000, codes)
    drawn = model.simulate(x, groups=groups, n=N, random_state=1)
    table = model.predict_total(x[codes < 5], groups=groups[codes < 5], new_row=True)
    sums = drawn[:, codes < 5].sum(axis=1)
    total, std = table.loc["all", ["total", "std"]]
    assert abs(sums.mean() - total) < 0.1 * std
    assert_allclose(sums.std(), std, rtol=0.1)


def test_new_clients_are_those_of_the_prior(fitted):
    kind, model, x, codes = fitted
    drawn = model.simulate(x, groups=codes, n=N, clients="new", random_state=0)
    variance = model.prior_.covariance[0, 0]
    predictors = model.population_intercept_ + x[:, 0] * model.population_coef_[0]
    if kind == "linear":
        means = np.array([drawn[:, codes == k].mean(axis=1) for k in range(30)])
        assert_allclose(drawn.mean(axis=0), predictors, atol=0.15)
        assert_allclose(means.var(axis=1).mean(), variance + model.noise_variance_ / 6, rtol=0.05)
    else:  # the mean over new clients
        new = means_of(model, kind, x, codes + 1000)
        assert_allclose(drawn.mean(axis=0), new, rtol=0.25, atol=0.03)
        assert_allclose(drawn.mean(), new.mean(), rtol=0.02)


def test_several_coefficients_and_weights():
    rng = np.random.default_rng(3)
    codes, x = np.repeat(np.arange(20), 8), rng.normal(size=(160, 2))
    effects = rng.normal(size=(20, 3)) * [1.0, 0.7, 0.0]
    weights = rng.uniform(0.3, 3.0, 160)
    y = effects[codes, 0] + x[:, 0] * (1 + effects[codes, 1]) + rng.normal(size=160)
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type="full"), random=["intercept", 0], uncertainty="plug_in"
    ).fit(x, y, groups=codes, sample_weight=weights)
    drawn = model.simulate(x, groups=codes, n=N, sample_weight=weights, random_state=0)
    mean, std = model.predict(x, groups=codes, return_std=True)
    expected = std**2 + model.noise_variance_ / weights
    assert_allclose(drawn.mean(axis=0), mean, atol=0.2)
    assert_allclose(drawn.var(axis=0) / expected, 1.0, atol=0.16)
    new = model.simulate(x, groups=codes, n=N, sample_weight=weights, clients="new", random_state=0)
    design = np.column_stack([np.ones(160), x[:, 0]])
    own = np.einsum("np,pq,nq->n", design, model._between[:2, :2], design)
    assert_allclose(new.var(axis=0) / (own + model.noise_variance_ / weights), 1.0, atol=0.16)


def test_levels_of_groupings_are_drawn_anew():
    rng = np.random.default_rng(0)
    codes, item = np.repeat(np.arange(30), 8), rng.integers(12, size=240)
    x = np.column_stack([rng.normal(size=240), item])
    y = rng.normal(size=30)[codes] + 2 * rng.normal(size=12)[item] + rng.normal(size=240)
    model = PersonalizedLinearRegression(random="intercept", groupings=[1]).fit(x, y, groups=codes)
    drawn = model.simulate(x, groups=codes, n=N, clients="new", random_state=0)
    total = model._between[0, 0] + model.noise_variance_ + model.groupings_[1].covariance[0, 0]
    assert_allclose(drawn.var(axis=0).mean(), total, rtol=0.05)
    variance = model.groupings_[1].covariance[0, 0]
    of_level = drawn[:, item == 0] - drawn.mean(axis=0)[item == 0]
    within = np.mean(of_level[:, 0] * of_level[:, -1])
    assert_allclose(within, variance, rtol=0.15)
    with pytest.raises(ValueError, match="same clients does not go with groupings; take clients"):
        model.simulate(x, groups=codes)
    with pytest.raises(ValueError, match=r"does not go with groupings; compare effects\(\)"):
        model.ranks()
    # Levels that fit did not see are different ones.
    new = np.column_stack([x[:, 0], 20 + np.arange(240) % 2])
    drawn = model.simulate(new, groups=codes, n=N, clients="new", random_state=0)
    drawn = drawn - drawn.mean(axis=0)
    assert_allclose(np.mean(drawn[:, 0] * drawn[:, 10]), variance, rtol=0.15)
    assert abs(np.mean(drawn[:, 0] * drawn[:, 11])) < 0.15 * variance


def test_labels_and_counts_are_those_of_the_fit():
    x, y, codes, _ = draw("classes", np.random.default_rng(0))
    labels = np.where(y, "yes", "no")
    model = PersonalizedLogisticRegression(**ALONE).fit(x, labels, groups=codes)
    assert set(model.simulate(x, groups=codes, n=2, random_state=0).ravel()) == {"yes", "no"}
    x, y, codes, _ = draw("counts", np.random.default_rng(0))
    exposure = np.where(codes < 15, 1.0, 9.0)
    model = PersonalizedPoissonRegression(family="negative_binomial", **ALONE)
    model.fit(x, y, groups=codes, exposure=exposure)
    drawn = model.simulate(x, groups=codes, n=500, exposure=exposure, random_state=0)
    expected = model.predict(x, groups=codes, exposure=exposure)
    assert_allclose(drawn.mean(), expected.mean(), rtol=0.03)
    assert_array_equal(drawn, np.floor(drawn))
    with pytest.raises(ValueError, match="exposure"):
        model.simulate(x, groups=codes)


def test_seeds_and_columns_of_ids():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    frame = pd.DataFrame({"x": x[:, 0], "site": codes})
    model = ClientColumn(
        make_pipeline(StandardScaler(), PersonalizedLinearRegression(**ALONE)), "site"
    )
    model.fit(frame, y)
    one, two = (model.simulate(frame, n=3, random_state=5) for _ in range(2))
    assert_array_equal(one, two)
    plain = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    drawn, other = (
        m.simulate(v, n=N, random_state=0, **g).std(axis=1)
        for m, v, g in ((model, frame, {}), (plain, x, {"groups": codes}))
    )
    assert_allclose(drawn.mean(), other.mean(), rtol=0.02)
    names = ["estimate", "rank"]
    assert_allclose(model.exceedance(0.3, frame), plain.exceedance(0.3, x), atol=0.05)
    found, expected = (each.sort_index()[names] for each in (model.ranks(frame), plain.ranks(x)))
    assert_allclose(found, expected, atol=0.3)


def test_a_single_client_is_its_own_population():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 1))
    y = 2 * x[:, 0] + rng.normal(size=40)
    model = PersonalizedLinearRegression().fit(x, y, groups=np.zeros(40))
    drawn = model.simulate(x, groups=np.zeros(40), n=N, random_state=0)
    mean, std = model.predict(x, groups=np.zeros(40), return_std=True)
    assert_allclose(drawn.mean(axis=0), mean, atol=0.15)
    assert_allclose(drawn.var(axis=0) / (std**2 + model.noise_variance_), 1.0, atol=0.16)


# Ranks --------------------------------------------------------------------------------------------


def test_ranks(fitted):
    _, model, _, _ = fitted
    table = model.ranks()
    assert table["rank"].is_monotonic_increasing
    assert_allclose(table["rank"].sum(), 30 * 31 / 2)
    assert_allclose(table["probability_largest"].sum(), 1.0)
    assert_allclose(table["estimate"].sort_index(), model.intercept_)
    assert ((table["lower"] <= table["rank"]) & (table["rank"] <= table["upper"])).all()


@pytest.mark.slow
def test_ranks_are_calibrated():
    """Intervals hold the true ranks."""
    hits = []
    for seed in range(40):
        x, y, codes, deviations = draw("linear", np.random.default_rng(seed))
        model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
        table = model.ranks(level=0.9, n_draws=500).sort_index()
        true = 1 + np.argsort(np.argsort(-deviations))
        hits.append(np.mean((table["lower"] <= true) & (true <= table["upper"])))
    assert 0.86 < np.mean(hits) < 0.95


def test_ranks_on_rows():
    """A client may be ahead at one place, and behind at another."""
    rng = np.random.default_rng(0)
    codes, x = np.repeat([0, 1], 50), rng.uniform(0, 1, size=(100, 1))
    y = np.where(codes, 2 * x[:, 0], 1.0) + 0.1 * rng.normal(size=100)
    model = PersonalizedLinearRegression(GaussianPrior(covariance=4.0, centered=False))
    model.fit(x, y, groups=codes)
    assert model.ranks([[0.0], [0.2]]).index.tolist() == [0, 1]
    assert model.ranks([[1.0], [0.8]]).index.tolist() == [1, 0]


def test_exceedance(fitted):
    kind, model, x, _ = fitted
    threshold = {"linear": 0.3, "classes": 0.6, "counts": 1.5}[kind]
    found = model.exceedance(threshold, n_draws=4000)
    assert found.index.tolist() == model.clients_.tolist()
    lower, upper = (bound[:, 0] for bound in model.credible_interval(0.9))
    cut = {"linear": threshold, "classes": np.log(1.5), "counts": np.log(1.5)}[kind]
    assert (found[lower > cut] > 0.93).all()
    assert (found[upper < cut] < 0.07).all()
    if kind == "linear":
        std = model.intercept_std_
        assert_allclose(found, ndtr((model.intercept_ - cut) / std), atol=0.03)
    # On rows it is the mean response that counts.
    on_rows = model.exceedance(threshold, x[:20], n_draws=500)
    means = [np.mean(means_of(model, kind, x[:20], np.full(20, k))) for k in model.clients_]
    assert np.corrcoef(on_rows, means)[0, 1] > 0.8


@pytest.mark.parametrize(
    ("kind", "threshold"),
    [("linear", np.nan), ("linear", "a"), ("classes", 1.0), ("counts", 0.0)],
)
def test_thresholds_that_no_mean_has(kind, threshold):
    x, y, codes, _ = draw(kind, np.random.default_rng(0), 8, 5)
    model = KINDS[kind](**ALONE).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match="threshold must be a number between"):
        model.exceedance(threshold)


# Refusals -----------------------------------------------------------------------------------------


def private_fit():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5),
        noise_variance=1.0,
        epsilon=4.0,
        feature_bound=4.0,
        target_bound=6.0,
        **ALONE,
    )
    return model.fit(x, y, groups=codes), x, codes


def test_private_fits_simulate_their_population_alone():
    model, x, codes = private_fit()
    for call in (lambda: model.simulate(x, groups=codes), model.ranks):
        with pytest.raises(ValueError, match=r"exact rows say, which epsilon=4 does not cover"):
            call()
    drawn = model.simulate(x, groups=codes, n=3, clients="new", random_state=0)
    released = model.release().simulate(x, groups=codes, n=3, clients="new", random_state=0)
    assert_array_equal(drawn, released)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"clients": "all"}, "clients must be 'same' or 'new'; got 'all'"),
        ({"n": 0}, "n == 0, must be >= 1"),
        ({"sample_weight": np.arange(180)}, "sample_weight must be above 0; got 0"),
        ({"groups": None}, "groups"),
    ],
)
def test_input_that_does_not_fit(params, message):
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match=message):
        model.simulate(x, **{"groups": codes, **params})


def test_clients_that_are_alike_share_their_rank():
    x, y, codes, _ = draw("linear", np.random.default_rng(0), 8, 5)
    model = PersonalizedLinearRegression(GaussianPrior(covariance=0.0), **ALONE)
    table = model.fit(x, y, groups=codes).ranks()
    assert_allclose(table["rank"], 4.5)
    assert_allclose(table["probability_largest"], 1 / 8)


def test_models_that_do_not_simulate():
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    for prior in (LaplacePrior(), GaussianPrior(covariance=np.inf)):
        model = PersonalizedLinearRegression(prior).fit(x, y, groups=codes)
        with pytest.raises(ValueError, match="simulate needs a Gaussian prior with a finite"):
            model.simulate(x, groups=codes)
    three = PersonalizedLogisticRegression(random="intercept")
    three.fit(x, np.digitize(y, [-0.5, 0.5]), groups=codes)
    with pytest.raises(ValueError, match="simulate needs two classes; got a model of 3"):
        three.simulate(x, groups=codes)
    classes = PersonalizedLogisticRegression(**ALONE).fit(x, y > 0, groups=codes)
    with pytest.raises(ValueError, match="a weight repeats a row, so repeat the row"):
        classes.simulate(x, groups=codes, sample_weight=np.ones(180))
    with pytest.raises(TypeError, match="simulate of PersonalizedLogisticRegression takes no foo"):
        classes.simulate(x, groups=codes, foo=1)
    released = private_fit()[0].release()
    with pytest.raises(ValueError, match="simulate of a released model has no clients of fit"):
        released.simulate(x, groups=codes)
    twice = np.column_stack([x[:, 0], 2 * x[:, 0]])
    with pytest.warns(NotEstimableWarning):
        same = PersonalizedLinearRegression(**ALONE).fit(twice, y, groups=codes)
    with pytest.raises(ValueError, match="ranks needs rows X whose predictors the rows of fit"):
        same.ranks([[1.0, 5.0]])
    slopes = PersonalizedLinearRegression(random=[0], fit_intercept=False).fit(x, y, groups=codes)
    with pytest.raises(ValueError, match="ranks needs X"):
        slopes.ranks()
