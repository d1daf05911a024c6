"""
Private regression: one noisy release, and a posterior at every client
======================================================================

Two thousand clients have eight rows each, and each client a regression of its own. What a server
learns of the population is to be private: it gets the second moments of bounded rows, with noise,
and nothing else. Every client then combines what was released with its own exact rows, at home.

Two promises are compared, for one row (``unit="row"``) and for a whole client
(``unit="client"``). The table is simulated, so that errors can be computed. Neighbouring tables
differ in one unit that is replaced; delta is 1e-5 throughout.
"""

# %%
# The table
# ---------
# Three features, and an intercept. Clients' coefficients scatter around the population's with a
# standard deviation of 0.4, rows around their client's line with 1.
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior

N_CLIENTS, N_ROWS, BETWEEN, DELTA = 2000, 8, 0.4**2, 1e-5
POPULATION = np.array([0.5, 1.0, -1.0, 0.5])  # the intercept first

rng = np.random.default_rng(0)
theta = POPULATION + np.sqrt(BETWEEN) * rng.normal(size=(N_CLIENTS, 4))
who = np.repeat(np.arange(N_CLIENTS), N_ROWS)
X = rng.normal(size=(len(who), 3))
y = theta[who, 0] + np.sum(X * theta[who, 1:], axis=1) + rng.normal(size=len(who))

# %%
# What has to be given
# --------------------
# The two bounds, of course: on the length of a row of X and on the absolute target. They come from
# what is known of such tables, never from this one. Here features are known to be standardized in
# the population (a length of about the root of 3) and targets to be within a few units.
#
# With several clients also the covariance between them: the moments that are released do not tell
# it. The noise variance is found out in the same release.
BOUNDS = {"feature_bound": 2.0, "target_bound": 6.0}
prior = GaussianPrior(covariance=BETWEEN)


def fitted(prior=prior, **release):
    """A regression with privacy, or without if no epsilon is given."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The released noise variance")
        return PersonalizedLinearRegression(prior, **release).fit(X, y, groups=who)


def errors(model):
    """L2 error of the population's coefficients, mean squared error of the clients'."""
    population = np.append(model.population_intercept_, model.population_coef_)
    clients = np.column_stack([model.intercept_, model.coef_])
    return (
        np.linalg.norm(population - POPULATION),
        np.mean(np.sum((clients - theta) ** 2, axis=1)),
    )


print(fitted(epsilon=1.0, delta=DELTA, unit="client", **BOUNDS).privacy_)

# %%
# ``summary()`` of a private fit has standard errors that count the noise of the release, which is
# known, as well as the sampling. Those of a fit without privacy beside it:
tables = {
    "epsilon = 1, unit client": fitted(epsilon=1.0, delta=DELTA, unit="client", **BOUNDS),
    "without privacy": fitted(),
}
print("unit: one client; relation: its rows replaced by any others; delta = 1e-5;")
print("adversary: everybody but the trusted server")
print(
    pd.concat({name: model.summary().loc["fixed"] for name, model in tables.items()}, axis=1)
    .xs("estimate", axis=1, level=1)
    .join(
        pd.concat({name: model.summary().loc["fixed"] for name, model in tables.items()}, axis=1)
        .xs("std_error", axis=1, level=1)
        .add_prefix("std_error, ")
    )
    .assign(truth=POPULATION)
    .round(3)
    .T.to_string()
)

# %%
# How much noise?
# ---------------
# Twenty releases for each epsilon and each unit. A row moves the sum over rows as far as a client
# moves the sum over clients, and there are eight times as many rows: the same epsilon costs an
# eighth of the error, and promises far less. Where noise is large a weak ridge, which the bounds
# determine, keeps the population's coefficients within reason. Their standard errors say what they
# are worth, and clients then rely on their own rows.
#
# That takes a noise variance that is right. Below four standard deviations of its own privacy noise
# it drowns, and every client keeps its own regression (the warning that says so is silenced here):
# with clients as the unit that happens at the small epsilons. With ``noise_variance`` given clients
# have something to rely on there too. (This is a single table: where a release comes out below the
# level without privacy, that is luck.)
epsilons = [0.03, 0.1, 0.3, 1, 3, 10]
N_REPETITIONS = 20
promises = {
    "row": {"unit": "row"},
    "client": {"unit": "client"},
    "client, noise variance given": {"unit": "client", "noise_variance": 1.0},
}
found = {
    name: np.array(
        [
            [
                errors(fitted(epsilon=epsilon, delta=DELTA, **promise, **BOUNDS))
                for _ in range(N_REPETITIONS)
            ]
            for epsilon in epsilons
        ]
    )
    for name, promise in promises.items()
}
levels = {
    "without privacy": errors(fitted()),
    "local": errors(fitted(GaussianPrior(covariance=np.inf))),
}
results = pd.DataFrame(
    {
        (what, name): np.median(found[name][:, :, k], axis=1)
        for k, what in enumerate(("population, L2 error", "clients, MSE"))
        for name in promises
    },
    index=pd.Index(epsilons, name="epsilon"),
)
print("medians of 20 releases; unit: one row or one client; relation: replaced by any other;")
print("delta = 1e-5; adversary: everybody but the trusted server")
print(results.round(3).T.to_string())
print(f"without privacy: {levels['without privacy'][0]:.3f}, {levels['without privacy'][1]:.3f}")
print(f"local regressions, clients: {levels['local'][1]:.3f}")

# %%
STYLES = {
    "row": {"color": "#1f5fa8", "ls": "-"},
    "client": {"color": "#c1440e", "ls": "-"},
    "client, noise variance given": {"color": "#3a7d44", "ls": "--"},
}
fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
for k, ax in enumerate(axes):
    for name, style in STYLES.items():
        low, middle, high = np.quantile(found[name][:, :, k], [0.1, 0.5, 0.9], axis=1)
        ax.plot(epsilons, middle, marker="o", **style, label=f"unit: {name}")
        ax.fill_between(epsilons, low, high, color=style["color"], alpha=0.15, lw=0)
    ax.axhline(levels["without privacy"][k], color="#555555", lw=1, label="without privacy")
    if k == 1:
        ax.axhline(levels["local"][k], color="#555555", lw=1, ls="--", label="local")
    ax.set(xscale="log", yscale="log", xticks=epsilons, xticklabels=epsilons, xlabel="epsilon")
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
ticks = [[0.01, 0.03, 0.1, 0.3, 1], [0.3, 0.5, 1, 2]]
for ax, at in zip(axes, ticks, strict=True):
    ax.set(yticks=at, yticklabels=at)
axes[0].set(title="population coefficients", ylabel="L2 error")
axes[1].set(title="clients' coefficients", ylabel="mean squared error")
axes[1].legend(frameon=False, fontsize="small")
fig.suptitle(
    "2,000 clients of 8 rows: median and middle 80 % of 20 releases\n"
    "(replace one, delta = 1e-5, trusted server)"
)
plt.show()

# %%
# Which bounds?
# -------------
# Rows beyond ``feature_bound`` are scaled down, target and all: their factor depends on their
# features alone, so that they count less but say nothing wrong. A bound that leaves out most rows
# loses some of them, and no more. A ``target_bound`` that is too small is another matter. It
# selects by the target, which pulls coefficients to 0, with or without noise. Both cost noise where
# they are too wide. The right panel is the reason to be generous with the second one, the left to
# be stingy with the first.
choices = {
    "feature_bound": [0.5, 1, 2, 4, 8],
    "target_bound": [1, 2, 4, 8, 16],
}
fig, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for ax, (name, bounds) in zip(axes, choices.items(), strict=True):
    for epsilon, repetitions, label, color in (
        (1.0, N_REPETITIONS, "epsilon = 1", "#c1440e"),
        (1e6, 1, "epsilon = 1e6, one release", "#8c8c8c"),
    ):
        medians = [
            np.median(
                [
                    errors(fitted(epsilon=epsilon, delta=DELTA, **{**BOUNDS, name: bound}))[0]
                    for _ in range(repetitions)
                ]
            )
            for bound in bounds
        ]
        ax.plot(bounds, medians, "o-", color=color, label=label)
    other = next(key for key in BOUNDS if key != name)
    ax.set(
        xscale="log",
        yscale="log",
        xticks=bounds,
        xticklabels=bounds,
        yticks=[0.02, 0.1, 0.5, 1],
        yticklabels=[0.02, 0.1, 0.5, 1],
        xlabel=f"{name} ({other} = {BOUNDS[other]:g})",
    )
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("L2 error, population coefficients")
axes[0].legend(frameon=False, fontsize="small")
beyond = [np.mean(np.linalg.norm(X, axis=1) > 2.0), np.mean(np.abs(y) > 6.0)]
fig.suptitle(
    "Bounds: median of 20 releases (unit client, replace one, delta = 1e-5, trusted server)"
)
plt.show()

# %%
# This table is simulated, so that one may look:
print(f"rows beyond feature_bound = 2: {beyond[0]:.0%}; beyond target_bound = 6: {beyond[1]:.2%}")
