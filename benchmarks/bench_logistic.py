"""Classes against scikit-learn's LogisticRegression, one fit a client; they and counts, GPBoost.

And private fits of both against exact ones.
"""

import gpboost
import numpy as np
from sklearn.linear_model import LogisticRegression
from timing import compare, cpu_seconds, seconds

from pfl_sklearn.linear_model import (
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.priors import GaussianPrior

VARIANCE = 0.09
RNG = np.random.default_rng(0)


def make_table(n_clients, n_rows, n_features):
    """Rows sorted by client; every client has coefficients of its own."""
    groups = np.repeat(np.arange(n_clients), n_rows)
    X = RNG.normal(size=(len(groups), n_features))
    theta = np.sqrt(VARIANCE) * RNG.normal(size=(n_clients, n_features))
    odds = np.einsum("nd,nd->n", X, theta[groups])
    return X, (RNG.random(len(groups)) < 1 / (1 + np.exp(-odds))).astype(int), groups


def loop(X, y, groups):
    """Coefficients of every client that has both classes (the others cannot be fitted)."""
    n_clients = groups[-1] + 1
    size = len(groups) // n_clients
    coefficients = np.zeros((n_clients, X.shape[1]))
    model = LogisticRegression(C=VARIANCE, fit_intercept=False)
    for i in range(n_clients):
        rows = slice(i * size, (i + 1) * size)
        if 0 < y[rows].sum() < size:
            coefficients[i] = model.fit(X[rows], y[rows]).coef_[0]
    return coefficients


def random_intercept():
    """5,000 clients: GPBoost's Laplace fit against ours, and what the choice of slopes costs."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(5_000), 10)
    X = rng.normal(size=(len(groups), 3))
    predictors = X @ [1.0, 0.5, 0.0] + rng.normal(size=5_000)[groups]
    columns = np.column_stack([np.ones(len(groups)), X])
    label = (rng.random(len(groups)) < 1 / (1 + np.exp(-predictors))).astype(int)
    count = rng.poisson(np.exp(predictors))
    for kind, y, likelihood, quadrature, target in (
        (PersonalizedLogisticRegression, label, "bernoulli_logit", "laplace", ">= 3x"),
        (PersonalizedLogisticRegression, label, "bernoulli_logit", "auto", ">= 1x"),
        (PersonalizedPoissonRegression, count, "poisson", "laplace", ">= 1x"),
        (PersonalizedPoissonRegression, count, "poisson", "auto", "-"),
    ):
        ours = kind(random="intercept", quadrature=quadrature)

        def peer(y=y, likelihood=likelihood):
            model = gpboost.GPModel(group_data=groups, likelihood=likelihood)
            return model.fit(y=y.astype(float), X=columns)

        def all_of_ours(peer=peer):  # which our fit has computed, too
            model = peer()
            model.get_coef(std_err=True), model.get_cov_pars(std_err=True)
            model.predict_training_data_random_effects(predict_var=True)

        name = "15 quadrature points" if quadrature == "auto" else "Laplace"
        what = "counts" if likelihood == "poisson" else "classes"
        for run, extent, bar in (
            (peer, "GPBoost (Laplace)", target),
            (all_of_ours, "the same with standard errors and clients", "-"),
        ):
            compare(
                f"{what}, random intercept, 5,000 clients x 10 rows, {name}; {extent}, CPU",
                run,
                lambda ours=ours, y=y: ours.fit(X, y, groups=groups),
                bar,
                pairs=9,
                clock=cpu_seconds,
            )
    level = PersonalizedLogisticRegression(random="intercept")
    compare(
        "classes, the level alone as a share of random='auto', 5,000 clients x 10 rows, CPU",
        lambda: level.fit(X, label, groups=groups),
        lambda: PersonalizedLogisticRegression().fit(X, label, groups=groups),
        ">= .2x",
        pairs=9,
        clock=cpu_seconds,
    )


def private(n_clients, n_rows, d):
    """What privacy costs in time: the noisy rounds over the exact search of the same model."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(n_clients), n_rows)
    X = rng.normal(size=(len(groups), d))
    predictors = X @ np.resize([0.5, -0.3], d) + rng.normal(size=n_clients)[groups] - 1.0
    label = (rng.random(len(groups)) < 1 / (1 + np.exp(-predictors))).astype(int)
    bounds = {"epsilon": 2.0, "feature_bound": d**0.5, "max_rows_per_client": n_rows}
    for what, kind, y, more in (
        ("classes", PersonalizedLogisticRegression, label, {}),
        (
            "counts",
            PersonalizedPoissonRegression,
            rng.poisson(np.exp(predictors)),
            {"rate_range": (0.01, 10.0)},
        ),
    ):
        noisy, exact = kind(**bounds, **more), kind(random="intercept")
        compare(
            f"{what}, private over exact, {n_clients:,} clients x {n_rows} rows, d = {d}, CPU",
            lambda noisy=noisy, y=y: noisy.fit(X, y, groups=groups),
            lambda exact=exact, y=y: exact.fit(X, y, groups=groups),
            "<= 3x",
            pairs=9,
            clock=cpu_seconds,
        )


def main():
    random_intercept()
    private(5_000, 10, 3)
    private(300, 24, 6)
    prior = GaussianPrior(mean=0.0, covariance=VARIANCE)
    known = PersonalizedLogisticRegression(prior, fit_intercept=False)
    unknown = PersonalizedLogisticRegression(fit_intercept=False)
    for n_rows, d, target, pairs in ((10, 50, ">= 100x", 5), (10, 5, "-", 3), (50, 5, "-", 3)):
        X, y, groups = make_table(10_000, n_rows, d)
        order = RNG.permutation(len(y))
        size = f"10^4 clients x {n_rows} rows, d = {d}"
        compare(
            f"logistic MAP, known prior, {size}; loop of LogisticRegression",
            lambda X=X, y=y, g=groups: loop(X, y, g),
            lambda X=X, y=y, g=groups: known.fit(X, y, groups=g),
            target,
            pairs=pairs,
        )
        shuffled = X[order], y[order]
        times = [
            seconds(lambda s=shuffled, g=groups[order]: known.fit(*s, groups=g)) for _ in range(5)
        ]
        print(f"| the same fit, rows shuffled | - | {np.median(times):.3g} | - | - |", flush=True)
        once = seconds(lambda X=X, y=y, g=groups: unknown.fit(X, y, groups=g))
        print(f"| the same, population and variance unknown | - | {once:.3g} | - | - |", flush=True)


if __name__ == "__main__":
    main()
