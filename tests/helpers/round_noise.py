"""The noise that the rounds of a private fit add to their sums."""

import math

import numpy as np
import pytest

from pfl_sklearn.privacy import ClippedSum


def record_noise(monkeypatch):
    """List that gets a fit's rounds: the noise that was drawn, the bound and the stated std."""
    rounds, release = [], ClippedSum.release

    def spy(self, messages, bound, n_expected, rng):
        noisy = release(self, messages, bound, n_expected, rng)
        exact = release(ClippedSum(self.clip_norm), messages, bound, n_expected, rng)
        rounds.append((noisy.total - exact.total, bound, self.noise_multiplier))
        return noisy

    monkeypatch.setattr(ClippedSum, "release", spy)
    return rounds


def check_noise(rounds, report, distance, mu):
    """Rounds spend mu, if a replaced client moves a sum by `distance`, and draw what they state."""
    assert len(rounds) == report.rounds
    assert {bound for _, bound, _ in rounds} == {1.0}
    spent = math.sqrt(sum((distance / std) ** 2 for *_, std in rounds))
    assert spent == pytest.approx(mu)
    assert distance / report.noise_std == pytest.approx(mu)
    drawn = np.concatenate([noise / std for noise, _, std in rounds])
    # Four standard errors of a variance, at most .75: half the noise would have a quarter of it.
    assert np.mean(drawn**2) == pytest.approx(1, abs=4 * math.sqrt(2 / len(drawn)))
