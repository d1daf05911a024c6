"""Variance components against statsmodels and closed forms."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from pfl_sklearn import GaussianMean
from pfl_sklearn.estimation._variance_components import (
    ClientMeans,
    client_means,
    estimate_components,
)
from tests.helpers.oracles import read_oracle

PUBLIC = read_oracle("reml_public_tables")
SIMULATED = read_oracle("random_intercept")
CLAIMS = read_oracle("hachemeister")


@pytest.mark.parametrize("method", ["reml", "ml"])
def test_simulated_table_matches_statsmodels(method):
    y, groups = np.array(SIMULATED["y"]), np.array(SIMULATED["groups"])
    model = GaussianMean(method=method, uncertainty="plug_in").fit(y[:, None], y, groups=groups)
    expected = SIMULATED[method]
    assert model.population_mean_ == pytest.approx(expected["mean"], rel=1e-5)
    assert model.population_mean_std_ == pytest.approx(expected["se"], rel=1e-5)
    assert model.prior_.covariance[0, 0] == pytest.approx(expected["between"], rel=1e-5)
    assert model.noise_variance_ == pytest.approx(expected["noise"], rel=1e-5)
    assert -2 * model.log_likelihood_ == pytest.approx(expected["minus2_log_likelihood"], rel=1e-8)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "note"])
def test_public_tables_match_reml(name, data_home):
    expected = PUBLIC[name]
    table = pd.read_csv(data_home / name)
    y, groups = table[expected["y"]], table[expected["groups"]]
    model = GaussianMean(uncertainty="plug_in").fit(table, y, groups=groups)
    assert model.population_mean_ == pytest.approx(expected["mean"], abs=1e-5, rel=1e-7)
    assert model.population_mean_std_ == pytest.approx(expected["se"], abs=1e-5)
    assert model.prior_.covariance[0, 0] == pytest.approx(expected["between"], rel=1e-5)
    assert model.noise_variance_ == pytest.approx(expected["noise"], rel=1e-5)
    assert -2 * model.log_likelihood_ == pytest.approx(expected["minus2"], abs=1e-4)
    assert model.icc_ == pytest.approx(
        expected["between"] / (expected["between"] + expected["noise"]), rel=1e-5
    )


def test_moments_are_the_credibility_estimators_of_actuar():
    """Clients of very unequal weight weighed alike: 64,285 between states."""
    y, weights = np.ravel(CLAIMS["ratios"]), np.ravel(CLAIMS["weights"])
    model = GaussianMean(method="moments", uncertainty="plug_in").fit(
        y[:, None], y, groups=np.repeat(np.arange(5), 12), sample_weight=weights
    )
    assert model.prior_.covariance[0, 0] == pytest.approx(CLAIMS["between"], rel=1e-7)
    assert model.noise_variance_ == pytest.approx(CLAIMS["within"], rel=1e-8)
    assert model.population_mean_ == pytest.approx(CLAIMS["collective"], rel=1e-6)
    np.testing.assert_allclose(1 - model.shrinkage_, CLAIMS["credibility"], atol=1e-7)
    np.testing.assert_allclose(model.means_, CLAIMS["premiums"], rtol=1e-6)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("extra", [0.0, 3.0])
def test_moments_have_no_bias(known, extra):
    """Outputs whose squares around the mean are, on average, exactly their variances."""
    weights, between, noise = np.array([1.0, 2.0, 5.0, 40.0]), 2.0, 7.0
    variances = between + noise / weights + extra
    # One client away from the mean in every output, up and down.
    away = np.sqrt(4 * variances)[:, None] * np.hstack([np.eye(4), -np.eye(4)])
    table = ClientMeans(1.5 + away, weights, np.full(4, 5), np.ones(8), 0.0)
    mean = np.full(8, 1.5) if known else None
    found = estimate_components(table, "moments", mean, None, noise, extra)
    assert found.between == pytest.approx(between, rel=1e-9)


def test_balanced_reml_is_analysis_of_variance():
    rng = np.random.default_rng(3)
    y = rng.normal(size=(20, 6)) + 2 * rng.normal(size=(20, 1))
    codes = np.repeat(np.arange(20), 6)
    found = estimate_components(client_means(y.reshape(-1, 1), codes, 20), "reml")
    noise = y.var(axis=1, ddof=1).mean()
    between = y.mean(axis=1).var(ddof=1) - noise / 6
    assert found.noise == pytest.approx(noise, rel=1e-6)
    assert found.between == pytest.approx(between, rel=1e-6)
    moments = estimate_components(client_means(y.reshape(-1, 1), codes, 20), "moments")
    assert moments.between == pytest.approx(between, rel=1e-12)


def test_compressed_and_uncompressed_sizes_agree():
    """Weights of one are the same table without the shortcut for equal sizes."""
    y, groups = np.array(SIMULATED["y"])[:, None], np.array(SIMULATED["groups"])
    table = client_means(y, groups, 30)
    plain = estimate_components(table, "reml")
    scaled = client_means(y, groups, 30, np.full(len(y), 2.0))
    doubled = estimate_components(scaled, "reml")
    assert doubled.between == pytest.approx(plain.between, rel=1e-5)
    assert doubled.noise == pytest.approx(2 * plain.noise, rel=1e-5)
    assert doubled.log_likelihood == pytest.approx(plain.log_likelihood, rel=1e-8)


@pytest.mark.parametrize("method", ["reml", "ml"])
@pytest.mark.parametrize("known", ["mean", "between", "noise"])
def test_known_parameters_are_kept_and_the_rest_is_optimal(method, known):
    y, groups = np.array(SIMULATED["y"])[:, None], np.array(SIMULATED["groups"])
    table = client_means(y, groups, 30)
    given_values = {"mean": np.array([4.0]), "between": 2.0, "noise": 5.0}
    found = estimate_components(table, method, **{known: given_values[known]})
    np.testing.assert_array_equal(getattr(found, known), given_values[known])
    for free in {"between", "noise"} - {known}:
        for factor in (0.97, 1.03):
            values = {"mean": given_values["mean"] if known == "mean" else None}
            values |= {"between": found.between, "noise": found.noise}
            values[free] *= factor
            assert (
                estimate_components(table, method, **values).log_likelihood < found.log_likelihood
            )


def test_no_spread_between_clients_is_found_to_be_none():
    y = np.tile([1.0, 2.0, 3.0], 8)[:, None]
    found = estimate_components(client_means(y, np.repeat(np.arange(8), 3), 8), "reml")
    assert found.between == 0.0
    assert found.mean == pytest.approx([2.0])


def test_no_spread_inside_clients():
    y = np.repeat([1.0, 2.0, 6.0], 2)[:, None]
    found = estimate_components(client_means(y, np.repeat(np.arange(3), 2), 3), "reml")
    assert found.noise == 0.0
    assert found.between == pytest.approx(np.var([1, 2, 6], ddof=1))
    constant = estimate_components(client_means(0 * y + 4, np.repeat(np.arange(3), 2), 3), "reml")
    assert (constant.between, constant.noise) == (0.0, 0.0)
    assert constant.mean == pytest.approx([4.0])


def test_sums_of_squares_survive_a_large_offset():
    rng = np.random.default_rng(0)
    y, codes = rng.normal(size=(60, 1)), np.repeat(np.arange(6), 10)
    offset = 1e6 * np.arange(6)[codes][:, None]
    small, large = client_means(y, codes, 6), client_means(y + offset, codes, 6)
    np.testing.assert_allclose(large.within, small.within, rtol=1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_shift_and_scale(seed, shift, scale):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, 12)
    codes = np.repeat(np.arange(12), sizes)
    codes = np.append(codes, 0)
    y = rng.normal(size=12)[codes] + rng.normal(size=len(codes))
    first = estimate_components(client_means(y[:, None], codes, 12), "reml")
    second = estimate_components(client_means(scale * y[:, None] + shift, codes, 12), "reml")
    assert second.mean[0] == pytest.approx(scale * first.mean[0] + shift, abs=1e-5 * (scale + 1))
    assert second.noise == pytest.approx(scale**2 * first.noise, rel=1e-4)
    assert second.between == pytest.approx(scale**2 * first.between, abs=1e-5 * scale**2, rel=1e-3)


@pytest.mark.parametrize("spread", [1e5, 1e7])
def test_clients_very_far_apart(spread):
    """The search is not bounded: clients of any size weigh alike when shrinkage is nil."""
    rng = np.random.default_rng(0)
    sizes = np.array([2, 5] * 25)
    codes = np.repeat(np.arange(50), sizes)
    y = (spread * rng.normal(size=50))[codes] + rng.normal(size=len(codes))
    table = client_means(y[:, None], codes, 50)
    found = estimate_components(table, "reml")
    noise = table.within[0] / table.degrees_of_freedom
    assert found.noise == pytest.approx(noise, rel=1e-6)
    expected = table.means.var(ddof=1) - noise * np.mean(1 / sizes)
    assert found.between == pytest.approx(expected, rel=1e-6)
    known = estimate_components(table, "ml", between=found.between)
    assert known.noise == pytest.approx(found.noise, rel=1e-6)
    too_tight = estimate_components(table, "ml", between=1.0)
    for factor in (0.9, 1.1):
        worse = estimate_components(table, "ml", between=1.0, noise=factor * too_tight.noise)
        assert worse.log_likelihood < too_tight.log_likelihood


@pytest.mark.parametrize("scale", [1e-140, 1e-70, 1e10, 1e40, 1e70, 1e140])
def test_estimates_follow_the_unit(scale):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), rng.integers(1, 9, 20))
    y = rng.normal(size=20)[groups] + rng.normal(size=len(groups))
    plain, moved = (GaussianMean().fit(v[:, None], v, groups=groups) for v in (y, scale * y))
    np.testing.assert_allclose(moved.means_ / scale, plain.means_, rtol=1e-8)
    np.testing.assert_allclose(moved.stds_ / scale, plain.stds_, rtol=1e-8)
    shift = (len(y) - 1) * np.log(scale)
    assert moved.log_likelihood_ + shift == pytest.approx(plain.log_likelihood_, rel=1e-8)


@pytest.mark.parametrize("scale", [1e6, 1e10, 1e70])
def test_a_known_noise_variance_that_is_far_too_small(scale):
    """Rows then contradict it by so much that no digit of the likelihood tells of the spread."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), rng.integers(1, 9, 20))
    y = scale * (rng.normal(size=20)[groups] + rng.normal(size=len(groups)))
    model = GaussianMean(noise_variance=1.0).fit(y[:, None], y, groups=groups)
    expected = np.var(model.local_means_, ddof=1)
    assert model.prior_.covariance[0, 0] == pytest.approx(expected, rel=1e-6)
