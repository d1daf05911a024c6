"""Audits of all rounds of private fits: the noise is neither less nor more than calibrated."""

import math

import numpy as np
import pytest

from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.linear_model._private import _linear_fit, _link_fit
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import PrivacyWarning, gdp_epsilon
from tests.helpers.audits import measured_mu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(f"ignore::{PrivacyWarning.__module__}.PrivacyWarning"),
]
MU = 2.0


def table(m, n):
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 2, (m * n, 2)) - 0.5, rng.integers(0, 2, m * n)
    y[:2] = 0, 1
    return X, y, np.repeat(np.arange(m), n)


def entries(*positions, length):
    """Message of norm 1 with equal entries at these positions."""
    message = np.zeros(length)
    message[list(positions)] = 1 / math.sqrt(len(positions))
    return message


# Messages of parts that are positive semi-definite are furthest apart if they are orthogonal: these
# have one entry on the diagonal of each of the first two parts. Others are so if they are opposite.
@pytest.mark.parametrize(
    ("random", "name", "here", "there", "length"),
    [
        ("intercept", "intercept_messages", (0, 6), (3, 10), 16),
        ("all", "slope_messages", (4, 10), (7, 13), 23),
    ],
)
def test_linear_rounds(random, name, here, there, length, monkeypatch):
    check = "pfl_sklearn.linear_model._private._checks.check_noise_on_slopes"
    monkeypatch.setattr(check, lambda *args: None)
    bounds = {"feature_bound": 0.75, "target_bound": 5.0}
    model = PersonalizedLinearRegression(random=random, epsilon=gdp_epsilon(MU, 1e-5), **bounds)
    directions = [entries(*positions, length=length) for positions in (here, there)]
    mu, error = measured_mu(model, table(5, 9), 0, directions, _linear_fit, name, monkeypatch, 100)
    assert abs(mu - MU) < 4 * error


@pytest.mark.parametrize(("random", "length"), [("intercept", 16), ("all", 15)])
def test_link_rounds(random, length, monkeypatch):
    prior = GaussianPrior(covariance=1.0)
    bounds = {"feature_bound": math.sqrt(2), "max_rows_per_client": 24, "n_rounds": 4}
    model = PersonalizedLogisticRegression(
        prior, random=random, epsilon=gdp_epsilon(MU, 1e-5), **bounds
    )
    direction = np.full(length, 1 / math.sqrt(length))
    directions = [direction, -direction]
    data, name = table(4, 6), "client_messages"
    mu, error = measured_mu(model, data, 0, directions, _link_fit, name, monkeypatch)
    assert abs(mu - MU) < 4 * error
