"""Clients whose means form groups, and fits of GaussianMean to them."""

import math

import numpy as np

from pfl_sklearn import GaussianMean

POINTS, WEIGHTS = np.array([[0.0, 0.0], [2.0, 1.0], [-1.0, 2.0]]), np.array([0.5, 0.3, 0.2])


def make_groups(m=400, spread=0.0, sizes=(1, 2, 3, 6), seed=0, points=POINTS, weights=WEIGHTS):
    """Rows, client ids, the clients' true means and groups."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(len(points), m, p=weights)
    theta = points[labels] + math.sqrt(spread) * rng.normal(size=(m, points.shape[1]))
    groups = np.repeat(np.arange(m), np.resize(sizes, m))
    return theta[groups] + rng.normal(size=(len(groups), points.shape[1])), groups, theta, labels


def fit(y, groups, *args, **params):
    return GaussianMean(*args, **params).fit(np.zeros((len(y), 1)), y, groups=groups)


def mse(estimates, theta):
    return np.mean(np.sum((estimates - theta) ** 2, axis=1))
