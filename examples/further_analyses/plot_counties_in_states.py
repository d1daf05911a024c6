"""
Counties in states: homes in two groupings
==========================================

Radon was measured in 12,124 homes of seven states and of tribal lands (region 5 of the EPA, counted
as a state here). A home belongs to a county, and the county to a state. Some counties have hundreds
of measurements, but half of them have ten or fewer. A county with few should borrow from others,
most of all from those in its own state.

The county is the client. The state is a column of the table, named in ``groupings``. Nested
counties need no further option. A county may also lie in two states, as do the 17 counties of
Minnesota that have homes on tribal lands.
"""

# %%
# Three models
# ------------
# The first model ignores the states. The second has a coefficient for each state. The third has a
# variance between states, so the effects of states are shrunk, as those of counties are. Here is
# the third:
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.compose import TableEncoder
from pfl_sklearn.datasets import load_radon
from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression

homes = load_radon().frame
X = homes[["floor", "log_uranium", "state"]].assign(floor=homes["floor"].astype(float))
y, county = homes["log_radon"], homes["county_fips"]
model = PersonalizedLinearRegression(
    random="intercept", groupings=["state"], unseen="population"
).fit(X, y, groups=county)
model.summary().round(3)

# %%
# New counties of known states
# ----------------------------
# We hold out a quarter of the counties, five times, and predict their homes from the floor, the
# uranium in the county's soil and, with the last two models, the state. The table shows by how many
# per cent the mean squared error of each model differs from that of the first.
plain = PersonalizedLinearRegression(random="intercept", unseen="population")
tables = {
    "counties": (plain, X.drop(columns="state")),
    "state indicators": (plain, TableEncoder().fit_transform(X)),
    "states as a grouping": (model, X),
}
errors = pd.DataFrame(index=range(5), columns=list(tables), dtype=float)
for seed in errors.index:
    held_out = np.random.default_rng(seed).choice(county.unique(), county.nunique() // 4, False)
    new = county.isin(held_out)
    for name, (estimator, table) in tables.items():
        estimator.fit(table[~new], y[~new], groups=county[~new])
        residuals = y[new] - estimator.predict(table[new], groups=county[new])
        errors.loc[seed, name] = np.mean(residuals**2)
relative = 100 * (errors.div(errors["counties"], axis=0) - 1)
relative.round(1)

# %%
# With eight states, a coefficient for each does as well as a variance between them. A grouping pays
# if there are many levels or few rows of each. With ``return_std`` it also says how uncertain a
# prediction for a state without measurements is.
#
# From a county's own homes to its estimate
# -----------------------------------------
# Blue dots are the estimates: the expected log radon in a county's basements, at the mean log
# uranium. Grey circles are means of the county's own homes, corrected for floor and uranium. The
# estimates of counties with few homes move to the line of their state, not to that of all states.
model.fit(X, y, groups=county)
slopes = pd.Series(model.population_coef_, index=model.coef_names_)
corrected = y - X["floor"] * slopes["floor"]
corrected -= (X["log_uranium"] - X["log_uranium"].mean()) * slopes["log_uranium"]
at_mean = slopes["log_uranium"] * X["log_uranium"].mean()
states = model.effects("state").set_index("level")
by_county = homes.assign(own=corrected).groupby(["state", "county_fips"])["own"]
counties = by_county.agg(["mean", "size"]).reset_index()
rows = np.searchsorted(model.clients_, counties["county_fips"])
counties["state_line"] = counties["state"].map(states["estimate"])
counties["estimate"] = model.intercept_[rows] + counties["state_line"] + at_mean
overall = model.population_intercept_ + at_mean
figure, axes = plt.subplots(2, 4, figsize=(8.3, 4.8), sharey=True, layout="constrained")
for ax, (state, table) in zip(axes.flat, counties.groupby("state"), strict=True):
    table = table.sort_values("size")
    place = np.arange(len(table))
    ax.vlines(place, table["mean"], table["estimate"], color="0.8", lw=1)
    ax.plot(place, table["mean"], "o", ms=3, mfc="white", color="0.5", label="mean of the county")
    ax.plot(place, table["estimate"], ".", color="tab:blue", label="estimate of the county")
    ax.axhline(overall + table["state_line"].iloc[0], color="tab:green", label="state")
    ax.axhline(overall, color="tab:red", ls="--", label="all states")
    ax.set_title(f"{state}: {len(table)} counties")
    ax.set_xticks([])
figure.supylabel("log radon (log pCi/L)")
figure.supxlabel("counties, from few homes to many")
figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=4)

# %%
# Homes above the action level
# ----------------------------
# The EPA advises to fix homes from 4 pCi/L on. Whether a home is above that level is a class, and
# logistic regression takes the same grouping. Blue lines are 95 % intervals of the probability that
# a basement in a new county is above, by state, at the mean log uranium of the state's basements.
# Dots are the means of these distributions, and grey circles the shares of the measured basements.
above = y >= np.log(4)
classes = PersonalizedLogisticRegression(
    random="intercept", groupings=["state"], unseen="population"
).fit(X, above, groups=county)
basement = X["floor"] == 0
rows = X[basement].groupby("state", as_index=False).mean()[X.columns]
new = np.full(len(rows), -1)  # no county of the table
chances = classes.predict_proba(rows, groups=new)[:, 1]
lower, upper = (bound[:, 1] for bound in classes.predict_interval(rows, groups=new))
figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
ax.vlines(rows["state"], lower, upper, color="tab:blue")
ax.plot(rows["state"], chances, "o", color="tab:blue", label="basement in a new county")
shares = above[basement].groupby(X["state"][basement]).mean()
ax.plot(shares.index, shares, "o", mfc="white", color="0.5", label="measured basements")
ax.set(xlabel="state", ylabel="probability of 4 pCi/L or more", ylim=(0, 1))
figure.legend(frameon=False, loc="outside upper center", ncols=2)
