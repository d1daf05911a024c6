"""
Groups of clients: when there is more than one population
=========================================================

Shrinkage moves every client towards the population's mean. If clients belong to different kinds, no
client may be near that mean. A mixture prior shrinks them towards their own kind instead. It is not
known which client is of which kind, how many kinds there are, or where they lie.

All tables here are simulated, so that we can compute errors. We start with means of two
measurements, then fit regressions, and end with means under differential privacy.
"""

# %%
# Three kinds of clients
# ----------------------
# 300 clients have four rows each, of two measurements. Half of the clients are of one kind, the
# others of two further kinds. Clients of a kind differ (standard deviation 0.4), and a client's
# mean of four rows is off by 0.6 in each measurement.
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.patches import Ellipse

from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior, GaussianPrior

KINDS = np.array([[0.0, 0.0], [2.5, 0.8], [0.2, 2.6]])
WEIGHTS, SPREAD, NOISE, N_ROWS = [0.5, 0.3, 0.2], 0.4, 1.2, 4


def simulated_clients(n_clients, seed):
    """Rows, client ids, true means and kinds."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(len(KINDS), n_clients, p=WEIGHTS)
    means = KINDS[kind] + SPREAD * rng.normal(size=(n_clients, 2))
    groups = np.repeat(np.arange(n_clients), N_ROWS)
    return means[groups] + NOISE * rng.normal(size=(len(groups), 2)), groups, means, kind


def fitted(prior, rows, groups, **params):
    """Clients' means; X is not read, only its length counts."""
    return GaussianMean(prior, **params).fit(np.zeros((len(rows), 1)), rows, groups=groups)


def mse(estimates, truth):
    """Mean squared length of the errors."""
    return np.mean(np.sum((estimates - truth) ** 2, axis=1))


rows, groups, truth, kind = simulated_clients(300, seed=0)
priors = {
    "one Gaussian": GaussianPrior(covariance_type="spherical"),
    "DiscretePrior": DiscretePrior(n_components="bic"),
    "GaussianMixturePrior": GaussianMixturePrior(n_components="bic"),
}
models = {name: fitted(prior, rows, groups) for name, prior in priors.items()}

# %%
# ``n_components="bic"`` chooses the number of components, and the mixture finds the three kinds.
# The discrete prior takes a fourth point: clients of a kind differ, and one point cannot represent
# that.
for name in ("DiscretePrior", "GaussianMixturePrior"):
    prior = models[name].prior_
    centres = getattr(prior, "points" if name == "DiscretePrior" else "means")
    print(f"{name}: {prior.n_components} components")
    print(pd.DataFrame(centres, columns=["first", "second"]).assign(weight=prior.weights).round(2))

# %%
# Every line goes from a client's own mean to its estimate, in the colour of its most probable
# component. One Gaussian shrinks all clients towards the middle. A discrete prior moves them onto
# points, or between points where their kind is uncertain. The mixture shrinks them towards their
# kind and keeps some of their differences.
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


fig, axes = plt.subplots(1, 3, figsize=(10, 4.2), layout="constrained", sharex=True, sharey=True)
for ax, (name, model) in zip(axes, models.items(), strict=True):
    own, estimates = model.local_means_, model.means_
    shares = getattr(model, "responsibilities_", np.ones((len(own), 1)))
    colors = np.array(COLORS)[np.argmax(shares, axis=1)]
    ax.plot(*own.T, "o", mfc="white", mec="#bbbbbb", ms=3)
    ax.quiver(
        *own.T,
        *(estimates - own).T,
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
    ax.set(title=f"{name}\nmean squared error {mse(estimates, truth):.2f}", xlabel="first")
    ax.set_aspect("equal")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("second")
local = mse(models["one Gaussian"].local_means_, truth)
fig.suptitle(f"From own means (rings; error {local:.2f}) to estimates (dots); black: the prior")
plt.show()

# %%
# ``responsibilities_`` are the probabilities of the components, client by client. They should be
# calibrated: of the clients whose most probable component has a probability of about .7, about 70
# percent should belong to it.
mixture = models["GaussianMixturePrior"]
nearest = np.argmin(((mixture.prior_.means[:, None] - KINDS) ** 2).sum(axis=2), axis=1)
guess = nearest[mixture.responsibilities_.argmax(axis=1)]
surest = pd.cut(mixture.responsibilities_.max(axis=1), [0, 0.8, 0.99, 1.0])
print(
    pd.DataFrame({"clients": 1, "right": guess == kind, "said": mixture.responsibilities_.max(1)})
    .groupby(surest, observed=True)
    .agg({"clients": "sum", "said": "mean", "right": "mean"})
    .round(2)
)

# %%
# Regressions of two kinds
# ------------------------
# 400 clients have 20 coefficients and eight rows, so no client can estimate its own. Half of them
# have coefficients near 0.5, half near -0.5: the population's mean is about 0, and shrinking
# towards it does not help. But a client's few rows suffice to tell its kind.
#
# ``method="printed"`` is AdaMix as published, which clusters the clients' point estimates. With few
# rows these are mostly noise, and so are the clusters. The mixture here is fitted to the marginal
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
        warnings.filterwarnings("ignore", category=UserWarning)  # 100 steps are not to the end
        errors[name] = mse(model.fit(X, y, groups=who).coef_, theta)
print("mean squared error of the clients' coefficients, one simulated table")
print(pd.Series(errors).round(3).to_string())

# %%
# With privacy
# ------------
# Now there are 5,000 clients of the same three kinds, and the server pools their means under
# differential privacy: unit one client with all its rows, relation replace one, delta 1e-5.
# ``trust="central"`` runs k-means and EM on noisy sums, under one budget. A last noisy sum
# estimates whether the result helps the clients. If not, they keep their own means, and a warning
# says so. We give the noise variance and the bound.
N_CLIENTS, N_COMPONENTS, N_REPETITIONS = 5000, 3, 10
rows, groups, truth, _ = simulated_clients(N_CLIENTS, seed=2)
released = {"noise_variance": NOISE**2, "clip_norm": 3.0, "center": [1.0, 1.0]}
print(
    fitted(
        GaussianMixturePrior(N_COMPONENTS), rows, groups, epsilon=1.0, delta=1e-5, **released
    ).privacy_
)

# %%
# The table shows errors over ten releases for each epsilon, and how many of these fits fell back to
# local means. The single Gaussian is also released. It needs three sums only once, so a small
# epsilon suffices, but it gains less.
epsilons = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]


def private_errors(prior, epsilon):
    """Mean squared errors of several releases, and how many of them fell back to local means."""
    found, fallbacks = [], 0
    for _ in range(N_REPETITIONS):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The released")
            model = fitted(prior, rows, groups, epsilon=epsilon, delta=1e-5, **released)
        found.append(mse(model.means_, truth))
        fallbacks += np.array_equal(model.means_, model.local_means_)
    return found, fallbacks


shown = {
    "one Gaussian": GaussianPrior(covariance_type="spherical"),
    "DiscretePrior(3)": DiscretePrior(N_COMPONENTS),
    "GaussianMixturePrior(3)": GaussianMixturePrior(N_COMPONENTS),
}
trials = {
    name: [private_errors(prior, epsilon) for epsilon in epsilons] for name, prior in shown.items()
}
exact = {name: mse(fitted(prior, rows, groups).means_, truth) for name, prior in shown.items()}
summary = {
    name: [f"{np.mean(found):.3f} ({fallbacks})" for found, fallbacks in results]
    for name, results in trials.items()
}
table = pd.DataFrame(summary, index=pd.Index(epsilons, name="epsilon"))
table.loc["none"] = [f"{exact[name]:.3f}" for name in shown]
own = rows.reshape(N_CLIENTS, N_ROWS, 2).mean(axis=1)
print("mean squared error (local fits of 10); unit: one client; relation: its rows replaced by any")
print("others; delta = 1e-5; adversary: everybody but the trusted server")
print(f"local means: {mse(own, truth):.3f}")
print(table.to_string())

# %%
fig, ax = plt.subplots(figsize=(7, 4.4), layout="constrained")
ax.axhline(mse(own, truth), color="#555555", lw=1, ls="--")
ax.text(epsilons[-1], mse(own, truth), "local means", ha="right", va="bottom", fontsize="small")
for color, (name, results) in zip(["#8c8c8c", *COLORS], trials.items(), strict=False):
    found = np.array([errors_of for errors_of, _ in results])
    ax.plot(epsilons, found.mean(axis=1), "o-", color=color, label=name)
    ax.fill_between(epsilons, found.min(axis=1), found.max(axis=1), color=color, alpha=0.15, lw=0)
    ax.axhline(exact[name], color=color, lw=1, ls=":")
ax.set(
    xscale="log",
    xlabel="epsilon (one client, replace one, delta = 1e-5, central trust)",
    ylabel="mean squared error",
    title="5,000 clients of three kinds: mean and range of ten fits\n(dotted: without privacy)",
    xticks=epsilons,
    xticklabels=epsilons,
    ylim=(0, None),
)
ax.minorticks_off()
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small", loc="lower left")
plt.show()

# %%
# With ``trust="local"`` every client adds noise to its own mean. Groups are then visible only if
# their distance exceeds the width of that noise, and it takes many clients. The fit decides by BIC.
# Here an epsilon of 2 is far too small.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fitted(DiscretePrior(3), rows, groups, epsilon=2.0, delta=1e-5, trust="local", **released)
print("unit: one client; relation: replace one; epsilon = 2; delta = 1e-5;")
print("adversary: everybody who sees the messages, the server included")
print("\n".join(str(warning.message) for warning in caught) or "no warning")
