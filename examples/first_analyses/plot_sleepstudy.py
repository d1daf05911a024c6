"""
Sleep deprivation: one line per subject
=======================================

Eighteen subjects slept three hours a night, and every day their reaction time was measured (Belenky
et al., 2003). It increases by ten milliseconds per day on average, but subjects differ. Each
subject is a client with ten rows. How reliable is a subject's own line?

This is the standard example of linear mixed models and of the R package lme4, so there are
published results to compare with. We fit four models and show three uses: comparing subjects,
predicting their later days, and predicting a new subject.

The table ``sleepstudy.csv.gz`` is read from the folder in ``PFL_SKLEARN_DATA``. Without it, the
example simulates a table of the same shape; all output and titles say so.
"""

# %%
# The table
# ---------
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.base import clone

from pfl_sklearn.inspection import CoefficientDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior


def simulated_subjects(seed=0):
    """18 subjects and 10 days, with the variances that lme4 finds in the real table."""
    rng = np.random.default_rng(seed)
    lines = rng.multivariate_normal([251.4, 10.5], [[612.1, 9.6], [9.6, 35.1]], 18)
    days = np.tile(np.arange(10), 18)
    reaction = np.repeat(lines[:, 0], 10) + np.repeat(lines[:, 1], 10) * days
    return pd.DataFrame(
        {
            "subject": np.repeat(np.arange(1, 19), 10),
            "days": days,
            "reaction": reaction + rng.normal(0, 25.6, 180),
        }
    )


path = Path(os.environ.get("PFL_SKLEARN_DATA", ".")) / "sleepstudy.csv.gz"
if path.is_file():
    table, SOURCE = pd.read_csv(path), "sleepstudy"
else:
    table, SOURCE = simulated_subjects(), "SIMULATED subjects, not sleepstudy"

X, reaction, subject = table[["days"]], table["reaction"], table["subject"]
print(f"data: {SOURCE}")
print(f"{subject.nunique()} subjects, {len(table)} rows")

# %%
# Four models, compared with lme4
# -------------------------------
# ``random`` names the coefficients that vary by client, and the prior specifies their distribution.
# In lme4's notation:
#
# - ``1 + (1 | subject)``: a mean per subject. ``X`` needs at least one column, so it is one of
#   zeros;
# - ``days + (1 | subject)``: an intercept per subject, one slope for all;
# - ``days + (days || subject)``: intercepts (at day 0) and slopes, independent of each other, which
#   is ``centered=False``;
# - ``days + (days | subject)``: the same with a correlation.
#
# The numbers on the right are lme4's for the real table (Bates et al., 2015, and the documentation
# of ``lmer``). Ours, on the left, are rounded to the same number of digits. lme4's standard errors
# take the variances as known, so ours do so as well (``uncertainty="plug_in"``).
zeros = pd.DataFrame({"zero": np.zeros(len(table))})
known = {"uncertainty": "plug_in"}
by_intercept = PersonalizedLinearRegression(random="intercept", **known)
independent = PersonalizedLinearRegression(GaussianPrior(centered=False), **known)
correlated = PersonalizedLinearRegression(GaussianPrior(covariance_type="full"), **known)
models = {
    "1 + (1 | subject)": clone(by_intercept).fit(zeros, reaction, groups=subject),
    "days + (1 | subject)": by_intercept.fit(X, reaction, groups=subject),
    "days + (days || subject)": independent.fit(X, reaction, groups=subject),
    "days + (days | subject)": correlated.fit(X, reaction, groups=subject),
}
TERMS = [
    "intercept",
    "  standard error",
    "days",
    "  standard error",
    "sd between subjects: intercept",
    "  days",
    "  correlation",
    "sd within subjects",
    "-2 log REML",
]
LME4 = {
    "1 + (1 | subject)": "298.508 9.050 - - 35.75 - - 44.26 1904.3",
    "days + (1 | subject)": "251.4051 9.7467 10.4673 0.8042 37.12 - - 30.99 1786.5",
    "days + (days || subject)": "251.405 6.885 10.467 1.560 25.051 5.988 - 25.565 1743.7",
    "days + (days | subject)": "251.405 6.825 10.467 1.546 24.741 5.922 0.07 25.592 1743.6",
}


def estimates(model):
    """Estimates in the order of TERMS; NaN if the model does not have the term."""
    covariance = np.full((2, 2), np.nan)
    estimated = np.atleast_2d(model.prior_.covariance)
    covariance[: len(estimated), : len(estimated)] = estimated
    sds = np.sqrt(np.diag(covariance))
    return [
        model.population_intercept_,
        model.population_intercept_std_,
        model.population_coef_[0],
        model.population_coef_std_[0],
        *sds,
        covariance[0, 1] / (sds[0] * sds[1]),
        np.sqrt(model.noise_variance_),
        -2 * model.log_likelihood_,
    ]


print(f"data: {SOURCE}; lme4: sleepstudy")
for formula, model in models.items():
    print(f"\nreaction ~ {formula:<27}     here       lme4")
    for term, value, text in zip(TERMS, estimates(model), LME4[formula].split(), strict=True):
        if text != "-":
            digits = len(text.partition(".")[2])
            print(f"  {term:<35}{value:>10.{digits}f} {text:>10}")

# %%
# For the real table, all agree except one, in its last digit: 24.740 or 24.741, depending on when
# the optimizer stops. ``summary()`` returns the estimates as a data frame:
print(f"data: {SOURCE}")
print(correlated.summary().round(3).to_string(na_rep=""))

# %%
# Differences between subjects
# ----------------------------
# The caterpillar plot shows every subject's coefficients with 95 % intervals, and the population's
# with a band. Both panels are sorted by intercept. Rings are the subjects' own least-squares lines:
# the same model with an infinite variance between subjects.
#
# In the real table the slopes differ by far more than the width of the intervals: from zero to 20
# milliseconds a day.
local = PersonalizedLinearRegression(GaussianPrior(covariance=np.inf))
local.fit(X, reaction, groups=subject)
display = CoefficientDisplay.from_estimator(correlated, feature=["intercept", "days"], local=local)
display.figure_.suptitle(f"Reaction time in ms: a line per subject ({SOURCE})")
plt.show()

# %%
# Shrinkage moves a line in the plane of intercept and slope. Every arrow goes from a subject's own
# line to the personalized one. Lines far from the population's are shrunk most, and mainly in the
# direction that ten rows determine least: a line with a higher intercept and a lower slope has
# nearly the same mean.
fig, ax = plt.subplots(figsize=(7, 5), layout="constrained")
start, end = [
    np.column_stack([model.intercept_, model.coef_[:, 0]]) for model in (local, correlated)
]
ax.axhline(correlated.population_coef_[0], color="#c1440e", lw=0.8)
ax.axvline(correlated.population_intercept_, color="#c1440e", lw=0.8, label="population")
ax.quiver(
    *start.T,
    *(end - start).T,
    angles="xy",
    scale_units="xy",
    scale=1,
    color="#8c8c8c",
    width=0.003,
    headwidth=5,
)
ax.plot(*start.T, "o", mfc="white", mec="#8c8c8c", ms=5, label="local")
ax.plot(*end.T, "o", color="#1f5fa8", ms=5, label="personalized")
ax.set(
    xlabel="intercept (ms)",
    ylabel="slope (ms per day)",
    title=f"From every subject's own line to the personalized one ({SOURCE})",
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small", loc="lower left")
plt.show()

# %%
# Forecasts
# ---------
# Now only the first five days are known, and we predict the others. Bands are 95 % intervals of a
# subject's mean (``return_std``), not of single rows.
#
# If the line of five days is unusual (a falling one, for instance), the personalized line follows
# it only partly. Subjects whose course is not linear leave the band, which assumes that the model
# is correct.
early = table["days"] < 5
priors = {
    "local": GaussianPrior(covariance=np.inf),
    "pooled": GaussianPrior(covariance=0.0),
    "personalized": GaussianPrior(covariance_type="diag", centered=False),
}
colors = {"local": "#8c8c8c", "pooled": "#c1440e", "personalized": "#1f5fa8"}
forecasts = {
    name: PersonalizedLinearRegression(prior).fit(X[early], reaction[early], groups=subject[early])
    for name, prior in priors.items()
}
local_slopes = pd.Series(forecasts["local"].coef_[:, 0], forecasts["local"].clients_).sort_values()
grid = pd.DataFrame({"days": np.linspace(0, 9, 19)})
fig, axes = plt.subplots(2, 3, figsize=(7.5, 5), layout="constrained", sharex=True, sharey=True)
for ax, client in zip(axes.flat, local_slopes.index[[0, 3, 7, 10, 14, 17]], strict=True):
    known, later = table[early & (subject == client)], table[~early & (subject == client)]
    ax.plot(known["days"], known["reaction"], "o", color="black", ms=4, label="known")
    ax.plot(later["days"], later["reaction"], "o", mfc="white", mec="black", ms=4, label="held out")
    for name, model in forecasts.items():
        mean, std = model.predict(grid, groups=[client] * len(grid), return_std=True)
        ax.plot(grid["days"], mean, color=colors[name], label=name)
    # the last model is the personalized one
    band = mean - 1.96 * std, mean + 1.96 * std
    ax.fill_between(grid["days"], *band, color=colors[name], alpha=0.15, lw=0)
    ax.set_title(f"subject {client}", fontsize="small")
    ax.spines[["top", "right"]].set_visible(False)
for ax in axes[1]:
    ax.set_xlabel("day")
fig.supylabel("reaction time (ms)", fontsize="medium")
fig.suptitle(f"Five days known, five predicted ({SOURCE})")
fig.legend(
    *axes[0, 0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=5,
    frameon=False,
    fontsize="small",
)
plt.show()

# %%
# Held-out errors
# ---------------
# There are two questions. If random days are held out (five folds within every subject, three
# shuffles), the model interpolates. In the real table, eight rows are enough for a line, and
# personalization gains little over local lines. If the last five days are held out, the model
# forecasts from half of the rows, and the gain is larger. Independent coefficients do as well as
# correlated ones, with one parameter fewer to estimate from 18 subjects.
priors["personalized, correlated"] = GaussianPrior(covariance_type="full")


def squared_errors(prior, train, test):
    model = PersonalizedLinearRegression(prior)
    model.fit(X[train], reaction[train], groups=subject[train])
    return (model.predict(X[test], groups=subject[test]) - reaction[test]) ** 2


def folds(seed):
    """Masks of training and test rows."""
    for _, test in ClientKFold(5, random_state=seed).split(X, groups=subject):
        held_out = np.isin(np.arange(len(X)), test)
        yield ~held_out, held_out


scores = pd.DataFrame(
    {
        name: {
            "days at random": np.mean(
                [squared_errors(prior, *fold).mean() for seed in range(3) for fold in folds(seed)]
            ),
            "last five days": squared_errors(prior, early, ~early).mean(),
        }
        for name, prior in priors.items()
    }
)
print(f"data: {SOURCE}")
print("root mean squared error of held-out rows, in ms")
print(np.sqrt(scores).T.round(1).to_string())

# %%
# A new subject
# -------------
# A subject who was not in the table gets the population's line, whose standard deviation includes
# the variance between subjects. For a single new row, add the variance within subjects. With
# ``unseen="population"``, new subjects cause no warning.
correlated.set_params(unseen="population")
days = pd.DataFrame({"days": [0, 4, 9, 0, 4, 9]})
known = subject.iloc[0]
known_and_new = [known] * 3 + [subject.max() + 1] * 3
mean, std = correlated.predict(days, groups=known_and_new, return_std=True)
print(f"data: {SOURCE}")
print(
    days.assign(
        subject=[str(known)] * 3 + ["new"] * 3,
        mean=mean.round(1),
        std=std.round(1),
        std_of_a_row=np.sqrt(std**2 + correlated.noise_variance_).round(1),
    ).to_string(index=False)
)

# %%
# References
# ----------
# Belenky, G. et al. (2003). Patterns of performance degradation and restoration during sleep
# restriction and subsequent recovery: a sleep dose-response study. Journal of Sleep Research, 12.
#
# Bates, D., Mächler, M., Bolker, B. and Walker, S. (2015). Fitting linear mixed-effects models
# using lme4. Journal of Statistical Software, 67(1).
