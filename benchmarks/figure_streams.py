"""Errors of agents over time: Figure 1 of Yakimenka et al. (2024), and the default beside it.

200 agents in three random classes with means 1/5, 2/5 and 4/5, values uniform with a standard
deviation of 1/2, an epsilon of 1 at a delta of 1e-6, means over runs relative to an agent alone.
With --bounds class the range of values is that of an agent's class, as in the paper; with union it
is that of all classes together. About a minute a run with all methods, most of it for the
restricted schedule.

    python benchmarks/figure_streams.py --runs 60 --methods default
    python benchmarks/figure_streams.py --runs 2 --plot output/streams.png
"""

import argparse
import math
import time
import warnings

import numpy as np

from pfl_sklearn.online import CollaborativeMean

N, STEPS, HALF = 200, 30_000, math.sqrt(3) / 2
MEANS = np.array([0.2, 0.4, 0.8])
TIMES = (20, 30, 50, 70, 100, 140, 200, 250, 300, 400, 500, 1000, 3000, 10_000, 30_000)
BASE = {"epsilon": 1.0, "horizon": STEPS, "noise_variance": 0.25}
PRINTED = {**BASE, "accounting": "printed", "decision": "test"}
METHODS = {
    "default": BASE,
    "default, unknown variance": {**BASE, "noise_variance": None},
    "default, no horizon": {**BASE, "horizon": None},
    "tree": {**BASE, "mechanism": "tree"},
    "PM-I last": {**PRINTED, "mechanism": "pm1", "weights": "last"},
    "PM-I mom": {**PRINTED, "mechanism": "pm1", "weights": "mom"},
    "PM-II last": {**PRINTED, "mechanism": "pm2", "weights": "last"},
    "PM-II mom": {**PRINTED, "mechanism": "pm2", "weights": "mom"},
    "PM-II wmom": {**PRINTED, "mechanism": "pm2", "weights": "wmom"},
    "PM-II wmom, exact accounting": {**PRINTED, "mechanism": "pm2", "accounting": "exact"},
    "PM-I last, restricted": {**PRINTED, "mechanism": "pm1", "schedule": "restricted"},
    "PM-II last, restricted": {
        **PRINTED,
        "mechanism": "pm2",
        "weights": "last",
        "schedule": "restricted",
    },
}


def bounds(kind, means):
    """Range of the values, or of those of every agent."""
    if kind == "union":
        return MEANS.min() - HALF, MEANS.max() + HALF
    return {agent: (mean - HALF, mean + HALF) for agent, mean in enumerate(means)}


def errors(params, kind, seed, last):
    """Mean squared errors of a run (n_times,), relative to an agent alone, and those of `alone`."""
    rng = np.random.default_rng(seed)
    means = MEANS[rng.integers(0, 3, N)]
    model = CollaborativeMean(**params, bounds=bounds(kind, means), random_state=seed)
    found, before = [], 0
    for t in [t for t in TIMES if t <= last]:
        y = means + rng.uniform(-HALF, HALF, (t - before, N))
        X, groups = np.zeros((y.size, 1)), np.tile(np.arange(N), t - before)
        model.partial_fit(X, y.ravel(), groups=groups)
        found.append(np.mean((model.means_ - means) ** 2) / (0.25 / t))
        before = t
    return found, model.privacy_.epsilon


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--last", type=int, default=STEPS, help="steps of a run")
    parser.add_argument("--bounds", choices=("class", "union"), default="class")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--plot", help="file for a plot")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    times = [t for t in TIMES if t <= options.last]
    sizes = np.bincount(np.random.default_rng(0).integers(0, 3, N))
    print(
        f"error / alone, means of {options.runs} runs; ideal {3 / N:.4f} (sizes {sizes.tolist()})"
    )
    print("| method | epsilon, all | " + " | ".join(map(str, times)) + " | s a run |")
    print("|---" * (len(times) + 3) + "|")
    curves = {}
    for name in options.methods:
        start = time.perf_counter()
        runs = [
            errors(METHODS[name], options.bounds, seed, options.last)
            for seed in range(options.runs)
        ]
        taken = (time.perf_counter() - start) / options.runs
        values = np.array([found for found, _ in runs])
        curves[name] = values.mean(axis=0)
        shown = " | ".join(f"{value:.3g}" for value in curves[name])
        print(f"| {name} | {runs[0][1]:.3g} | {shown} | {taken:.1f} |", flush=True)
        if options.runs > 1:
            spread = values.std(axis=0, ddof=1) / math.sqrt(options.runs)
            print("| standard error | | " + " | ".join(f"{v:.2g}" for v in spread) + " | |")
    if options.plot:
        draw(curves, times, options.plot)


def draw(curves, times, file):
    """Plot of the errors."""
    import matplotlib.pyplot as plt

    alone = 0.25 / np.array(times)
    _, ax = plt.subplots(figsize=(7.5, 5), layout="constrained")
    ax.plot(times, alone, color="0.5", label="alone")
    for color, (name, values) in zip([*plt.cm.tab10.colors, "k"], curves.items(), strict=False):
        line = "--" if name.startswith("PM") else "-"
        ax.plot(times, values * alone, label=name, ls=line, color=color)
    ax.plot(times, 3 / N * alone, color="k", ls=":", label="all data public")
    ax.set(xscale="log", yscale="log", xlabel="steps", ylabel="mean squared error")
    ax.legend(frameon=False, fontsize="small")
    plt.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
