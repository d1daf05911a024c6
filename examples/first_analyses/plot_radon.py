"""
Radon: counties, floors, and counties never measured
====================================================

Radon seeps from the ground into houses. In 919 houses in 85 counties of Minnesota it was measured,
in the basement or on the first floor. Most counties have few houses: half of them have five or
fewer. How much radon is typical of a county, and what should we expect in a county without any
measurement?

The uranium content of the soil is known for every county. It is a feature of the client, not of the
house, and it explains most of the differences between counties. The example is from the textbook of
Gelman and Hill (2007).

The table comes with the package: :func:`~pfl_sklearn.datasets.load_radon`.
"""

# %%
# The table
# ---------
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.base import clone

from pfl_sklearn.datasets import load_radon
from pfl_sklearn.inspection import CoefficientDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.model_selection import ClientShuffleSplit
from pfl_sklearn.priors import GaussianPrior

houses = load_radon("MN").frame
log_radon, county = houses["log_radon"], houses["county_fips"]
sizes = county.value_counts()
print(f"{len(houses)} houses in {len(sizes)} counties, {sizes.min()} to {sizes.max()} each")

# %%
# Differences between counties
# ----------------------------
# The first model has a random intercept by county and one effect of the floor:
# ``random="intercept"``. The second adds the logarithm of the county's uranium. This feature is
# constant within clients, so its coefficient must not vary: no client alone can identify it.
FLOOR, BOTH = ["floor"], ["floor", "log_uranium"]
plain = PersonalizedLinearRegression(random="intercept")
plain.fit(houses[FLOOR], log_radon, groups=county)
with_uranium = PersonalizedLinearRegression(random="intercept")
with_uranium.fit(houses[BOTH], log_radon, groups=county)

for name, model in {"floor": plain, "floor and uranium": with_uranium}.items():
    print(f"\n{name}: -2 log REML {-2 * model.log_likelihood_:.2f}")
    print(model.summary().round(3).to_string(na_rep=""))

# %%
# Uranium halves the standard deviation between counties, from .33 to .16: the soil explains most of
# the differences. (In lme4, the models are ``floor + (1 | county)`` and
# ``floor + log_uranium + (1 | county)``. Restricted likelihoods of models with different features
# cannot be compared; the standard deviations can.)
#
# The caterpillar plots show the same. With uranium, hardly any county's deviation differs
# significantly from zero, although their variance is not zero.
fig, axes = plt.subplots(1, 2, figsize=(7.5, 4.2), layout="constrained", sharey=True)
for ax, model, title in zip(axes, [plain, with_uranium], ["floor", "floor, uranium"], strict=True):
    CoefficientDisplay.from_estimator(model, feature="intercept", ax=ax)
    ax.set(xlabel="county, sorted", title=title)
axes[1].set_ylabel("")
axes[1].get_legend().remove()
fig.suptitle("Intercepts of 85 counties: log radon in the basement")
plt.show()

# %%
# The next plot shows the second model: a county's mean in the basement against its uranium. The
# line is the population's model, the band its 95 % interval, and a dot is the county's personalized
# mean with its 95 % interval. Rings are local means (corrected for the floor). The fewer houses,
# the closer a dot is to the line. The dots of the largest counties are at their local means.
uranium = houses.groupby("county_fips")["log_uranium"].first()[with_uranium.clients_]
basement = pd.DataFrame({"floor": 0.0, "log_uranium": uranium.to_numpy()})
mean, std = with_uranium.predict(basement, groups=with_uranium.clients_, return_std=True)
local = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), random="intercept")
local.fit(houses[FLOOR], log_radon, groups=county)

grid = np.linspace(uranium.min() - 0.05, uranium.max() + 0.05, 50)
line = with_uranium.population_intercept_ + with_uranium.population_coef_[1] * grid
design = np.column_stack([np.ones(50), np.zeros(50), grid])  # intercept first
error = np.sqrt(np.einsum("np,pq,nq->n", design, with_uranium.population_covariance_, design))

fig, ax = plt.subplots(figsize=(7, 4.6), layout="constrained")
ax.fill_between(grid, line - 1.96 * error, line + 1.96 * error, color="#c1440e", alpha=0.15, lw=0)
ax.plot(grid, line, color="#c1440e", lw=1.2, label="population")
ax.vlines(uranium, mean - 1.96 * std, mean + 1.96 * std, color="#1f5fa8", alpha=0.3)
area = 6 + 1.5 * local.n_samples_per_client_
ax.scatter(uranium, local.intercept_, s=area, facecolor="none", edgecolor="#8c8c8c")
ax.plot([], [], "o", mfc="none", mec="#8c8c8c", label="local (area: number of houses)")
ax.plot(uranium, mean, ".", color="#1f5fa8", label="personalized")
ax.set(
    xlabel="logarithm of uranium in the county's soil (ppm)",
    ylabel="log radon in the basement",
    title="85 counties",
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small", loc="upper left")
plt.show()

# %%
# Does the floor's effect vary?
# -----------------------------
# With ``random="all"`` and a full covariance, the effect of the floor varies by county. Two more
# variance parameters increase the restricted likelihood only slightly. The features are the same,
# so the likelihoods are comparable. (A variance cannot be negative, so twice the gain is not quite
# chi-squared: the usual p-value is conservative.)
varying = PersonalizedLinearRegression(GaussianPrior(covariance_type="full"), random="all")
varying.fit(houses[FLOOR], log_radon, groups=county)
print(varying.summary().round(3).to_string(na_rep=""))
gain = 2 * (varying.log_likelihood_ - plain.log_likelihood_)
print(f"twice the gain in log restricted likelihood: {gain:.2f} for 2 parameters")

# %%
# Held-out houses and held-out counties
# -------------------------------------
# :class:`~pfl_sklearn.model_selection.ClientShuffleSplit` tests both in one split: all houses in a
# tenth of the counties, and a fifth of the houses in every other county. The two columns are for
# different houses, so compare down, not across.
#
# There are two local models: a separate regression per county, and a separate intercept with a
# common effect of the floor ("fixed effects" in econometrics). For a new county, a local model uses
# the mean of the counties' coefficients.
LOCAL, POOLED = GaussianPrior(covariance=np.inf), GaussianPrior(covariance=0.0)
competitors = {
    "local": (PersonalizedLinearRegression(LOCAL), FLOOR),
    "local intercepts": (PersonalizedLinearRegression(LOCAL, random="intercept"), FLOOR),
    "pooled": (PersonalizedLinearRegression(POOLED), FLOOR),
    "pooled, uranium": (PersonalizedLinearRegression(POOLED), BOTH),
    "personalized": (clone(plain), FLOOR),
    "personalized, floor too": (clone(varying), FLOOR),
    "personalized, uranium": (clone(with_uranium), BOTH),
}
splitter = ClientShuffleSplit(10, test_size=0.2, new_clients=0.1, random_state=0)
results = []
for fold, (train, test) in enumerate(splitter.split(houses, groups=county)):
    new = ~county.iloc[test].isin(county.iloc[train])
    for name, (model, columns) in competitors.items():
        model.set_params(unseen="population")  # new counties are expected
        model.fit(houses.iloc[train][columns], log_radon.iloc[train], groups=county.iloc[train])
        mean, std = model.predict(
            houses.iloc[test][columns], groups=county.iloc[test], return_std=True
        )
        error = log_radon.iloc[test] - mean
        width = 1.96 * np.sqrt(std**2 + model.noise_variance_)
        keys = {"model": name, "fold": fold, "county": np.where(new, "new", "known")}
        results.append(pd.DataFrame({**keys, "square": error**2, "covered": abs(error) < width}))
results = pd.concat(results)
scores = results.groupby(["model", "county"], sort=False)[["square", "covered"]].mean()
scores.columns = ["mean squared error", "in 95 % interval"]
scores = scores.unstack()
print(f"held-out houses, {splitter.get_n_splits()} splits")
print(scores.round(3).to_string())

# %%
# For known counties, personalized intercepts are better than local and pooled ones, and better
# still with uranium. The gain over *pooled, uranium* is small: given the soil, the county's houses
# add little information. For new counties only the features matter, and of these only uranium
# differs between counties.
#
# The last columns are the share of held-out houses in their 95 % prediction intervals, which
# combine the uncertainty of the mean response and the variance of houses. For a new county, they
# also include the variance between counties. A local model has no information about a new county:
# its intervals are infinite and contain every house.
#
# The plot shows differences within splits; bars are two standard errors over the splits. The splits
# overlap, so the bars are somewhat too short.
splits = results.groupby(["model", "county", "fold"], sort=False)["square"].mean()
splits = splits.unstack("fold")
fig, axes = plt.subplots(1, 2, figsize=(7.5, 3.6), layout="constrained", sharey=True)
names = list(competitors)
colors = ["#8c8c8c", "#8c8c8c", "#c1440e", "#c1440e", "#1f5fa8", "#1f5fa8", "#1f5fa8"]
for ax, kind in zip(axes, ["known", "new"], strict=True):
    reference = splits.loc[("personalized, uranium", kind)]
    for at, (name, color) in enumerate(zip(names, colors, strict=True)):
        difference = splits.loc[(name, kind)] - reference
        half = 2 * difference.std() / np.sqrt(len(difference))
        ax.plot(difference.mean(), at, "o", color=color, ms=5)
        ax.hlines(at, difference.mean() - half, difference.mean() + half, color=color, lw=1.5)
    ax.axvline(0, color="black", lw=0.8)
    ax.set(title=f"{kind} counties", xlabel="difference in squared error")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
fig.suptitle(f"Compared with personalized, uranium: {splitter.get_n_splits()} splits")
plt.show()

# %%
# A county without measurements
# -----------------------------
# Only its uranium is needed. For an id that was not in ``fit``, ``predict`` uses the population's
# model; with ``unseen="population"`` it does not warn. ``return_std`` includes the uncertainty of
# the coefficients and the variance between counties. We print concentrations, not logarithms.
new = pd.DataFrame({"floor": 0.0, "log_uranium": np.log([0.5, 1.0, 1.6])})
largest = sizes.index[0]
rows = pd.concat([new, basement.loc[with_uranium.clients_ == largest]])
with_uranium.set_params(unseen="population")
mean, std = with_uranium.predict(rows, groups=[-1, -1, -1, largest], return_std=True)


def interval(std):
    """95 % intervals of radon as strings."""
    limits = np.exp([mean - 1.96 * std, mean + 1.96 * std]).T
    return [f"{lower:.1f} to {upper:.1f}" for lower, upper in limits]


print(
    pd.DataFrame(
        {
            "county": ["new"] * 3 + [f"largest ({sizes.iloc[0]} houses)"],
            "uranium (ppm)": np.exp(rows["log_uranium"]).round(2),
            "median": np.exp(mean).round(1),
            "95 % for the county": interval(std),
            "95 % for a house": interval(np.sqrt(std**2 + with_uranium.noise_variance_)),
        }
    ).to_string(index=False)
)

# %%
# References
# ----------
# Gelman, A. and Hill, J. (2007). Data Analysis Using Regression and Multilevel/Hierarchical Models.
# Cambridge University Press.
