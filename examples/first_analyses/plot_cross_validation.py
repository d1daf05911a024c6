"""
Local, pooled or personalized? Cross-validation within clients
==============================================================

A table has one row per house and a column with the county. Should a county's mean be estimated from
its own houses, from all houses, or from both? Cross-validation answers such questions if it splits
within clients. scikit-learn's group splitters hold out whole groups, so a held-out county would
only get the population model.

:class:`~pfl_sklearn.model_selection.ClientKFold` keeps rows of every client on both sides, and
client ids reach ``fit`` and ``predict`` in one of two ways: routed as ``groups``, or as a column of
the table. We show both with the logarithm of radon in houses in Minnesota, from
:func:`~pfl_sklearn.datasets.load_radon`.
"""

# %%
# The table
# ---------
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import sklearn
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.datasets import load_radon
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.metrics import ClientScorer, client_scores
from pfl_sklearn.model_selection import ClientKFold, ClientShuffleSplit
from pfl_sklearn.priors import GaussianPrior

houses = load_radon("MN").frame
X, y, county = houses[["floor"]], houses["log_radon"], houses["county_fips"]
sizes = county.value_counts()
print(f"{len(houses)} houses in {len(sizes)} counties, {sizes.min()} to {sizes.max()} each")

# %%
# Routed groups
# -------------
# With metadata routing enabled, pipelines and searches pass ``groups`` to every step that requests
# them. The estimators, splitters and scorers of this package do so by default. The scorer must be a
# :class:`~pfl_sklearn.metrics.ClientScorer`, because scikit-learn's scorers do not pass groups to
# ``predict``.
#
# :class:`~pfl_sklearn.estimation.GaussianMean` uses no column of X; the pipeline only shows that
# ids pass through it. The three competitors are one estimator with three priors. An infinite
# variance between clients gives every county its own mean, zero gives one mean for all, and None
# (the default) estimates the variance.
sklearn.set_config(enable_metadata_routing=True)

priors = {
    "local": GaussianPrior(covariance=np.inf),
    "pooled": GaussianPrior(covariance=0.0),
    "personalized": GaussianPrior(),
}
scoring = {
    "per house": ClientScorer("neg_mean_squared_error"),
    "per county": ClientScorer("neg_mean_squared_error", average="macro"),
}
rows = []
for name, prior in priors.items():
    pipeline = make_pipeline(StandardScaler(), GaussianMean(prior))
    for seed in range(10):
        scores = cross_validate(
            pipeline,
            X,
            y,
            scoring=scoring,
            cv=ClientKFold(5, random_state=seed),
            params={"groups": county},
        )
        errors = {average: -scores[f"test_{average}"].mean() for average in scoring}
        rows.append({"estimate": name, "shuffle": seed, **errors})
results = pd.DataFrame(rows)
print("mean squared error of held-out houses, mean of 10 times 5 folds")
print(results.groupby("estimate", sort=False)[list(scoring)].mean().round(3).to_string())
for average in scoring:
    by_shuffle = results.pivot(index="shuffle", columns="estimate", values=average)
    wins = (by_shuffle.idxmin(axis=1) == "personalized").sum()
    print(f"{average}: personalized is best in {wins} of {len(by_shuffle)} shuffles")

# %%
# "Per house" gives every house the same weight, "per county" every county. The latter gives more
# weight to the many counties with few houses, for which local means do worst. Personalized
# estimates have the smallest error under both.
#
# Every dot is one shuffle of the folds, and a bar is their mean. Most of each error is the variance
# of houses within a county, which no mean can predict. Only the small remainder can be reduced.
colors = {"local": "#8c8c8c", "pooled": "#c1440e", "personalized": "#1f5fa8"}
fig, axes = plt.subplots(1, 2, figsize=(7.5, 3.2), layout="constrained", sharey=True)
jitter = np.linspace(-0.15, 0.15, 10)
for ax, average in zip(axes, scoring, strict=True):
    for at, (name, part) in enumerate(results.groupby("estimate", sort=False)):
        ax.plot(part[average], at + jitter, "o", color=colors[name], ms=4, alpha=0.5)
        ax.plot(part[average].mean(), at, "|", color=colors[name], ms=22, mew=2)
    ax.set(xlabel=f"mean squared error {average}")
    ax.locator_params(axis="x", nbins=4)
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set(yticks=range(3), yticklabels=list(priors), ylim=(2.5, -0.5))
fig.suptitle("ClientKFold: 10 shuffles of 5 folds")
plt.show()

# %%
# Searching the prior
# -------------------
# A search can include parameters of the prior. The error as a function of the variance between
# clients has its minimum between "pooled" on the left and "local" on the right. The estimated
# variance (None in the grid) needs no search.
variances = [0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, None]
search = GridSearchCV(
    make_pipeline(StandardScaler(), GaussianMean(GaussianPrior())),
    {
        "gaussianmean__prior__covariance": variances,
        "gaussianmean__method": ["reml", "moments"],
    },
    scoring=ClientScorer("neg_mean_squared_error"),
    cv=ClientKFold(5, random_state=0),
)
search.fit(X, y, groups=county)
candidates = pd.DataFrame(search.cv_results_["params"])
candidates.columns = ["method", "covariance"]
candidates["error"] = -search.cv_results_["mean_test_score"]
estimated = candidates[candidates["covariance"].isna()].set_index("method")["error"]
print("best:", search.best_params_)
print("estimated variance:", estimated.round(4).to_dict())

model = GaussianMean().fit(X, y, groups=county)
variance = float(model.prior_.covariance[0, 0])
fixed = candidates[(candidates["method"] == "reml") & candidates["covariance"].notna()]
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
ax.plot(fixed["covariance"], fixed["error"], "o-", color="#8c8c8c", label="variance fixed")
ax.plot(variance, estimated["reml"], "*", color="#1f5fa8", ms=14, label="variance estimated (REML)")
ax.set_xscale("symlog", linthresh=0.003, linscale=0.5)
ax.set(
    xlim=(-0.0005, 5),
    xticks=[0, 0.01, 0.1, 1],
    xticklabels=["0 (pooled)", "0.01", "0.1", "1"],
    xlabel="between-county variance",
    ylabel="mean squared error per house",
    title="GridSearchCV over the prior",
)
ax.minorticks_off()
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
plt.show()

# %%
# New and known counties
# ----------------------
# ``ClientShuffleSplit(new_clients=...)`` also holds out whole counties, which get the population
# model; ``ClientScorer(subset="new")`` scores only these. The two errors are for different houses,
# so their difference is not the effect of being new.
splitter = ClientShuffleSplit(20, new_clients=0.1, random_state=0)
both = cross_validate(
    GaussianMean(),
    X,
    y,
    scoring={
        "known": ClientScorer("neg_mean_squared_error", subset="known"),
        "new": ClientScorer("neg_mean_squared_error", subset="new"),
    },
    cv=splitter,
    params={"groups": county},
)
print(f"mean squared error, known counties: {-both['test_known'].mean():.3f}")
print(f"mean squared error, new counties:   {-both['test_new'].mean():.3f}")

# %%
# The id as a column
# ------------------
# :class:`~pfl_sklearn.compose.ClientColumn` takes the ids from a column of the table. It needs no
# routing (disabled again here), and it works with string scorers and all other scikit-learn tools
# that cannot pass groups to ``predict``.
sklearn.set_config(enable_metadata_routing=False)

with_ids = houses[["county_fips", "floor"]]
wrapped = ClientColumn(make_pipeline(StandardScaler(), GaussianMean()), "county_fips")
scores = cross_val_score(
    wrapped,
    with_ids,
    y,
    cv=ClientKFold(5, client_column="county_fips", random_state=0),
    scoring="neg_mean_squared_error",
)
print(f"ClientColumn: {-scores.mean():.6f}, routed: {estimated['reml']:.6f}")

# %%
# Gains by county
# ---------------
# :func:`~pfl_sklearn.metrics.client_scores` returns one row per county, with its score on held-out
# houses, the score of the population model on the same houses, and the difference. Not every county
# gains: for some with few houses, the population model is better.
train, test = next(ClientKFold(2, random_state=0).split(X, groups=county))
model = GaussianMean().fit(X.iloc[train], y.iloc[train], groups=county.iloc[train])
per_county = client_scores(
    model,
    X.iloc[test],
    y.iloc[test],
    groups=county.iloc[test],
    scoring="neg_mean_squared_error",
)
print(per_county.sort_values("n_rows", ascending=False).head().round(3).to_string())
print({name: round(value, 3) for name, value in per_county.attrs.items()})
