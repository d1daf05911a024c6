"""How often nominal 95 % intervals of clients cover, with few clients or few rows.

Run with ``python benchmarks/coverage.py``; it prints a table. Variances are averaged over ("full")
or count as known ("plug-in"); every line has the same simulated sets for both: 500, 200 where draws
of a covariance or 100 clients take long, or 100 where no client has rows to spare. "Variance" is
how often ``conf_int`` covers that between clients of classes and counts; it may be 0.
"""

import argparse
import time
import warnings

import numpy as np
from joblib import Parallel, delayed

from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.priors import GaussianPrior

FULL = GaussianPrior(covariance_type="full")
Z = 1.959964
NEW = 10**6  # an id that no fit has seen


def bernoulli(rng, uncertainty, m, low, high, a, b):
    """Hits of known clients, by standard deviations and by intervals; no new one, no variance."""
    trials, truth = rng.integers(low, high + 1, size=m), rng.beta(a, b, size=m)
    model = BernoulliMean(uncertainty=uncertainty).fit_counts(rng.binomial(trials, truth), trials)
    lower, upper = model.credible_interval()
    by_std = np.abs(model.means_ - truth) <= Z * model.stds_
    return by_std, (lower <= truth) & (truth <= upper), None, None


def poisson(rng, uncertainty, m, shape, mean, spread):
    """The same for rates, gamma distributed with this shape, and for a new client."""
    exposure = rng.gamma(1.0, size=m) + 0.1 if spread else np.ones(m)
    exposure *= m / exposure.sum()
    truth = rng.gamma(shape, mean / shape, size=m + 1)
    model = PoissonMean(uncertainty=uncertainty, unseen="population")
    model.fit_counts(rng.poisson(exposure * truth[:m]), exposure)
    lower, upper = model.credible_interval()
    rate, std = model.predict(np.zeros((1, 1)), groups=[NEW], exposure=[1.0], return_std=True)
    by_std = np.abs(model.means_ - truth[:m]) <= Z * model.stds_
    new = np.abs(rate - truth[m]) <= Z * std
    return by_std, (lower <= truth[:m]) & (truth[:m] <= upper), new, None


def gaussian(rng, uncertainty, m, n, between):
    """The same for means of rows with variance 1, and for a new client."""
    truth, codes = np.sqrt(between) * rng.normal(size=m + 1), np.repeat(np.arange(m), n)
    y = truth[codes] + rng.normal(size=m * n)
    model = GaussianMean(uncertainty=uncertainty, unseen="population")
    model.fit(np.zeros((len(y), 1)), y, groups=codes)
    lower, upper = model.credible_interval()
    mean, std = model.predict(np.zeros((1, 1)), groups=[NEW], return_std=True)
    known = truth[:m]
    by_std = np.abs(model.means_ - known) <= Z * model.stds_
    new = np.abs(mean - truth[m]) <= Z * std
    return by_std, (lower <= known) & (known <= upper), new, None


def regression(rng, uncertainty, prior, m, low, high, q, sd):
    """The same for coefficients (the intercept alone, or q of them) and a new client's response."""
    codes = np.repeat(np.arange(m), rng.integers(low, high + 1, size=m))
    X = rng.normal(size=(len(codes), max(q - 1, 1)))
    Z_rows = np.column_stack([np.ones(len(codes)), X])[:, :q]
    truth = sd * rng.normal(size=(m + 1, q))
    y = np.sum(Z_rows * truth[codes], axis=1) + rng.normal(size=len(codes))
    model = PersonalizedLinearRegression(
        prior,
        random="all" if q > 1 else "intercept",
        uncertainty=uncertainty,
        unseen="population",
    ).fit(X, y, groups=codes)
    estimates = np.column_stack([model.intercept_, model.coef_])[:, :q]
    stds = np.column_stack([model.intercept_std_, model.coef_std_])[:, :q]
    lower, upper = (bound[:, :q] for bound in model.credible_interval())
    row = rng.normal(size=(1, X.shape[1]))
    mean, std = model.predict(row, groups=[NEW], return_std=True)
    known = truth[:m]
    expected = np.append(1.0, row[0])[:q] @ truth[m]
    by_std = np.abs(estimates - known) <= Z * stds
    new = np.abs(mean - expected) <= Z * std
    return by_std, (lower <= known) & (known <= upper), new, None


def outcomes(rng, uncertainty, model, sizes, sd, level):
    """The same for levels of log odds or log rates, and hits of their variance."""
    codes, m = np.repeat(np.arange(len(sizes)), sizes), len(sizes)
    X, truth = rng.normal(size=(len(codes), 1)), level + sd * rng.normal(size=m + 1)
    predictors = truth[codes] + 0.5 * X[:, 0]
    if model is PersonalizedLogisticRegression:
        y = (rng.random(len(codes)) < 1 / (1 + np.exp(-predictors))).astype(int)
    else:
        y = rng.poisson(np.exp(predictors))
    fitted = model(random="intercept", uncertainty=uncertainty).fit(X, y, groups=codes)
    lower, upper = (bound[:, 0] for bound in fitted.credible_interval())
    known = truth[:m]
    by_std = np.abs(fitted.intercept_ - known) <= Z * fitted.intercept_std_
    variance = fitted._errors.new_variances(np.array([[1.0, 0.0]]))[0]
    new = np.abs(fitted.population_intercept_ - truth[m]) <= Z * np.sqrt(variance)
    low, high = fitted.conf_int().loc[("between", "intercept")]
    return by_std, (lower <= known) & (known <= upper), new, bool(low <= sd**2 <= high)


SIZES = {
    "20 clients x 10": [10] * 20,
    "6 clients x 15": [15] * 6,
    "13 clients, one of 200 and 12 of 5": [200] + [5] * 12,
    "260 clients, 200 of 1 and 60 of 2": [1] * 200 + [2] * 60,
}
CASES = {
    "proportions, 18 clients x 45, Beta(80, 220)": (bernoulli, 18, 45, 45, 80, 220),
    "proportions, 10 clients x 5 to 20, Beta(4, 4)": (bernoulli, 10, 5, 20, 4, 4),
    "proportions, 100 clients x 20, Beta(4, 4)": (bernoulli, 100, 20, 20, 4, 4),
    "rates, 10 clients, .5 events, unequal exposure": (poisson, 10, 2.0, 0.5, True),
    "rates, 10 clients, 5 events, unequal exposure": (poisson, 10, 2.0, 5.0, True),
    "rates, 5 clients, 5 events, unequal exposure": (poisson, 5, 2.0, 5.0, True),
    "means, 10 clients x 10, tau^2 = .1": (gaussian, 10, 10, 0.1),
    "means, 5 clients x 10, tau^2 = .3": (gaussian, 5, 10, 0.3),
    "means, 100 clients x 10, tau^2 = .1": (gaussian, 100, 10, 0.1),
    "random intercept, 5 clients x 5 to 20": (regression, "gaussian", 5, 5, 20, 1, 0.55),
    "random intercept, 10 clients x 5 to 20": (regression, "gaussian", 10, 5, 20, 1, 0.55),
    "2 coefficients, full, 8 clients x 10": (regression, FULL, 8, 10, 10, 2, 0.5),
    "2 coefficients, full, 30 clients x 2 to 5": (regression, FULL, 30, 2, 5, 2, 0.7),
    "2 coefficients, default, 8 clients x 10": (regression, "gaussian", 8, 10, 10, 2, 0.5),
    **{
        f"{name}, {size}": (outcomes, model, sizes, sd, level)
        for name, model, sd, level in (
            ("classes", PersonalizedLogisticRegression, 1.0, 0.0),
            ("classes, clients alike", PersonalizedLogisticRegression, 0.0, 0.0),
            # The mean of exp(level + x / 2 + u) is .5.
            ("counts of .5", PersonalizedPoissonRegression, 1.0, np.log(0.5) - 0.625),
            (
                "counts of .5, clients alike",
                PersonalizedPoissonRegression,
                0.0,
                np.log(0.5) - 0.125,
            ),
        )
        for size, sizes in SIZES.items()
    },
}
# No client has rows to spare: posterior means, whatever `uncertainty` is.
SPARSE = {
    "10 coefficients, full, 30 clients x 4": (regression, FULL, 30, 4, 4, 10, 1.0),
    "8 coefficients, full, 15 clients x 3": (regression, FULL, 15, 3, 3, 8, 1.0),
    "3 coefficients, full, 6 clients x 2": (regression, FULL, 6, 2, 2, 3, 1.0),
}


def one_set(simulate, arguments, seed, kinds):
    """Shares of hits, as those of `outcomes`, for these kinds of uncertainty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            simulate(np.random.default_rng(seed), uncertainty, *arguments) for uncertainty in kinds
        ]
    return [[np.nan if part is None else np.mean(part) for part in hits] for hits in found]


def percent(values):
    """Mean and standard error of shares (n,)."""
    if np.isnan(values).any():
        return "-"
    error = values.std() / np.sqrt(len(values))
    return f"{values.mean():.3f} ± {error:.3f}".replace("0.", ".")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    options = parser.parse_args()
    n_sets = options.sets
    print("| case | plug-in: clients | new | full: clients | by interval | new | variance | s |")
    print("|---|---|---|---|---|---|---|---|")
    cases = {name: case for name, case in (CASES | SPARSE).items() if options.only in name}
    for name, (simulate, *arguments) in cases.items():
        start = time.perf_counter()
        share = 0.4 if "100 clients" in name or "coefficients" in name else 1.0
        seeds = range(int(n_sets * (0.2 if name in SPARSE else share)))
        kinds = ("full",) if name in SPARSE else ("plug_in", "full")
        jobs = (delayed(one_set)(simulate, arguments, seed, kinds) for seed in seeds)
        hits = np.array(Parallel(n_jobs=-1)(jobs))  # (sets, kinds, 4)
        cells = [*map(percent, hits[:, -1].T)]
        plug_in = ["-"] * 2 if name in SPARSE else map(percent, hits[:, 0, :3:2].T)
        seconds = time.perf_counter() - start
        print(f"| {name} | {' | '.join([*plug_in, *cells])} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
