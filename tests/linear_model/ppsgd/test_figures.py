"""What the paper's Figure 1a shows, on a tenth of its clients and with a tenth of its noise."""

import math

import numpy as np
import pytest

from pfl_sklearn import PPSGDRegressor
from pfl_sklearn.datasets import make_ppsgd_regression
from pfl_sklearn.theory import linear_excess_risk

N, D, AT_ONCE, BATCH = 100, 100, 50, 10
STEPS = (0.7, 1.2)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pfl_sklearn.privacy.PrivacyWarning"),
]


def run(alpha_q, sigma, step):
    return PPSGDRegressor(
        alpha=alpha_q / N,
        learning_rate=step,
        weighting="clients",
        fit_intercept=False,
        shuffle=False,
        clip_norm=10.0,
        noise_multiplier=sigma * N / 1000,
        n_rounds=AT_ONCE,  # of a call with noise, as of a pass without
        random_state=0,
    )


@pytest.fixture(scope="module")
def risks():
    """Excess risk with the best of two steps, by alpha Q, sigma and rounds."""
    clients = make_ppsgd_regression(N, 1, D, random_state=0)
    models = {
        (alpha_q, sigma, step): run(alpha_q, sigma, step)
        for alpha_q, sigma in ((0, 0), (1, 0), (1, 10), (math.inf, 0), (math.inf, 100))
        for step in STEPS
    }
    rng, who = np.random.default_rng(1), np.repeat(np.arange(N), AT_ONCE * BATCH)
    found = {}
    for _ in range(6):
        X = rng.normal(size=(len(who), D)) * np.sqrt(clients.feature_variance)
        y = np.sum(X * clients.coef[who], axis=1) + 0.01 * rng.normal(size=len(who))
        for (alpha_q, sigma, _), model in models.items():
            model.partial_fit(X, y, groups=who)
            key = alpha_q, sigma, model.n_rounds_
            risk = linear_excess_risk(model.coef_, clients.coef, clients.feature_variance)
            found[key] = min(risk, found.get(key, math.inf))
    return found


def test_local_learning_overtakes_equal_steps_around_200_rounds(risks):
    local = {t: risks[0, 0, t] for t in (100, 150, 250, 300)}
    equal = {t: risks[1, 10, t] for t in local}
    assert equal[100] < 0.6 * local[100]
    assert equal[150] < local[150]
    assert local[250] < 0.7 * equal[250]
    assert local[300] < 0.3 * equal[300]


def test_without_noise_global_learning_leads(risks):
    for t in (200, 300):
        assert risks[math.inf, 0, t] < 0.9 * min(risks[1, 0, t], risks[0, 0, t])


def test_with_much_noise_local_learning_leads_early(risks):
    for t in (50, 100, 200, 300):
        assert risks[0, 0, t] < 0.9 * risks[math.inf, 100, t]
