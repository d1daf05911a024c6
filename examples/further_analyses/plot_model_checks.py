"""
Model checks: residuals, clients and normal quantiles
=====================================================

A mixed model assumes that rows are normal around their client's mean, with one variance, and that
clients are normal around the population. Standard errors, intervals and shrinkage depend on these
assumptions. :class:`~pfl_sklearn.inspection.ResidualsDisplay` draws four panels to check them.

We check models of two tables that come with the package: radon in the counties of Minnesota, first
on the wrong scale, and scores of patients with Parkinson's disease.
"""

# %%
# Radon in pCi/L
# --------------
# Radon concentrations are positive and skewed. The four panels show what happens if we ignore that.
#
# 1. *Residuals against the prediction for the house's county.* The band is one standard deviation
#    around the mean. It widens to the right: where radon is high, houses differ more.
# 2. *Counties.* There are more than 60, so each is a point: the root mean square of its
#    standardized residuals. About one in four lies outside its 95 % limits, instead of one in
#    twenty. Some counties have outliers, and most large ones lie below 1.
# 3. *Normal quantiles of the residuals.* They are far from the line, and curved: many houses lie
#    slightly below their county's mean, and a few far above it.
# 4. *Normal quantiles of the counties' deviations.* They are slightly curved in the same way, but
#    only the three lowest of 85 lie outside the limits. Half of the counties have five houses or
#    fewer, and with few rows this panel has little power.
import matplotlib.pyplot as plt
import numpy as np

from pfl_sklearn.datasets import load_parkinsons, load_radon
from pfl_sklearn.inspection import ResidualsDisplay
from pfl_sklearn.linear_model import PersonalizedLinearRegression

houses = load_radon("MN").frame
X, log_radon, county = houses[["floor"]], houses["log_radon"], houses["county_fips"]
radon = np.exp(log_radon)

raw = PersonalizedLinearRegression(random="intercept").fit(X, radon, groups=county)
ResidualsDisplay.from_estimator(raw, X, radon, groups=county)
plt.show()

# %%
# The logarithm
# -------------
# This is the same model of the logarithm. The band no longer widens to the right, six counties of
# 85 lie outside their limits, and the counties' deviations are close to the line. So are the
# residuals between -2 and 2.
#
# The mean of the residuals rises with the prediction, which does not mean that the model is wrong.
# A county's prediction is shrunk towards the population, so counties with high predictions have
# positive residuals on average. The dotted line is their expected mean, which the solid line should
# follow.
logs = PersonalizedLinearRegression(random="intercept").fit(X, log_radon, groups=county)
display = ResidualsDisplay.from_estimator(logs, X, log_radon, groups=county)
plt.show()

# %%
# The residuals have a heavy lower tail. The four lowest are houses with a measurement of 0, which
# the table replaces by 0.1 pCi/L. The logarithm turns them into outliers.
lowest = np.argsort(display.standardized)[:10]
outliers = houses.iloc[lowest].assign(radon=radon, residual=display.standardized[lowest])
print(outliers[["county", "floor", "radon", "residual"]].round(2).to_string(index=False))

# %%
# Scores of patients
# ------------------
# 42 people with Parkinson's disease recorded their voices for six months, and every recording comes
# with a score of the disease. The model is a line for each person. With 42 clients, the second
# panel has a box for each, ordered by the median.
#
# The residuals do not have one variance: some boxes are many times as high as others. That also
# gives the third panel its shape, a mixture of narrow and wide distributions. The clients'
# deviations look normal.
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
# Why? The display stores its residuals, so we can plot them over time, for the persons with the
# largest, the median and the smallest spread. They are not random noise: the scores were
# interpolated between three assessments, so a residual is the difference between a piecewise linear
# curve and a straight line. Only the three assessments are data. The model's standard errors, which
# treat 5,875 rows as independent, are far too small.
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
ranked = spread.sort_values().index
colors = ["#1f5fa8", "#8c8c8c", "#c1440e"]
for client, color in zip(ranked[[-1, len(ranked) // 2, 0]], colors, strict=True):
    rows = (person == client).to_numpy()
    month, residual = people["month"][rows], display.residuals[rows]
    ax.plot(month, residual, ".", color=color, ms=4, label=f"person {client}")
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
