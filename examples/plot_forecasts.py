"""
Forecasts: folds that look forward
==================================

How severe will a patient's symptoms be at the next visits? Folds of random visits answer another
question, because they test a visit between others that are known.
:class:`~pfl_sklearn.model_selection.ClientTimeSeriesSplit` trains on a patient's past and tests
what comes next, and a stack whose ``cv`` goes forward in time learns from such forecasts.

The table is :func:`~pfl_sklearn.datasets.load_parkinsons`: speech of 42 patients with Parkinson's
disease, recorded at home for half a year, and their total UPDRS (from 7 to 55 points here).
"""

# %%
# Visits in order of time
# -----------------------
# A visit has about six recordings with one assessment, and becomes one row. The assessments were
# made three times; the values between were interpolated by those who published the table, so that
# a visit between two others is easy to predict, and a later one is not.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.compose import PersonalizedStackingRegressor
from pfl_sklearn.datasets import load_parkinsons
from pfl_sklearn.model_selection import ClientTimeSeriesSplit

recordings = load_parkinsons().frame
day = recordings["test_time"].round().rename("day")
visits = recordings.groupby([recordings["subject"], day]).mean().reset_index()
X, y = visits[["day", "PPE", "DFA", "HNR", "RPDE"]], visits["total_UPDRS"]
subject = visits["subject"]
print(f"{len(visits)} visits of {subject.nunique()} patients")

# %%
# Three ways to learn a stack
# ---------------------------
# The last visits of every patient are held out: two blocks of about a seventh of them each. Before
# each block a stack of boosted trees and personalized lines is fitted in
#
# - random folds inside patients, the default;
# - folds forward in time, ``cv=ClientTimeSeriesSplit(5, time_column="day")``. With rows in order of
#   time that is ``cv="time"``;
# - the last five of ten such folds. Early folds have a history of few visits, in which trees learn
#   little. Late ones have nearly as much as the forecast will have.


def late_folds(X, groups):
    """The last five of ten folds forward in time."""
    return list(ClientTimeSeriesSplit(10, time_column="day").split(X, groups=groups))[-5:]


WAYS = {
    "random folds": lambda X, groups: 5,
    "forward folds": lambda X, groups: ClientTimeSeriesSplit(5, time_column="day"),
    "late forward folds": late_folds,
}
rows, stated = [], []
outer = list(ClientTimeSeriesSplit(6, time_column="day").split(X, groups=subject))[-2:]
for train, test in outer:
    known = X.iloc[train], subject.iloc[train]
    ahead = visits.iloc[test].groupby("subject").cumcount() + 1
    for way, cv in WAYS.items():
        model = PersonalizedStackingRegressor(cv=cv(*known), unseen="population", random_state=0)
        model.fit(known[0], y.iloc[train], groups=known[1])
        predicted = model.predict(X.iloc[test], groups=subject.iloc[test])
        stated.append((way, model.losses_.loc[model.known_part_, "known"]))
        rows += [(way, *each) for each in zip(ahead, (predicted - y.iloc[test]) ** 2, strict=True)]
        print(f"{len(train)} visits, {way}: {model.known_part_!r} predicts")

errors = pd.DataFrame(rows, columns=["way", "visits ahead", "squared error"])
stated = pd.DataFrame(stated, columns=["way", "stated"]).groupby("way", sort=False)["stated"].mean()
table = pd.DataFrame({"stated": stated}).assign(
    forecast=errors.groupby("way")["squared error"].mean()
)
print("\nroot mean squared error in UPDRS points")
print((table**0.5).round(2).to_string())

# %%
# By the number of visits ahead
# -----------------------------
# The dashed lines are what the stacks say of themselves (``losses_``). Random folds promise far too
# much, at any number of visits ahead. Forward folds are nearer to the truth, and those with a long
# history also lead to better forecasts.
by_step = errors.groupby(["way", "visits ahead"], sort=False)["squared error"].agg(["mean", "size"])
fig, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
for way, color in zip(WAYS, ("#8c8c8c", "#c1440e", "#1f5fa8"), strict=True):
    line = by_step.loc[way].sort_index()
    line = line[line["size"] >= 30]  # a few patients have more visits in a block
    ax.plot(line.index, np.sqrt(line["mean"]), "o-", color=color, label=way)
    ax.axhline(np.sqrt(stated[way]), color=color, ls="--", lw=1)
ax.set(
    xlabel="visits ahead",
    ylabel="root mean squared error (UPDRS points)",
    title="Forecasts (solid), and what the folds say (dashed)",
    ylim=(0, None),
)
ax.locator_params(axis="x", integer=True)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
plt.show()
