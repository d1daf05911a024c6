"""Errors of streams and variances of heard means, against the figures of the paper's setting."""

import numpy as np
import pytest

from pfl_sklearn.privacy import gdp_delta
from pfl_sklearn.theory import (
    oracle_stream_error,
    partial_sum_variance,
    received_mean_variance,
    stream_error,
)
from tests.helpers.oracles import read_oracle

TABLE = read_oracle("colme_var_T_table")["rows"]
CURVES = read_oracle("colme_oracle_class_M200")
HALF_WIDTH = 0.5 * 3**0.5


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"pm{row['mech']}-{row['weights']}")
def test_variances_of_heard_means(row):
    """After each message, by name and by the weights themselves."""
    how = {"mechanism": f"pm{row['mech']}"}
    for k, expected in enumerate(row["var"], 1):
        times = row["times"][:k]
        found = received_mean_variance(times, 0.25, row["s2"], weights=row["weights"], **how)
        assert found == pytest.approx(expected, rel=1e-12)
    first = {"last": k, "mom": 1, "wmom": 2 ** (k.bit_length() - 1)}[row["weights"]]
    weights = [0.0] * (first - 1) + [1 / (k - first + 1)] * (k - first + 1)
    assert received_mean_variance(times, 0.25, row["s2"], weights=weights, **how) == found


def test_local_and_ideal_errors():
    sizes = CURVES["M200"]["class_sizes"]
    t = np.array(CURVES["t"])
    np.testing.assert_allclose(stream_error(t, 0.25), CURVES["M200"]["local"], rtol=1e-12)
    ideal = stream_error(t, 0.25, np.repeat(sizes, sizes))
    np.testing.assert_allclose(ideal, CURVES["M200"]["ideal"], rtol=1e-12)


def test_error_of_agents_with_variances_of_their_own():
    expected = (4 / 2 + 4 / 2 + 9 / 1) / 3 / 10
    assert stream_error(10, [4.0, 4.0, 9.0], [2, 2, 1]) == pytest.approx(expected)


@pytest.mark.parametrize("mechanism", ["pm1", "pm2"])
@pytest.mark.parametrize("weights", ["last", "mom", "wmom"])
def test_errors_of_agents_who_know_the_classes(mechanism, weights):
    """Of three random orders of the agents, to what other orders differ by."""
    name = "PM1" if mechanism == "pm1" else "PM2_paper"
    sizes, late = CURVES["M200"]["class_sizes"], slice(-3, None)
    rng, t = np.random.default_rng(0), np.array(CURVES["t"])[late]
    labels = [rng.permutation(np.repeat([0, 1, 2], sizes)) for _ in range(3)]
    given = {"mechanism": mechanism, "weights": weights}
    noise = CURVES[f"sigma2_dp_{name}"]
    found = np.mean([oracle_stream_error(t, 0.25, noise, each, **given) for each in labels], axis=0)
    expected = CURVES["M200"][f"{mechanism.upper()[0:2]}{mechanism[-1]}-{weights}"][late]
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_error_of_three_agents_by_hand():
    """At 3 rows the first asked the second at 1 and 3, the second the first at 2."""
    variances = [received_mean_variance([1, 3], 0.25, 9.0), received_mean_variance([2], 0.25, 9.0)]
    expected = [*(1 / (3 / 0.25 + 1 / variance) for variance in variances), 0.25 / 3]
    found = oracle_stream_error(3, 0.25, 9.0, [0, 0, 1])
    assert found == pytest.approx(np.mean(expected), rel=1e-12)


@pytest.mark.parametrize(("levels", "name"), [(1, "PM1"), (15, "PM2_paper")])
def test_noise_on_partial_sums(levels, name):
    given = {"half_width": HALF_WIDTH, "epsilon": 1.0, "delta": 1e-6, "levels": levels}
    printed = partial_sum_variance(**given, version="printed")
    assert printed == pytest.approx(CURVES[f"sigma2_dp_{name}"], rel=1e-12)
    # A row moves each of its sums by the length of the range at most.
    mu = 2 * HALF_WIDTH * (levels / partial_sum_variance(**given)) ** 0.5
    assert gdp_delta(mu, 1.0) == pytest.approx(1e-6, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: received_mean_variance([2, 2], 1.0, 1.0), r"times .*\[2, 2\]"),
        (lambda: received_mean_variance([0, 2], 1.0, 1.0), r"times .*\[0, 2\]"),
        (lambda: received_mean_variance([], 1.0, 1.0), r"times .*\[\]"),
        (lambda: received_mean_variance([1], 1.0, 1.0, mechanism="sqrt"), r"mechanism.*'sqrt'"),
        (lambda: received_mean_variance([1], 1.0, 1.0, weights="blue"), r"weights.*'blue'"),
        (lambda: received_mean_variance([1, 2], 1.0, 1.0, weights=[1.0]), r"weights .*\b2.*\(1,\)"),
        (lambda: oracle_stream_error(0, 1.0, 1.0, [0, 0]), r"n_rows"),
        (lambda: oracle_stream_error(2, 0.0, 1.0, [0, 0]), r"noise_variance"),
        (lambda: oracle_stream_error(2, 1.0, 1.0, []), r"labels .* \(0,\)"),
        (lambda: oracle_stream_error(2, 1.0, 1.0, "agents"), r"labels .* \(\)"),
        (lambda: partial_sum_variance(1.0, 1.0, 1e-6, version="exact"), r"version.*'exact'"),
    ],
)
def test_bad_parameters(call, error):
    with pytest.raises(ValueError, match=error):
        call()
