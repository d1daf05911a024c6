"""
Does the model hold? Residuals, clients and their normal quantiles
==================================================================

A mixed model makes assumptions at two levels. Rows scatter around their client's mean with one
variance, and clients scatter around the population; both are normal. Standard deviations, intervals
and shrinkage depend on them. :class:`~pfl_sklearn.inspection.ResidualsDisplay` draws four panels to
check them.

We look at two tables that come with the package: radon levels of houses in the counties of
Minnesota, first in the wrong units, and scores of patients with Parkinson's disease.
"""

# %%
# Radon in pCi/L
# --------------
# Levels of radon are positive and skewed. What do the checks show if we ignore that? There are four
# panels.
#
# 1. *Residuals by the prediction of the house's own county.* The band is one standard deviation
#    around the mean. It opens to the right: where the level is high, houses differ more.
# 2. *Counties.* There are more than 60, so each is a point: the root mean square of its
#    standardized residuals. About one in four lies outside its 95 % limits; it should be one in
#    twenty. Some counties have outliers, and most large ones lie below 1.
# 3. *Normal quantiles of the residuals.* Far from the line, and curved: many houses a little below
#    their county's level, a few far above it.
# 4. *Normal quantiles of the counties' deviations.* A little curved in the same way, but only the
#    three lowest of 85 lie outside the limits. Half of the counties have five houses or fewer, and
#    where rows are few, this panel finds little.
import matplotlib.pyplot as plt
import numpy as np

from pfl_sklearn.datasets import load_parkinsons, load_radon
from pfl_sklearn.inspection import ResidualsDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression

houses = load_radon("MN").frame
X, log_radon, county = houses[["floor"]], houses["log_radon"], houses["county_fips"]
level = np.exp(log_radon)

raw = PersonalizedLinearRegression(random="intercept").fit(X, level, groups=county)
ResidualsDisplay.from_estimator(raw, X, level, groups=county)
plt.show()

# %%
# The logarithm
# -------------
# The same model of the logarithm. The band no longer opens to the right, six counties of 85 lie
# outside their limits, and the counties' deviations are close to the line. So are the residuals
# between -2 and 2.
#
# The mean of the residuals rises with the prediction. This is no fault of the model. A county's
# prediction is shrunken towards the population, so counties with high predictions have positive
# residuals on average, by as much as the dotted line says. The solid line should follow it.
logs = PersonalizedLinearRegression(random="intercept").fit(X, log_radon, groups=county)
display = ResidualsDisplay.from_estimator(logs, X, log_radon, groups=county)
plt.show()

# %%
# The residuals have a heavy lower tail. Who is in it? The four lowest are houses with a measured
# level of 0, which the table counts as 0.1 pCi/L. A logarithm makes outliers of them.
lowest = np.argsort(display.standardized)[:10]
found = houses.iloc[lowest].assign(level=level, residual=display.standardized[lowest])
print(found[["county", "floor", "level", "residual"]].round(2).to_string(index=False))

# %%
# Scores of patients
# ------------------
# 42 people with Parkinson's disease recorded their voices for six months, and every recording comes
# with a score of the disease. The model is a line for each person. With 42 clients the second panel
# has a box for each, ordered by the median.
#
# The residuals do not have one variance: some boxes are many times as high as others. That
# also gives the third panel its shape, a mixture of narrow and wide distributions. The level of the
# clients is fine.
people = load_parkinsons().frame
people["month"] = people["test_time"] / 30.4
X, score, person = people[["month", "age", "sex"]], people["total_UPDRS"], people["subject"]
lines = PersonalizedLinearRegression(random=["intercept", "month"]).fit(X, score, groups=person)
display = ResidualsDisplay.from_estimator(lines, X, score, groups=person)
plt.show()

spread = people.assign(residual=display.residuals).groupby("subject")["residual"].std()
print("standard deviation of the residuals of a person")
print(spread.describe()[["min", "25%", "50%", "75%", "max"]].round(2).to_string())

# %%
# Why? The display keeps its numbers, so we can plot the residuals of the person with the largest
# spread, of one in the middle and of the one with the smallest over time. They are no noise. The
# scores were interpolated between three visits of a doctor, so a residual is the distance of a
# broken line from a straight one. The visits are the data; between them there is nothing to learn,
# and the errors that the model states, which take 5,875 rows for independent, are far too small.
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
ranked = spread.sort_values().index
shades = ["#1f5fa8", "#8c8c8c", "#c1440e"]
for who, color in zip(ranked[[-1, len(ranked) // 2, 0]], shades, strict=True):
    rows = (person == who).to_numpy()
    month, residual = people["month"][rows], display.residuals[rows]
    ax.plot(month, residual, ".", color=color, ms=4, label=f"person {who}")
ax.axhline(0, color="0.3", lw=0.8)
ax.set(xlabel="month", ylabel="residual")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %%
# References
# ----------
# Gelman, A. and Hill, J. (2007). Data Analysis Using Regression and Multilevel/Hierarchical Models.
# Cambridge University Press.
#
# Tsanas, A., Little, M., McSharry, P. and Ramig, L. (2010). Accurate telemonitoring of Parkinson's
# disease progression by noninvasive speech tests. IEEE Transactions on Biomedical Engineering.
