"""Audits: lower bounds on the privacy loss of a release, from its outputs alone."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri
from scipy.stats import beta

from pfl_sklearn._typing import Floats
from pfl_sklearn.privacy._accounting._events import check_value

__all__ = ["gdp_lower_bound", "odds_lower_bound"]


def gdp_lower_bound(with_canary: Floats, without: Floats, alpha: float = 1e-3) -> float:
    """Lower confidence bound on the Gaussian-DP parameter of a release.

    Run the release many times on each of two neighbouring tables, and score each run by a number
    that tends to be larger with the canary. A bound above the claimed mu refutes the claim; a bound
    below it proves nothing.

    Parameters
    ----------
    with_canary, without : array-like of shape (n_runs,)
        Scores of independent runs. The first half picks a threshold, and the second half tests it.
    alpha : float, default=1e-3
        Probability that the bound exceeds the true mu.

    Returns
    -------
    float
        Lower bound on mu; minus infinity if the runs are uninformative.

    Raises
    ------
    ValueError
        If there are fewer than two scores of a kind, or some are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.privacy.auditing import gdp_lower_bound
    >>> rng = np.random.default_rng(0)
    >>> bound = gdp_lower_bound(rng.normal(2.0, 1.0, 500), rng.normal(0.0, 1.0, 500))
    >>> 1.0 < bound < 2.0
    True
    """
    with_canary = _checked_scores("with_canary", with_canary)
    without = _checked_scores("without", without)
    check_value("alpha", alpha, 0 < alpha < 1, "in (0, 1)")
    # Two halves: a threshold chosen on the runs that test it would make the bound too high.
    half, other = len(with_canary) // 2, len(without) // 2
    threshold = _best_threshold(with_canary[:half], without[:other])
    above = int(np.sum(with_canary[half:] > threshold))
    false = int(np.sum(without[other:] > threshold))
    # Half of alpha for each of two rates, so that both hold together (union bound).
    power = _binomial_lower(above, len(with_canary) - half, alpha / 2)
    false_rate = 1 - _binomial_lower(len(without) - other - false, len(without) - other, alpha / 2)
    # mu-GDP bounds every test: ndtri(power) <= ndtri(false_rate) + mu.
    return float(ndtri(power) - ndtri(false_rate))


def odds_lower_bound(
    given_truth: int, given_other: int, n_draws: int, alpha: float = 1e-6
) -> float:
    """Lower confidence bound on epsilon from the counts of one output under two inputs.

    Parameters
    ----------
    given_truth, given_other : int
        Number of occurrences of the output in `n_draws` draws under each input.
    n_draws : int
        Number of draws under each input.
    alpha : float, default=1e-6
        Probability that the bound exceeds the true log ratio.

    Returns
    -------
    float
        Lower bound on the log of the ratio of the two probabilities.

    Examples
    --------
    >>> from pfl_sklearn.privacy.auditing import odds_lower_bound
    >>> bound = odds_lower_bound(75_000, 25_000, 100_000)
    >>> 1.05 < bound < 1.0986
    True
    """
    check_value("n_draws", n_draws, 1 <= n_draws < np.inf, "finite and at least 1")
    for name, count in {"given_truth": given_truth, "given_other": given_other}.items():
        check_value(name, count, 0 <= count <= n_draws, f"from 0 to n_draws={n_draws!r}")
    check_value("alpha", alpha, 0 < alpha < 1, "in (0, 1)")
    # Both bounds hold with probability 1 - alpha. The upper one is the lower one of the complement.
    low = _binomial_lower(given_truth, n_draws, alpha / 2)
    high = 1 - _binomial_lower(n_draws - given_other, n_draws, alpha / 2)
    return float(np.log(low) - np.log(high))


def _checked_scores(name: str, scores: Floats) -> Floats:
    """Scores (n_runs,) as floats; ValueError unless there are several, all of them finite."""
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 1 or len(scores) < 2:
        raise ValueError(f"{name} must be two scores or more; got shape {scores.shape}.")
    invalid = np.flatnonzero(~np.isfinite(scores))
    if len(invalid):
        raise ValueError(
            f"{name} must be finite; got {scores[invalid[0]]} in run {invalid[0]}, and "
            f"{len(invalid)} such scores of {len(scores)} in all."
        )
    return scores


def _best_threshold(with_canary: Floats, without: Floats) -> float:
    """Threshold that best separates the two samples on the normal scale."""
    # Within the central 80 %: further out, too few runs are left to estimate a rate from.
    grid = np.quantile(np.concatenate([with_canary, without]), np.linspace(0.1, 0.9, 33))

    def separation(threshold: float) -> float:
        rates = [(sample > threshold).mean() for sample in (with_canary, without)]
        # Rates of 0 and 1 would be infinite: no sample of this size proves them.
        first, second = ndtri(np.clip(rates, 0.02, 0.98))
        return float(first - second)

    return float(max(grid, key=separation))


def _binomial_lower(count: int, n: int, alpha: float) -> float:
    """Clopper-Pearson lower bound of a proportion."""
    # The beta quantile is undefined at no success, where the bound is 0.
    return 0.0 if count == 0 else float(beta.ppf(alpha, count, n - count + 1))
