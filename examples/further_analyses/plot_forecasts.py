"""
Forecasts: folds that look forward
==================================

How severe will a patient's symptoms be at the next visits? Random folds answer another question,
because they test visits that lie between known ones.
:class:`~pfl_sklearn.model_selection.ClientTimeSeriesSplit` trains on a patient's past and tests on
the visits that follow. A stack can use such folds as its ``cv``.

The table is :func:`~pfl_sklearn.datasets.load_parkinsons`: speech of 42 patients with Parkinson's
disease, recorded at home for half a year, and their total UPDRS (from 7 to 55 points here).
"""

# %%
# Visits in order of time
# -----------------------
# A visit has about six recordings with one score; their means become one row. Patients were
# assessed three times, and the authors of the table interpolated the scores between. So a visit
# between two others is easy to predict, and a later one is not.
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
# Three kinds of folds for a stack
# --------------------------------
# The last seventh of every patient's visits is held out. A stack of boosted trees and personalized
# lines is fitted to the visits before, with
#
# - random folds within patients, the default;
# - folds forward in time, ``cv=ClientTimeSeriesSplit(5, time_column="day")``. If rows are in order
#   of time, ``cv="time"`` is the same;
# - the last five of ten such folds. Early folds have a short history, from which trees learn
#   little. Late folds have nearly as long a history as the forecast.


def late_folds(X, groups):
    """The last five of ten folds forward in time."""
    return list(ClientTimeSeriesSplit(10, time_column="day").split(X, groups=groups))[-5:]


FOLDS = {
    "random folds": lambda X, groups: 5,
    "forward folds": lambda X, groups: ClientTimeSeriesSplit(5, time_column="day"),
    "late forward folds": late_folds,
}
train, test = list(ClientTimeSeriesSplit(6, time_column="day").split(X, groups=subject))[-1]
past, past_subject = X.iloc[train], subject.iloc[train]
ahead = visits.iloc[test].groupby("subject").cumcount() + 1
squares, out_of_fold = {}, {}
for name, cv in FOLDS.items():
    model = PersonalizedStackingRegressor(
        cv=cv(past, past_subject), unseen="population", random_state=0
    )
    model.fit(past, y.iloc[train], groups=past_subject)
    predicted = model.predict(X.iloc[test], groups=subject.iloc[test])
    squares[name] = (predicted - y.iloc[test]) ** 2
    out_of_fold[name] = model.losses_.loc[model.known_part_, "known"]
    print(f"{name}: {model.known_part_!r} predicts")

squares = pd.DataFrame(squares)
table = pd.DataFrame({"out of fold": out_of_fold, "forecast": squares.mean()})
print("\nroot mean squared error in UPDRS points")
print((table**0.5).round(2).to_string())

# %%
# By the number of visits ahead
# -----------------------------
# Dashed lines are the out-of-fold errors of the stacks (``losses_``). Those of random folds are far
# too small, for any number of visits ahead. Those of forward folds are closer to the errors of the
# forecasts, and folds with a long history also lead to better forecasts.
by_step = squares.groupby(ahead).mean()[ahead.value_counts() >= 15]  # few patients have more visits
fig, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
for name, color in zip(FOLDS, ("#8c8c8c", "#c1440e", "#1f5fa8"), strict=True):
    ax.plot(by_step.index, np.sqrt(by_step[name]), "o-", color=color, label=name)
    ax.axhline(np.sqrt(out_of_fold[name]), color=color, ls="--", lw=1)
ax.set(
    xlabel="visits ahead",
    ylabel="root mean squared error (UPDRS points)",
    title="Errors of forecasts (solid) and out-of-fold errors (dashed)",
    ylim=(0, None),
)
ax.locator_params(axis="x", integer=True)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
plt.show()
