"""GaussianMean and BernoulliMean against loops over clients and a mixed-model package."""

import os
import warnings

import numpy as np
import pandas as pd
from statsmodels.regression.mixed_linear_model import MixedLM
from timing import compare, peak_above_input, seconds

from pfl_sklearn import BernoulliMean, GaussianMean

N_CLIENTS, N_ROWS = 10**6, 10
RNG = np.random.default_rng(0)
DENSE = np.repeat(np.arange(N_CLIENTS), N_ROWS)
Y = RNG.normal(size=N_CLIENTS)[DENSE] + RNG.normal(size=len(DENSE))
X = np.broadcast_to(np.zeros(1), (len(Y), 1))
LABELS = (Y > 0).astype(int)


def loop():
    """Mean and variance of every client, rows sorted by client and offsets given."""
    means, variances = np.empty(N_CLIENTS), np.empty(N_CLIENTS)
    for i in range(N_CLIENTS):
        rows = Y[i * N_ROWS : (i + 1) * N_ROWS]
        means[i] = rows.mean()
        variances[i] = rows.var()
    return means, variances


def groupby():
    """Mean, variance and number of rows of every client by pandas."""
    return pd.Series(Y).groupby(DENSE).agg(["mean", "var", "count"])


def least():
    """The passes that no fit of rows in any order does without, by NumPy; none shrinks anything."""
    assert np.isfinite(Y.sum())
    seen = np.zeros(DENSE.max() - DENSE.min() + 1, dtype=bool)
    seen[DENSE] = True
    shifted = Y - Y.mean()
    return np.bincount(DENSE), np.bincount(DENSE, shifted), shifted @ shifted


def fit(groups, y=Y):
    return GaussianMean().fit(X, y, groups=groups)


def mixed_model():
    """Two tables of 2,000 clients: equal numbers of rows, and 5 to 15."""
    for name, sizes in (("10", np.full(2000, 10)), ("5 to 15", RNG.integers(5, 16, 2000))):
        groups = np.repeat(np.arange(2000), sizes)
        y, ones = Y[: len(groups)], np.ones((len(groups), 1))

        def peer(y=y, ones=ones, groups=groups):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                MixedLM(y, ones, groups=groups).fit()

        compare(
            f"GaussianMean, 2,000 clients x {name} rows; statsmodels MixedLM",
            peer,
            lambda y=y, ones=ones, groups=groups: GaussianMean().fit(ones, y, groups=groups),
            ">= 1,000x",
        )


def measure_memory(size, arbitrary):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return
    for name, groups in (("dense", DENSE), ("arbitrary", arbitrary)):
        peak = peak_above_input(lambda groups=groups: fit(groups))
        print(f"| {size}, {name} integer ids: peak above input | - | - | {peak:.0f} MB | < 1 GB |")


def shuffled(size):
    order = RNG.permutation(len(Y))
    groups, y = DENSE[order], Y[order]
    compare(f"{size}, rows shuffled; loop (sorted)", loop, lambda: fit(groups, y), "-", pairs=3)


def string_ids(size):
    names = np.char.add("c", np.arange(N_CLIENTS).astype(str)).astype(object)[DENSE]
    compare(f"{size}, string ids; loop", loop, lambda: fit(names), "-", pairs=3)


def main():
    arbitrary = np.sort(RNG.choice(2**50, N_CLIENTS, replace=False))[DENSE]
    size = "GaussianMean, 10^6 clients x 10 rows"
    measure_memory(size, arbitrary)
    compare(f"{size}, dense integer ids; loop", loop, lambda: fit(DENSE), ">= 40x")
    compare(f"{size}, dense integer ids; pandas groupby", groupby, lambda: fit(DENSE), ">= 1.2x")
    compare(f"{size}, fewest passes; pandas groupby", groupby, least, "-")
    compare(f"{size}, arbitrary integer ids; loop", loop, lambda: fit(arbitrary), ">= 8x")
    shuffled(size)
    string_ids(size)
    compare(
        "BernoulliMean ML; GaussianMean, both 10^6 clients x 10 rows",
        lambda: BernoulliMean().fit(X, LABELS, groups=DENSE),
        lambda: fit(DENSE),
        "<= 2x",
    )
    mixed_model()
    rng = np.random.default_rng(0)
    successes, trials = rng.binomial(14, 0.5, 1000), np.full(1000, 14)
    for mechanism in ("subset_selection", "two_bit"):
        model = BernoulliMean(epsilon=1.0, mechanism=mechanism)
        model.fit_counts(successes, trials)
        times = [seconds(lambda m=model: m.fit_counts(successes, trials)) for _ in range(5)]
        print(
            f"| BernoulliMean, 1,000 clients, {mechanism}: private fit | - | "
            f"{np.median(times):.3g} | - | < 0.1 s |"
        )


if __name__ == "__main__":
    main()
