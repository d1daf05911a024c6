"""
State totals from county rows
=============================

A fifth of the counties of each state (three at least) is counted. What will the others add up to?
The truth is known: these are the votes of 2016 for president, from the MIT Election Lab.

The rows are counties and the clients are states, whose lines differ. A total adds predictions of
counties that share a state's line, so their errors do not average out.
"""

# %%
# The rows
# --------
# The vote of 2012 predicts that of 2016, and so does the size of a county: large cities moved the
# other way. A total counts large counties most, so a model of counties has to get these right.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.datasets import load_county_elections
from pfl_sklearn.linear_model import PersonalizedLinearRegression

votes = load_county_elections().frame.assign(cast=lambda v: v["votes_rep"] + v["votes_dem"])
votes["share"] = votes["votes_rep"] / votes["cast"]
before, now = (votes[votes["year"] == year].set_index("fips") for year in (2012, 2016))
county = now[["state", "cast", "share"]].join((before["share"] - 0.5).rename("share_before"))
county["size"] = np.log(before["cast"] / 10_000)
county["size_squared"] = county["size"] ** 2
county = county.dropna()


def totals(features, seed):
    """Predicted shares of the states' counties that are not counted, and the true ones."""
    mixed = county.sample(frac=1, random_state=seed)
    at, n = mixed.groupby("state").cumcount(), mixed.groupby("state")["cast"].transform("size")
    is_seen = at < np.maximum(3, n / 5)
    seen, rest = mixed[is_seen], mixed[~is_seen]
    model = PersonalizedLinearRegression().fit(seen[features], seen["share"], groups=seen["state"])
    rows = {"groups": rest["state"], "weights": rest["cast"], "mean": True, "new_row": True}
    table = model.predict_total(rest[features], by=rest["state"], **rows)
    sums = rest.assign(votes=rest["share"] * rest["cast"]).groupby("state")[["votes", "cast"]].sum()
    return table.assign(true=sums["votes"] / sums["cast"])


FEATURES = ["share_before", "size", "size_squared"]
table = totals(FEATURES, 0)
print(table.round(3).loc[["GA", "IA", "NY", "OH", "TX"]])

# %%
# The intervals
# -------------
# Over five draws of counties, nearly all true shares are inside their intervals of 95 %. Without
# the size of a county half of them are outside: no formula for errors repairs a model that large
# counties do not follow.
for features in (FEATURES, ["share_before"]):
    found = pd.concat([totals(features, seed) for seed in range(5)])
    inside = found["true"].between(found["lower"], found["upper"])
    print(f"{', '.join(features):<34}{inside.mean():.2f}")

ordered = table.sort_values("mean")
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
ax.vlines(ordered.index, ordered["lower"], ordered["upper"], color="#1f5fa8", lw=3, alpha=0.35)
ax.plot(ordered["mean"], "o", color="#1f5fa8", ms=4, label="predicted, with 95 % interval")
ax.plot(ordered["true"], "x", color="#2a7f3f", ms=5, label="true")
ax.tick_params(axis="x", rotation=90, labelsize="x-small")
ax.set_ylabel("Republican share, other counties")
ax.legend(frameon=False)
