"""k-means on vectors (m, d), as plain functions: starts of EM, and fits of their own."""

import numpy as np
from sklearn.cluster import kmeans_plusplus

_STEPS = 300
_ROUNDING = 1e-13  # of the largest value
_TINY = 1e-300


def spread_centres(x, k, precision, rng):
    """k clients (k, d) far from each other: k-means++ with weights `precision` (m,)."""
    return kmeans_plusplus(x, k, sample_weight=precision, random_state=rng)[0]


def nearest_centre(x, centres):
    """Index (m,) of the nearest of `centres` (k, d), the first on a tie."""
    squares = [np.einsum("md,md->m", x - centre, x - centre) for centre in centres]
    return np.argmin(squares, axis=0)


def cluster_means(x, labels, precision, empty):
    """Weighted means (k, d) of the clusters; rows of `empty` (k, d) where there is nobody."""
    k = len(empty)
    totals = np.bincount(labels, weights=precision, minlength=k)[:, None]
    sums = np.stack([np.bincount(labels, precision * column, k) for column in x.T], axis=1)
    return np.where(totals > 0, sums / np.maximum(totals, _TINY), empty)


def lloyd(x, centres, precision, n_steps=_STEPS):
    """Centres (k, d) and labels (m,) after at most `n_steps` of k-means; empty clusters stay."""
    labels = nearest_centre(x, centres)
    for _ in range(n_steps):
        centres = cluster_means(x, labels, precision, centres)
        nearest = nearest_centre(x, centres)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
    return centres, labels


def inertia(x, centres, labels, precision):
    """Weighted squares around the centres."""
    deviations = x - centres[labels]
    return float(precision @ np.einsum("md,md->m", deviations, deviations))


def best_of_starts(x, k, precision, n_init, rng):
    """Centres (k, d) and labels (m,) with the smallest weighted squares of `n_init` starts."""
    found = [lloyd(x, spread_centres(x, k, precision, rng), precision) for _ in range(n_init)]
    return min(found, key=lambda fit: inertia(x, *fit, precision))


def count_distinct(x, enough):
    """Number of different rows, or `enough` if there are at least that many.

    Rows that differ by less than the rounding of a mean are the same.
    """
    tolerance = _ROUNDING * np.abs(x).max(axis=0)
    left, found = x, 0
    while len(left) and found < enough:
        left = left[np.any(np.abs(left - left[0]) > tolerance, axis=1)]
        found += 1
    return found
