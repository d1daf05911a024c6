"""PPSGD against exact traces of an independent implementation of the paper's experiment."""

import math
from typing import NamedTuple

import numpy as np
import pytest

from pfl_sklearn._rounds.loop import Run, Sampling, run_rounds, start
from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn._rounds.rows import ClientRows, InTurn
from pfl_sklearn._rounds.step_sizes import step_sizes
from pfl_sklearn.linear_model._ppsgd._updates import LOSSES, ppsgd
from tests.helpers.oracles import read_oracle

CASES = read_oracle("ppsgd_small_exact")["cases"]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['alpha_code']}-{c['sigma']}")


def draw(case):
    """True models (N, d), features (T, N, b, d) and targets (T, N, b) of the stated draws."""
    N, d, b, T = (case[name] for name in ("N", "d", "batch", "T"))
    rng = np.random.RandomState(case["data_seed"])
    mean = 10 * rng.randn(d)
    models = np.tile(mean, (N, 1))
    change = rng.randn(N, d)
    models[:, -5:] += 0.01 * change[:, -5:]
    return rng, models, 1 / np.sqrt(np.arange(1, d + 1)), (N, d, b, T)


def table(case):
    """Rows in client order, those of a client in the order of the rounds."""
    rng, models, scale, (N, _, b, T) = draw(case)
    X, y = [], []
    for _ in range(T):
        features = rng.randn(b, N, len(scale)) * scale
        X.append(features)
        y.append(np.sum(features * models, axis=2) + case["tau"] * rng.randn(b, N))
    X = np.concatenate(X).transpose(1, 0, 2).reshape(N * T * b, -1)
    y = np.concatenate(y).T.reshape(-1)
    return X, y, np.repeat(np.arange(N), T * b), models, scale**2


def excess_risk(coef, models, variances):
    return np.mean(np.sum((coef - models) ** 2 * variances, axis=1))


class Released(NamedTuple):
    total: np.ndarray
    bound_next: float
    clipped: float


class StatedNoise:
    """Release whose noise is the oracle's: standard normals times sigma C on the sum."""

    def __init__(self, case):
        self.rng = np.random.RandomState(case["noise_seed"])
        self.sigma, self.clip_norm = case["sigma"], case["C"]

    def start(self):
        return self.clip_norm

    def release(self, messages, bound, n_expected, rng):
        norms = np.linalg.norm(messages[..., 0], axis=1)
        clipped = messages / np.maximum(norms / bound, 1.0)[:, None, None]
        noise = self.sigma * bound * self.rng.randn(*messages.shape[1:-1])[:, None]
        return Released(clipped.sum(axis=0) + noise, bound, 0.0)


def alpha_of(case):
    """The paper's alpha: that of the code divided by the clients of a round."""
    return math.inf if case["alpha_code"] == -1 else case["alpha_code"] / case["N"]


@every_case
def test_traces(case):
    X, y, _, models, variances = table(case)
    N, d, b, T = (case[name] for name in ("N", "d", "batch", "T"))
    offsets, schedule = np.arange(N + 1) * T * b, InTurn(np.full(N, b))
    rows = ClientRows(X, y[:, None], offsets, np.arange(N), schedule)
    steps = step_sizes(alpha_of(case), case["step"], N)
    np.testing.assert_allclose(steps, (case["step_w"], case["step_theta"]), rtol=1e-15)
    method = ppsgd(N, (d, 1), LOSSES["squared_error"], steps, N, None, average=False)
    release = JointSum(StatedNoise(case), method.messages)
    state, found = start(method, rows, release), []

    def observe(state):
        coef = state.server["coef"] + state.clients["local"]
        found.append(excess_risk(coef[..., 0], models, variances))

    run_rounds(Run(method, rows, release, Sampling(1.0), T, (0,)), state, observe)
    np.testing.assert_allclose(found, case["excess_risk"], rtol=1e-10)
    np.testing.assert_allclose(state.server["coef"][:, 0], case["final_w"], rtol=1e-10, atol=1e-12)
