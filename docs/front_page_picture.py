"""Draw the picture of the front page and of the README: docs/_static/radon.png."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.datasets import load_radon
from pfl_sklearn.priors import GaussianPrior

PATH = Path(__file__).parent / "_static" / "radon.png"
LOCAL, PERSONALIZED, POPULATION = "#8c8c8c", "#1f5fa8", "#c1440e"


def levels():
    """Homes per county, own level, personalized level and its interval, and the population's."""
    homes = load_radon("MN").frame
    table = homes[["floor"]], homes["log_radon"]
    own = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), random="intercept")
    model = PersonalizedLinearRegression(random="intercept")
    for each in own, model:
        each.fit(*table, groups=homes["county_fips"])
    lower, upper = (bound[:, 0] for bound in model.credible_interval(0.95))
    return (
        model.n_samples_per_client_,
        own.intercept_,
        model.intercept_,
        lower,
        upper,
        model.population_intercept_,
    )


def main():
    sizes, own, personalized, lower, upper, population = levels()
    order = np.lexsort((personalized, sizes))
    at = np.arange(len(order))
    fig, ax = plt.subplots(figsize=(7, 3.9), layout="constrained")
    ax.axhline(population, color=POPULATION, lw=1, label="all counties")
    ax.vlines(
        at,
        lower[order],
        upper[order],
        color=PERSONALIZED,
        alpha=0.35,
        lw=2.5,
        label="95 % interval",
    )
    ax.vlines(at, own[order], personalized[order], color=LOCAL, lw=0.6)
    ax.plot(at, own[order], "o", mfc="white", mec=LOCAL, ms=4, label="its own homes alone")
    ax.plot(at, personalized[order], "o", color=PERSONALIZED, ms=4, label="personalized")
    ticks = [int(np.argmax(sizes[order] >= size)) for size in (1, 2, 3, 4, 5, 7, 10, 20, 50)]
    ax.set(
        xticks=ticks,
        xticklabels=sizes[order][ticks],
        xlabel="counties, by the number of homes measured",
        ylabel="log radon in the basement (log pCi/L)",
        xlim=(-1.5, len(at) + 0.5),
    )
    ax.spines[["top", "right"]].set_visible(False)
    fig.legend(
        loc="outside upper center", ncols=4, frameon=False, columnspacing=1.2, handletextpad=0.4
    )
    fig.savefig(PATH, dpi=150)


if __name__ == "__main__":
    main()
