"""PersonalizedLinearRegression against loops over clients and mixed-model packages."""

import os
import warnings
from pathlib import Path

import gpboost
import numpy as np
import pandas as pd
from sklearn.linear_model import LinearRegression, Ridge
from statsmodels.regression.mixed_linear_model import MixedLM
from timing import compare, cpu_seconds, peak_above_input, warm_seconds

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.linear_model._mixed._normal_rows._closed_form import solve_in_rows
from pfl_sklearn.priors import GaussianPrior

M, N = 10_000, 10

SPHERICAL = GaussianPrior(covariance_type="spherical", centered=False)


def wide_table(d):
    """Rows of M clients with fewer rows than coefficients."""
    rng = np.random.default_rng(0)
    mu = 0.1 * rng.normal(size=d)
    theta = mu + 0.1 * rng.normal(size=(M, d))
    X = np.sqrt(0.05) * rng.normal(size=(M * N, d))
    groups = np.repeat(np.arange(M), N)
    noise = np.sqrt(0.05) * rng.normal(size=M * N)
    return X, np.einsum("nd,nd->n", X, theta[groups]) + noise, groups, mu


def wide(d, full, each):
    X, y, groups, mu = wide_table(d)
    stacked, targets = X.reshape(M, N, d), y.reshape(M, N)

    def loop():
        for i in range(M):
            Ridge(5.0, fit_intercept=False).fit(stacked[i], targets[i])

    free = PersonalizedLinearRegression(SPHERICAL, fit_intercept=False)
    prior = GaussianPrior(mean=mu, covariance=0.01)
    known = PersonalizedLinearRegression(prior, noise_variance=0.05, fit_intercept=False)
    default = PersonalizedLinearRegression(fit_intercept=False)
    for name, model, target in (
        ("all estimated", free, full),
        ("a variance for each coefficient (default)", default, each),
        ("prior known", known, "-"),
    ):
        compare(
            f"linear, {M:,} clients x {N} rows, d={d}, {name}; loop of sklearn Ridge",
            loop,
            lambda model=model: model.fit(X, y, groups=groups),
            target,
        )

    step = 2**18 // d // N  # clients whose rows fit the processor's cache

    def kernel():
        for i in range(0, M, step):
            rows = slice(i, i + step)
            solve_in_rows(None, stacked[rows], targets[rows], mu, 0.2)

    compare(
        f"linear, {M:,} clients x {N} rows, d={d}, prior known, kernel alone; loop of Ridge",
        loop,
        kernel,
        ">= 100x",
    )


def slopes_table(m, n, q, seed=0):
    """Random intercepts and slopes of q features."""
    rng = np.random.default_rng(seed)
    mu = rng.normal(size=q + 1)
    theta = mu + rng.normal(size=(m, q + 1)) * np.linspace(0.5, 1.0, q + 1)
    X = rng.normal(size=(m * n, q))
    groups = np.repeat(np.arange(m), n)
    y = theta[groups, 0] + np.einsum("nd,nd->n", X, theta[groups, 1:]) + rng.normal(size=m * n)
    return X, y, groups, theta, mu


def packages():
    """Full covariance of an intercept and three slopes: CPU time."""
    X, y, groups, _, _ = slopes_table(5000, 10, 3)
    design = np.column_stack([np.ones(len(y)), X])

    def boosted():
        model = gpboost.GPModel(
            group_data=groups,
            group_rand_coef_data=X,
            ind_effect_group_rand_coef=[1, 1, 1],
            likelihood="gaussian",
        )
        model.fit(y=y, X=design)

    ours = PersonalizedLinearRegression(GaussianPrior(covariance_type="full"))
    compare(
        "linear, 5,000 clients x 10 rows, 3 slopes, full covariance; GPBoost (diagonal), CPU time",
        boosted,
        lambda: ours.fit(X, y, groups=groups),
        ">= 1x",
        clock=cpu_seconds,
    )
    few = groups < 500

    def mixed():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            MixedLM(y[few], design[few], groups=groups[few], exog_re=design[few]).fit()

    compare(
        "linear, 500 clients x 10 rows, 3 slopes, full covariance; statsmodels MixedLM",
        mixed,
        lambda: ours.fit(X[few], y[few], groups=groups[few]),
        "-",
        pairs=3,
    )


def held_out():
    """Root mean squared error on new rows of known clients, through predict."""
    X, y, groups, theta, mu = slopes_table(200, 15, 5)
    rng = np.random.default_rng(1)
    new = np.repeat(np.arange(200), 100)
    Z = rng.normal(size=(len(new), 5))
    truth = theta[new, 0] + np.einsum("nd,nd->n", Z, theta[new, 1:])
    truth = truth + rng.normal(size=len(new))
    covariance = np.linspace(0.5, 1.0, 6) ** 2
    known = PersonalizedLinearRegression(
        GaussianPrior(mean=mu, covariance=covariance), noise_variance=1.0
    )
    models = {
        "known prior": known,
        "diag": PersonalizedLinearRegression(GaussianPrior(covariance_type="diag")),
        "spherical": PersonalizedLinearRegression(SPHERICAL),
        "local": PersonalizedLinearRegression(GaussianPrior(covariance=np.inf)),
    }
    errors = {}
    for name, model in models.items():
        predicted = model.fit(X, y, groups=groups).predict(Z, groups=new)
        errors[name] = np.sqrt(np.mean((truth - predicted) ** 2))
    pooled = LinearRegression().fit(X, y).predict(Z)
    errors["pooled"] = np.sqrt(np.mean((truth - pooled) ** 2))
    best = errors["known prior"]
    shown = ", ".join(f"{name} {value:.4f}" for name, value in errors.items())
    ratio = errors["diag"] / best
    print(
        f"| linear, 200 clients x 15 rows, 5 slopes: held-out RMSE ({shown}) | {best:.4f} "
        f"| {errors['diag']:.4f} | {ratio:.4f} | <= 1.01 |",
        flush=True,
    )


def million():
    rng = np.random.default_rng(0)
    m, d = 10**6, 5
    groups = np.repeat(np.arange(m), N)
    theta = rng.normal(size=d) + 0.5 * rng.normal(size=(m, d))
    X = rng.normal(size=(m * N, d))
    y = np.einsum("mnd,md->mn", X.reshape(m, N, d), theta).ravel() + rng.normal(size=m * N)

    def fit():
        PersonalizedLinearRegression(SPHERICAL).fit(X, y, groups=groups)

    peak_and_seconds("linear, 10^6 clients x 10 rows, d=5", fit, "< 4 GB")


def peak_and_seconds(name, fit, memory):
    if os.access("/proc/self/clear_refs", os.W_OK):
        peak = peak_above_input(fit)
        print(f"| {name}: peak above input | - | - | {peak:.0f} MB | {memory} |", flush=True)
    print(f"| {name}: seconds | - | {warm_seconds(fit):.1f} | - | < 60 |", flush=True)


def three_groupings():
    """Lecture ratings of students, lecturers and departments: GPBoost's exact fit, by ML."""
    folder = os.environ.get("PFL_SKLEARN_DATA")
    if folder is None:
        print(
            "| linear, lecture ratings, three groupings: needs PFL_SKLEARN_DATA | - | - | - | - |"
        )
        return
    table = pd.read_csv(Path(folder) / "insteval.csv.gz")
    design = np.column_stack([np.ones(len(table)), table["service"].astype(float)])
    y, names = table["y"].to_numpy(float), ["student", "lecturer", "dept"]

    def peer():
        model = gpboost.GPModel(
            group_data=table[names].to_numpy(),
            likelihood="gaussian",
            matrix_inversion_method="cholesky",
            num_parallel_threads=1,
        )
        model.fit(y=y, X=design)

    ours = PersonalizedLinearRegression(
        random="intercept", groupings=["lecturer", "dept"], method="ml"
    )
    compare(
        "linear, 73,421 lecture ratings, three groupings; GPBoost (exact), CPU time",
        peer,
        lambda: ours.fit(table[["service", "lecturer", "dept"]], y, groups=table["student"]),
        ">= 2x",
        pairs=2,
        clock=cpu_seconds,
    )


def million_rows():
    """Rows of clients and items, crossed, with an intercept for each."""
    rng = np.random.default_rng(0)
    client, item = rng.integers(0, 10**5, 10**6), rng.integers(0, 10**4, 10**6)
    X = pd.DataFrame({"x": rng.normal(size=10**6), "item": item})
    y = 1 + 0.5 * X["x"] + rng.normal(size=10**6)
    y += 0.7 * rng.normal(size=10**5)[client] + 0.5 * rng.normal(size=10**4)[item]
    model = PersonalizedLinearRegression(random="intercept", groupings=["item"])
    peak_and_seconds(
        "linear, 10^6 rows of 10^5 clients x 10^4 items",
        lambda: model.fit(X, y, groups=client),
        "< 2 GB",
    )


wide(50, ">= 15x", ">= 8x")
wide(100, ">= 6x", "-")
packages()
three_groupings()
held_out()
million()
million_rows()
