"""Tables of numbers, two classes and counts with clients' intercepts, and their models."""

import numpy as np

from pfl_sklearn import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)

KINDS = {
    "linear": PersonalizedLinearRegression,
    "classes": PersonalizedLogisticRegression,
    "counts": PersonalizedPoissonRegression,
}
ALONE = {"random": "intercept", "unseen": "population"}


def draw(kind, rng, n_clients=30, n_rows=6):
    """Features, responses, clients and the clients' deviations."""
    codes = np.repeat(np.arange(n_clients), n_rows)
    x = rng.normal(size=(len(codes), 1))
    deviations = 0.7 * rng.normal(size=n_clients)
    predictors = 0.3 + 0.5 * x[:, 0] + deviations[codes]
    y = {
        "linear": lambda: predictors + rng.normal(size=len(codes)),
        "classes": lambda: (rng.random(len(codes)) < mean_of(kind, predictors)).astype(int),
        "counts": lambda: rng.poisson(mean_of(kind, predictors)),
    }[kind]()
    return x, y, codes, deviations


def mean_of(kind, predictors):
    """Means of responses with these predictors."""
    functions = {"linear": lambda u: u, "classes": lambda u: 1 / (1 + np.exp(-u)), "counts": np.exp}
    return functions[kind](predictors)


def means_of(model, kind, x, groups):
    """Predicted means of rows."""
    predict = model.predict_proba if kind == "classes" else model.predict
    means = predict(x, groups=groups)
    return means[:, 1] if kind == "classes" else means
