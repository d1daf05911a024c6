"""
Lecture ratings: 2,972 students and how they rate
=================================================

Students of ETH Zurich rated their lectures from 1 to 5. Some are strict, some are generous, and
some mind more than others whether a lecture is given for their own department or as a service to
it. Every student is a client with 1 to 92 ratings, half of them with 22 or fewer.

The question is whether to predict a student's next rating from that student's past (local), from
everybody's (pooled), or from both (personalized), and how many coefficients should vary by student.

The table is ``insteval.csv.gz`` (from the R package lme4) in the folder in ``PFL_SKLEARN_DATA``.
Without it the example simulates a table of the same size, and everything printed and plotted says
so.
"""

# %%
# The table
# ---------
# Features are whether the lecture is a service, how long ago it was (in terms), the student's own
# age (also in terms), and the department. The first three are centred, so that the intercept is a
# student's level at a lecture in the middle.
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.base import clone

from pfl_sklearn.inspection import CoefficientDisplay, ShrinkageDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior


def simulated_ratings(seed=0):
    """As many students, with sizes, effects and variances much like those of the real table."""
    rng = np.random.default_rng(seed)
    student = np.repeat(np.arange(1, 2973), 1 + rng.negative_binomial(2.4, 0.092, 2972))
    n = len(student)
    lecturer = rng.integers(1, 1129, n)
    table = pd.DataFrame(
        {
            "student": student,
            "lecturer": lecturer,
            "studage": rng.choice([2, 4, 6, 8], 2973)[student],
            "lectage": rng.integers(1, 7, n),
            "service": rng.binomial(1, 0.43, n),
            "dept": rng.integers(1, 15, 1129)[lecturer],
        }
    )
    level = rng.normal(0, 0.32, 2973)[student] + rng.normal(0, 0.5, 1129)[lecturer]
    service = rng.normal(-0.08, 0.19, 2973)[student] * table["service"]
    liking = 3.26 + level + service - 0.05 * (table["lectage"] - 3) + rng.normal(0, 1.2, n)
    return table.assign(y=np.clip(np.round(liking), 1, 5))


path = Path(os.environ.get("PFL_SKLEARN_DATA", ".")) / "insteval.csv.gz"
if path.is_file():
    table, SOURCE = pd.read_csv(path), "lecture ratings"
else:
    table, SOURCE = simulated_ratings(), "SIMULATED ratings"

rating, student, lecturer = table["y"], table["student"], table["lecturer"]
numbers = table[["service", "lectage", "studage"]]
X = pd.concat(
    [
        numbers - numbers.mean(),
        pd.get_dummies(table["dept"], prefix="dept", drop_first=True, dtype=float),
    ],
    axis=1,
)
sizes = student.value_counts()
print(f"data: {SOURCE}")
print(f"{len(table):,} ratings of {lecturer.nunique():,} lecturers by {len(sizes):,} students")
print(f"ratings per student: {sizes.min()} to {sizes.max()}, median {sizes.median():.0f}")

# %%
# Strict and generous students
# ----------------------------
# Two models: a level per student, and a level, an effect of service and one of the lecture's age
# per student, with any covariance between the three. The departments' effects are common to all.
levels = PersonalizedLinearRegression(random="intercept")
slopes = PersonalizedLinearRegression(
    GaussianPrior(covariance_type="full"), random=["intercept", "service", "lectage"]
)
for model in (levels, slopes):
    model.fit(X, rating, groups=student)
print(f"data: {SOURCE}")
for name, model in {"levels": levels, "levels and slopes": slopes}.items():
    between = model.summary().loc[["between", "within"]]
    print(f"\n{name}: -2 log REML {-2 * model.log_likelihood_:.1f}")
    print(between[["sd", "correlation"]].round(3).to_string(na_rep=""))

# %%
# All students, sorted by their level: dots with their 95 % intervals, and the students' own levels
# (with effects in common) as a cloud. Students with few ratings are shrunk strongly. Those who look
# strictest or most generous by their own few ratings (the ends of the cloud) are not the ones at
# the ends of the line.
own_levels = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), random="intercept")
own_levels.fit(X, rating, groups=student)
display = CoefficientDisplay.from_estimator(levels, local=own_levels)
display.ax_.set(xlabel="student, sorted", ylabel="level", title=f"Students ({SOURCE})")
plt.show()

# %%
# The effect of service varies too, though the data say little about any single student. Own effects
# scatter widely, up to several points on a scale of five. Personalized ones stay close to the
# population's, as the flat cloud shows. (For students whose lectures were all of one kind the
# effect is not identified. Their own estimate is 0, the least-squares solution of minimum norm.)
own_slopes = PersonalizedLinearRegression(
    GaussianPrior(covariance=np.inf), random=["intercept", "service", "lectage"]
)
own_slopes.fit(X, rating, groups=student)
display = ShrinkageDisplay.from_estimator(slopes, feature="service", local=own_slopes)
display.ax_.set(xlim=(-4, 4), ylim=(-1.2, 1.2), title=f"Effect of service lectures ({SOURCE})")
plt.show()

# %%
# Held-out ratings
# ----------------
# Five folds inside every student. In the last two competitors a *lecturer* is a client instead.
LOCAL, POOLED = GaussianPrior(covariance=np.inf), GaussianPrior(covariance=0.0)
SLOPES = ["intercept", "service", "lectage"]
competitors = {
    "pooled": (PersonalizedLinearRegression(POOLED), student),
    "local levels": (PersonalizedLinearRegression(LOCAL, random="intercept"), student),
    "local levels, slopes": (PersonalizedLinearRegression(LOCAL, random=SLOPES), student),
    "personalized levels": (clone(levels), student),
    "personalized levels, slopes": (clone(slopes), student),
    "lecturers: local levels": (PersonalizedLinearRegression(LOCAL, random="intercept"), lecturer),
    "lecturers: personalized": (clone(levels), lecturer),
}
folds = list(ClientKFold(5, random_state=0).split(X, groups=student))
squares = pd.DataFrame(index=table.index, columns=list(competitors), dtype=float)
for name, (model, groups) in competitors.items():
    for train, test in folds:
        model.fit(X.iloc[train], rating.iloc[train], groups=groups.iloc[train])
        predicted = model.predict(X.iloc[test], groups=groups.iloc[test])
        squares.loc[squares.index[test], name] = (rating.iloc[test] - predicted) ** 2
fold_of_row = np.empty(len(table), dtype=int)
for k, (_, test) in enumerate(folds):
    fold_of_row[test] = k
by_fold = squares.groupby(fold_of_row).mean()
print(f"data: {SOURCE}")
print(
    "mean squared error of held-out ratings; % below pooled: mean and standard deviation of folds"
)
gain = 100 * (1 - by_fold.div(by_fold["pooled"], axis=0))
print(
    pd.DataFrame({"error": by_fold.mean(), "% below": gain.mean(), "sd": gain.std()})
    .round({"error": 4, "% below": 2, "sd": 2})
    .to_string()
)

# %%
# In the real table, a personalized level per student lowers the error by 3.3 %, a local one by 0.8
# %. Separate slopes make local predictions far worse and personalized ones slightly better. The
# lecturer matters more: with lecturers as clients instead of students, the error falls by more than
# all of this. A model with both at once (crossed effects) would do better still; this package has
# one grouping.
#
# Where does the gain come from? Sort students by their number of ratings. With few ratings a
# student's own level is a bad guess, and the pooled model is nearly as good as any. With many
# ratings shrinkage makes no difference. Personalized levels are best, or as good as the best,
# everywhere.
bins = [1, 5, 10, 15, 20, 30, 40, 60, sizes.max() + 1]
size_of_row = pd.cut(sizes[student].to_numpy(), bins, right=False)
by_size = squares.groupby(size_of_row, observed=True).mean()
relative = 100 * (by_size.div(by_size["pooled"], axis=0) - 1)
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
at = np.arange(len(relative))
for name, color in {
    "pooled": "#c1440e",
    "local levels": "#8c8c8c",
    "personalized levels": "#1f5fa8",
}.items():
    ax.plot(at, relative[name], "o-", color=color, label=name)
labels = [f"{interval.left}-{interval.right - 1}" for interval in relative.index]
counts = sizes.groupby(pd.cut(sizes, bins, right=False), observed=True).size()
labels = [f"{label}\n({count})" for label, count in zip(labels, counts, strict=True)]
ax.set(
    xticks=at,
    xticklabels=labels,
    xlabel="ratings of a student (number of students)",
    ylabel="% above the pooled error",
    title=f"Held-out ratings ({SOURCE})",
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
plt.show()
