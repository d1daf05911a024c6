"""
Private regression: one noisy release, and a posterior at every client
======================================================================

We simulate two thousand clients with eight rows each; the coefficients differ between clients. The
only thing released about the population is the second moments of bounded rows, with noise. Every
client then combines the release with its own exact rows, locally.

We compare two units of protection: one row (``unit="row"``) and a whole client
(``unit="client"``). Neighbouring tables differ in one unit, which is replaced; delta is 1e-5
throughout.
"""

# %%
# The table
# ---------
# There are three features and an intercept. The standard deviation is 0.4 between the clients'
# coefficients and 1 within a client. Because the table is simulated, we can compute errors.
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
# What you have to specify
# ------------------------
# Two bounds are needed: on the norm of a row of X and on the absolute target. Take them from what
# is known about such tables, never from this one. Here features are known to be standardized in the
# population (a norm of about the root of 3), and targets to lie within a few units.
#
# The covariance between clients is needed as well, since one release does not contain it
# (:ref:`rounds can estimate it <private_variances>`). The release does estimate the noise variance.
BOUNDS = {"feature_bound": 2.0, "target_bound": 6.0}
prior = GaussianPrior(covariance=BETWEEN)


def fitted(prior=prior, **release):
    """A regression with privacy, or without if no epsilon is given."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The released noise variance")
        return PersonalizedLinearRegression(prior, **release).fit(X, y, groups=who)


def errors(model):
    """L2 error of population coefficients, mean squared error of clients' coefficients."""
    population = np.append(model.population_intercept_, model.population_coef_)
    clients = np.column_stack([model.intercept_, model.coef_])
    return (
        np.linalg.norm(population - POPULATION),
        np.mean(np.sum((clients - theta) ** 2, axis=1)),
    )


private, exact = fitted(epsilon=1.0, delta=DELTA, unit="client", **BOUNDS), fitted()
print(private.privacy_)

# %%
# The standard errors in ``summary()`` of a private fit include sampling and the noise of the
# release, whose variance is known. We compare them with those of a fit without privacy:
columns = ["estimate", "std_error"]
summaries = {
    "epsilon = 1, unit client": private.summary().loc["fixed", columns],
    "without privacy": exact.summary().loc["fixed", columns],
}
print("unit: one client; relation: its rows replaced by any others; delta = 1e-5;")
print("adversary: everybody but the trusted server")
print(pd.concat(summaries, axis=1).T.round(3).to_string())
print("true coefficients:", *POPULATION)

# %%
# How much noise?
# ---------------
# We draw ten releases for each epsilon and unit. One row changes the sum over rows as much as one
# client changes the sum over clients, and there are eight times as many rows. So with rows as the
# unit, the same epsilon adds an eighth of the error, but promises far less. Where noise is large, a
# weak ridge penalty, determined by the bounds, keeps the population's coefficients finite. Their
# standard errors are then large, and clients rely on their own rows.
#
# That requires a good estimate of the noise variance. If it is below four standard deviations of
# its privacy noise, it is useless, and every client keeps its local regression (a warning says so,
# which we silence). With clients as the unit, this happens at small epsilons. If you specify
# ``noise_variance``, clients can use the release there too. (This is a single table: an error below
# that without privacy is luck.)
epsilons = [0.03, 0.1, 0.3, 1, 3, 10]
N_REPETITIONS = 10
units = {
    "row": {"unit": "row"},
    "client": {"unit": "client"},
    "client, noise variance given": {"unit": "client", "noise_variance": 1.0},
}
private_errors = {
    name: np.array(
        [
            [
                errors(fitted(epsilon=epsilon, delta=DELTA, **params, **BOUNDS))
                for _ in range(N_REPETITIONS)
            ]
            for epsilon in epsilons
        ]
    )
    for name, params in units.items()
}
baselines = {
    "without privacy": errors(exact),
    "local": errors(fitted(GaussianPrior(covariance=np.inf))),
}
results = pd.DataFrame(
    {
        (quantity, name): np.median(private_errors[name][:, :, k], axis=1)
        for k, quantity in enumerate(("population, L2 error", "clients, MSE"))
        for name in units
    },
    index=pd.Index(epsilons, name="epsilon"),
)
print("medians of 10 releases; unit: one row or one client; relation: replaced by any other;")
print("delta = 1e-5; adversary: everybody but the trusted server")
print(results.round(3).T.to_string())
print("without privacy: {:.3f}, {:.3f}".format(*baselines["without privacy"]))
print(f"local regressions, clients: {baselines['local'][1]:.3f}")

# %%
STYLES = {
    "row": {"color": "#1f5fa8", "ls": "-"},
    "client": {"color": "#c1440e", "ls": "-"},
    "client, noise variance given": {"color": "#3a7d44", "ls": "--"},
}
fig, axes = plt.subplots(1, 2, figsize=(8.3, 4.6), layout="constrained")
for k, ax in enumerate(axes):
    for name, style in STYLES.items():
        low, middle, high = np.quantile(private_errors[name][:, :, k], [0.1, 0.5, 0.9], axis=1)
        ax.plot(epsilons, middle, marker="o", **style, label=f"unit: {name}")
        ax.fill_between(epsilons, low, high, color=style["color"], alpha=0.15, lw=0)
    ax.axhline(baselines["without privacy"][k], color="#555555", lw=1, label="without privacy")
    if k == 1:
        ax.axhline(baselines["local"][k], color="#555555", lw=1, ls="--", label="local")
    ax.set(xscale="log", yscale="log", xticks=epsilons, xticklabels=epsilons, xlabel="epsilon")
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
ticks = [[0.01, 0.03, 0.1, 0.3, 1], [0.3, 0.5, 1, 2]]
for ax, at in zip(axes, ticks, strict=True):
    ax.set(yticks=at, yticklabels=at)
axes[0].set(title="population coefficients", ylabel="L2 error")
axes[1].set(title="clients' coefficients", ylabel="mean squared error")
handles, labels = axes[1].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
fig.suptitle(
    "2,000 clients with 8 rows: median and middle 80 % of 10 releases\n"
    "(replace one, delta = 1e-5, trusted server)"
)
plt.show()

# %%
# Which bounds?
# -------------
# Rows beyond ``feature_bound`` are scaled down together with their target. The factor depends on
# their features alone, so these rows count less but cause no bias. A bound that most rows exceed
# therefore only loses some information. A ``target_bound`` that is too small is worse: it clips the
# target, which biases coefficients towards 0, with or without noise. Bounds that are too wide add
# noise. So choose a generous ``target_bound`` (right panel) and a tight ``feature_bound`` (left
# panel).
choices = {
    "feature_bound": [0.5, 1, 2, 4, 8],
    "target_bound": [1, 2, 4, 8, 16],
}
fig, axes = plt.subplots(1, 2, figsize=(8.3, 4), layout="constrained", sharey=True)
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
    "Bounds: median of 10 releases (unit client, replace one, delta = 1e-5, trusted server)"
)
plt.show()

# %%
# The table is simulated, so we may look at the rows beyond the bounds:
print(f"rows beyond feature_bound = 2: {beyond[0]:.0%}; beyond target_bound = 6: {beyond[1]:.2%}")
