"""Prediction of one row by a model of a million clients, against a model of a thousand."""

import tracemalloc

import numpy as np
from timing import compare

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior

D, CALLS = 20, 200


def fitted(n_clients):
    """Model of clients with one row each, and one of these rows."""
    X = np.random.default_rng(0).normal(size=(n_clients, D))
    groups = np.arange(n_clients)
    prior = GaussianPrior(mean=0.0, covariance=1.0)
    model = PersonalizedLinearRegression(prior, noise_variance=1.0)
    return model.fit(X, X.sum(axis=1), groups=groups), X[:1].copy(), groups[:1]


def predict(model, X, groups, return_std):
    for _ in range(CALLS):
        model.predict(X, groups=groups, return_std=return_std)


def peak_above_model(model, X, groups, return_std):
    """Megabytes allocated by one prediction."""
    tracemalloc.start()
    model.predict(X, groups=groups, return_std=return_std)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def main():
    few, many = fitted(10**3), fitted(10**6)
    for return_std in (False, True):
        name = f"predict one row {CALLS} times, d={D}, return_std={return_std}"
        compare(
            f"{name}: 10^3 clients; 10^6 clients",
            lambda std=return_std: predict(*few, std),
            lambda std=return_std: predict(*many, std),
            f">= 0.5x (ours < {CALLS / 1000} s)",
        )
        peak = peak_above_model(*many, return_std)
        print(f"| {name}: peak above the model | - | - | {peak:.3f} MB | < 1 MB |", flush=True)


if __name__ == "__main__":
    main()
