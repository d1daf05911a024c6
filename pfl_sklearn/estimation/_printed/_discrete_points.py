"""Points of a discrete prior of means: Algorithm 3 of Ozkara et al. (2023, ICLR), as printed.

The estimates are averages of the points, so every round draws the points together. In the limit
there is one point, unless the clients can be assigned without doubt. We keep the algorithm to
reproduce the published figures; do not use it for analysis.
"""

import numpy as np

from pfl_sklearn.priors import _mixture as mixture
from pfl_sklearn.priors._mixture_fit import cluster_means, k_means, nearest_centre

_ROUNDS = 10  # run to convergence it draws all points into one
_MOST_LLOYD_STEPS = 300  # as scikit-learn's KMeans; it converges in far fewer


def printed_points(means, sampling, prior, n_rounds=_ROUNDS):
    """DiscretePrior from alternating k-means on estimates with estimates given the points.

    The start clusters the clients' own `means` (m, d), whose sampling variances are `sampling`
    (m,). `prior` has a number of points; the result has them in the order of their weights.
    """
    mixture.check_distinct_estimates(means, prior.n_components)
    rng = np.random.RandomState(0)  # of the starts alone; two fits to the same rows must agree
    points, labels = k_means(means, prior.n_components, rng, n_init=prior.n_init)
    for _ in range(n_rounds):
        weights = np.bincount(labels, minlength=len(points)) / len(means)
        estimates = prior.with_values(points, weights).posterior(means, sampling[:, None])[0]
        points, labels = _lloyd(estimates, points)
    weights = np.bincount(labels, minlength=len(points)) / len(means)
    order = np.lexsort((points[:, 0], -weights))
    return prior.with_values(points[order], weights[order])


def _lloyd(x, centres):
    """Centres (k, d) and labels (m,) of k-means from these centres."""
    # Centres that lose all members stay where they are. KMeans would move them to outlying clients,
    # which Algorithm 3 (ICLR) does not do.
    equal, labels = np.ones(len(x)), nearest_centre(x, centres)
    for _ in range(_MOST_LLOYD_STEPS):
        centres = cluster_means(x, labels, equal, centres)
        nearest = nearest_centre(x, centres)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
    return centres, labels
