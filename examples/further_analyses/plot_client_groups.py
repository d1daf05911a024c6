"""
Groups of clients: when there is more than one population
=========================================================

Shrinkage moves every client towards the population mean. If clients belong to different groups, no
client may be near that mean. A mixture prior shrinks them towards the mean of their group instead.
Neither the clients' groups nor the number and the means of the groups are known.

All tables here are simulated, so that we can compute errors. We start with means of two
measurements, then fit regressions, and end with means under differential privacy.
"""

# %%
# Three groups of clients
# -----------------------
# 300 clients have four rows each, of two measurements. Half of the clients are in the first of
# three groups. Clients of one group differ (standard deviation 0.4), and the mean of four rows has
# a standard error of 0.6 in each measurement.
import textwrap
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.patches import Ellipse

from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior, GaussianPrior

GROUP_MEANS = np.array([[0.0, 0.0], [2.5, 0.8], [0.2, 2.6]])
WEIGHTS, SPREAD, NOISE, N_ROWS = [0.5, 0.3, 0.2], 0.4, 1.2, 4


def simulated_clients(n_clients, seed):
    """Rows, client ids, true means and true groups."""
    rng = np.random.default_rng(seed)
    group = rng.choice(len(GROUP_MEANS), n_clients, p=WEIGHTS)
    means = GROUP_MEANS[group] + SPREAD * rng.normal(size=(n_clients, 2))
    clients = np.repeat(np.arange(n_clients), N_ROWS)
    return means[clients] + NOISE * rng.normal(size=(len(clients), 2)), clients, means, group


def fitted(prior, rows, clients, **params):
    """Client means; only the length of X matters."""
    return GaussianMean(prior, **params).fit(np.zeros((len(rows), 1)), rows, groups=clients)


def mse(estimates, true_values):
    """Mean over clients of the squared error, summed over columns."""
    return np.mean(np.sum((estimates - true_values) ** 2, axis=1))


rows, clients, true_means, group = simulated_clients(300, seed=0)
priors = {
    "one Gaussian": GaussianPrior(covariance_type="spherical"),
    "DiscretePrior": DiscretePrior(n_components="bic"),
    "GaussianMixturePrior": GaussianMixturePrior(n_components="bic"),
}
models = {name: fitted(prior, rows, clients) for name, prior in priors.items()}

# %%
# ``n_components="bic"`` chooses the number of components, and the mixture finds the three groups.
# The discrete prior needs a fourth point: clients of one group differ, and a single point cannot
# represent that.
for name in ("DiscretePrior", "GaussianMixturePrior"):
    prior = models[name].prior_
    centres = getattr(prior, "points" if name == "DiscretePrior" else "means")
    print(f"{name}: {prior.n_components} components")
    print(pd.DataFrame(centres, columns=["first", "second"]).assign(weight=prior.weights).round(2))

# %%
# Each line goes from a client's local mean to its estimate, in the colour of its most probable
# component. One Gaussian shrinks all clients towards the centre. A discrete prior moves them onto
# points, or between points if their group is uncertain. The mixture shrinks them towards their
# group and keeps some of their differences.
COLORS = ["#1f5fa8", "#c1440e", "#3a7d44", "#7b4fa3", "#b58900", "#008b8b", "#aa3377", "#555555"]


def draw_prior(ax, prior):
    """Centres of the components, and ellipses of two standard deviations."""
    if type(prior) is GaussianPrior:
        centres, covariances = prior.mean[None], np.asarray(prior.covariance)[None]
    else:
        centres, covariances, _ = prior.known_mixture(2)
    for centre, covariance in zip(centres, covariances, strict=True):
        width, height = 4 * np.sqrt(np.diag(covariance))
        ax.add_patch(Ellipse(centre, width, height, fill=False, ec="black", lw=1, zorder=3))
    ax.plot(*centres.T, "P", color="black", mec="white", ms=9, zorder=4)


fig, axes = plt.subplots(1, 3, figsize=(8.3, 4), layout="constrained", sharex=True, sharey=True)
for ax, (name, model) in zip(axes, models.items(), strict=True):
    local, estimates = model.local_means_, model.means_
    probabilities = getattr(model, "responsibilities_", np.ones((len(local), 1)))
    colors = np.array(COLORS)[np.argmax(probabilities, axis=1)]
    ax.plot(*local.T, "o", mfc="white", mec="#bbbbbb", ms=3)
    ax.quiver(
        *local.T,
        *(estimates - local).T,
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.002,
        headwidth=1,
        headlength=0,
        headaxislength=0,
        color=colors,
        alpha=0.35,
    )
    ax.scatter(*estimates.T, s=8, color=colors, zorder=2)
    draw_prior(ax, model.prior_)
    ax.set(title=f"{name}\nmean squared error {mse(estimates, true_means):.2f}", xlabel="first")
    ax.set_aspect("equal")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("second")
local_error = mse(models["one Gaussian"].local_means_, true_means)
fig.suptitle(f"From local means (rings; error {local_error:.2f}) to estimates (dots); prior: black")
plt.show()

# %%
# ``responsibilities_`` holds each client's probabilities of the components. They should be
# calibrated: of the clients whose most probable component has a probability of about .7, about 70 %
# should belong to it.
mixture = models["GaussianMixturePrior"]
nearest = np.argmin(((mixture.prior_.means[:, None] - GROUP_MEANS) ** 2).sum(axis=2), axis=1)
correct = nearest[mixture.responsibilities_.argmax(axis=1)] == group
probability = mixture.responsibilities_.max(axis=1)
print(
    pd.DataFrame({"clients": 1, "mean probability": probability, "share correct": correct})
    .groupby(pd.cut(probability, [0, 0.8, 0.99, 1.0]), observed=True)
    .agg({"clients": "sum", "mean probability": "mean", "share correct": "mean"})
    .round(2)
)

# %%
# Regressions in two groups
# -------------------------
# 400 clients have eight rows each and 20 coefficients, so no client can estimate its coefficients
# alone. Half of the clients have coefficients near 0.5, half near -0.5: the population mean is
# about 0, and shrinking towards it does not help. But a few rows are enough to identify a client's
# group.
#
# ``method="printed"`` is AdaMix as published, which clusters the clients' point estimates. With few
# rows these are mostly noise, and so are the clusters. Our mixture is fitted to the marginal
# likelihood, in which the coefficients are integrated out.
rng = np.random.default_rng(1)
m, d, n = 400, 20, 8
sign = rng.choice([-0.5, 0.5], m)
theta = sign[:, None] + 0.05 * rng.normal(size=(m, d))
who = np.repeat(np.arange(m), n)
X = rng.normal(size=(m * n, d))
y = np.sum(X * theta[who], axis=1) + 0.5 * rng.normal(size=m * n)

regressions = {
    "local, of minimum norm": (GaussianPrior(covariance=np.inf), {}),
    "one Gaussian": (GaussianPrior(covariance_type="spherical"), {}),
    "AdaMix as printed, 100 steps": (
        GaussianMixturePrior(2),
        {"method": "printed", "max_iter": 100, "noise_variance": 0.25},
    ),
    "two points": (DiscretePrior(2), {}),
    "mixture of two": (GaussianMixturePrior(2), {}),
}
errors = {}
for name, (prior, params) in regressions.items():
    model = PersonalizedLinearRegression(prior, fit_intercept=False, **params)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # 100 steps do not converge
        errors[name] = mse(model.fit(X, y, groups=who).coef_, theta)
print("mean squared error of the clients' coefficients, one simulated table")
print(pd.Series(errors).round(3).to_string())

# %%
# With privacy
# ------------
# Now 5,000 clients belong to the same three groups, and the server pools their means under
# differential privacy. The unit is one client with all its rows, the relation replace one, and
# delta 1e-5. ``trust="central"`` runs k-means and EM on noisy sums, under one budget. A last noisy
# sum estimates whether the result helps the clients. If not, they keep their local means, and a
# warning says so. We specify the noise variance and the bound.
N_CLIENTS, N_COMPONENTS, N_REPETITIONS = 5000, 3, 6
rows, clients, true_means, _ = simulated_clients(N_CLIENTS, seed=2)
constants = {"noise_variance": NOISE**2, "clip_norm": 3.0, "center": [1.0, 1.0]}
private = GaussianMixturePrior(N_COMPONENTS)
print(fitted(private, rows, clients, epsilon=1.0, delta=1e-5, **constants).privacy_)

# %%
# The table shows the mean error of several releases for each epsilon, and how many of them fell
# back to local means. The single Gaussian is also released. It needs only three sums, once, so a
# small epsilon suffices, but it gains less.
epsilons = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]


def private_errors(prior, epsilon):
    """Mean squared errors of several releases, and the number that fell back to local means."""
    errors, fallbacks = [], 0
    for _ in range(N_REPETITIONS):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The released")
            model = fitted(prior, rows, clients, epsilon=epsilon, delta=1e-5, **constants)
        errors.append(mse(model.means_, true_means))
        fallbacks += np.array_equal(model.means_, model.local_means_)
    return errors, fallbacks


priors = {
    "one Gaussian": GaussianPrior(covariance_type="spherical"),
    "DiscretePrior(3)": DiscretePrior(N_COMPONENTS),
    "GaussianMixturePrior(3)": GaussianMixturePrior(N_COMPONENTS),
}
trials = {
    name: [private_errors(prior, epsilon) for epsilon in epsilons] for name, prior in priors.items()
}
exact = {
    name: mse(fitted(prior, rows, clients).means_, true_means) for name, prior in priors.items()
}
summary = {
    name: [f"{np.mean(errors):.3f} ({fallbacks})" for errors, fallbacks in results]
    for name, results in trials.items()
}
table = pd.DataFrame(summary, index=pd.Index(epsilons, name="epsilon"))
table.loc["none"] = [f"{exact[name]:.3f}" for name in priors]
local_error = mse(rows.reshape(N_CLIENTS, N_ROWS, 2).mean(axis=1), true_means)
print(f"mean squared error (fallbacks to local means, of {N_REPETITIONS} fits)")
print("unit: one client; relation: its rows replaced by any others; delta = 1e-5;")
print("adversary: everybody but the trusted server")
print(f"local means: {local_error:.3f}")
print(table.to_string())

# %%
fig, ax = plt.subplots(figsize=(7, 4.4), layout="constrained")
ax.axhline(local_error, color="#555555", lw=1, ls="--")
ax.text(epsilons[-1], local_error, "local means", ha="right", va="bottom", fontsize="small")
for color, (name, results) in zip(["#8c8c8c", *COLORS], trials.items(), strict=False):
    errors = np.array([errors for errors, _ in results])
    ax.plot(epsilons, errors.mean(axis=1), "o-", color=color, label=name)
    ax.fill_between(epsilons, errors.min(axis=1), errors.max(axis=1), color=color, alpha=0.15, lw=0)
    ax.axhline(exact[name], color=color, lw=1, ls=":")
ax.set(
    xscale="log",
    xlabel="epsilon (one client, replace one, delta = 1e-5, central trust)",
    ylabel="mean squared error",
    title=f"5,000 clients in three groups: mean and range of {N_REPETITIONS} fits\n"
    "(dotted: without privacy)",
    xticks=epsilons,
    xticklabels=epsilons,
    ylim=(0, None),
)
ax.minorticks_off()
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small", loc="lower left")
plt.show()

# %%
# With ``trust="local"``, every client adds noise to its mean. Groups can then be identified only if
# their distance exceeds the standard deviation of that noise, and if there are many clients. The
# fit decides by BIC. Here an epsilon of 2 is far too small.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fitted(DiscretePrior(3), rows, clients, epsilon=2.0, delta=1e-5, trust="local", **constants)
print("unit: one client; relation: replace one; epsilon = 2; delta = 1e-5;")
print("adversary: everybody who sees the messages, the server included")
print("\n".join(textwrap.fill(str(warning.message), 90) for warning in caught) or "no warning")
