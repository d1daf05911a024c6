"""
Publishing a table: radon by county, with every home protected
==============================================================

A health office wants to print the mean radon level of each of 463 counties, though half of the
counties have ten homes or fewer. Counties are public. What is in a home is not, and nobody who
reads the table should find out what was measured in a given one. So the mean of every county gets
noise, and the noised means are shrunk afterwards: shrinkage reads nothing but what has noise
already, and costs no more privacy.
"""

# %%
# Before anything is spent
# ------------------------
# Logarithms of radon lie between -2.5 and 4.5, whatever the homes; a bound must not come from the
# data. From guesses and public numbers alone we ask what an epsilon would cost. The guesses: county
# means of standard deviation .6 around 1.3, and a variance of .9 between the homes of a county. The
# sizes of the counties are public.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.datasets import load_radon
from pfl_sklearn.estimation import GaussianMean
from pfl_sklearn.inspection import PrivacyAccuracyDisplay, ShrinkageDisplay
from pfl_sklearn.priors import GaussianPrior

homes = load_radon().frame
y, county = homes["log_radon"], homes["county_fips"]
sizes = county.value_counts(sort=False).to_numpy()
office = GaussianMean(
    unit="row",
    publish="clients",
    epsilon=1.0,
    bounds=(-2.5, 4.5),
    rows_per_person=1,
    target="table",
)
guess = {"population": GaussianPrior(1.3, 0.36), "noise_variance": 0.9}
expected = office.expected_error(
    n_clients=len(sizes), n_rows=sizes, epsilon=[0.5, 1, 2, 4], n_simulations=5, **guess
)
PrivacyAccuracyDisplay.from_expected_error(expected)

# %%
# The table
# ---------
# We take an epsilon of 1 for a home. ``noise_std`` is the standard deviation of the noise on a
# county's own mean, ``mean`` the estimate, and ``quality`` says what it rests on.
model = office.fit(homes[["floor"]], y, groups=county)
table = model.summary()
table.head(6)

# %%
# What it promises, for those whose homes are in it:
print(model.privacy_.explain())

# %%
# How good it is
# --------------
# We know the exact means here, which nobody else will. These are root mean squared errors to them,
# and the share of the intervals that cover:
exact = y.clip(-2.5, 4.5).groupby(county).mean()
pd.Series(
    {
        "noised means": np.sqrt(np.mean((table["local_mean"] - exact) ** 2)),
        "estimates": np.sqrt(np.mean((table["mean"] - exact) ** 2)),
        "one mean for all": np.sqrt(np.mean((model.population_mean_ - exact) ** 2)),
        "share of intervals that cover": np.mean(exact.between(table["lower"], table["upper"])),
    }
).round(2)

# %%
# Noised means are anywhere between the bounds and beyond; estimates of small counties are close to
# the mean of all. The line says that all of it may be shown.
ShrinkageDisplay.from_estimator(model)

# %%
# A map
# -----
# The index of the table joins it with any map file. Without one we draw each county as a square in
# a block for its state. A map of noised means shows noise. That of the estimates shows what can be
# known, and where hardly anything can, it shows the mean of all counties.
state = homes.groupby("county_fips")["state"].first()
figure, axes = plt.subplots(1, 2, figsize=(8, 5.2), layout="constrained", sharey=True)
for ax, column in zip(axes, ("local_mean", "mean"), strict=True):
    for row, (name, counties) in enumerate(table.groupby(state)):
        at = np.arange(len(counties))
        colors = counties[column].clip(0, 2.5)
        drawn = ax.scatter(
            at % 20, -7 * row - at // 20, c=colors, marker="s", s=26, vmin=0, vmax=2.5
        )
        ax.text(-1.5, -7 * row, name, ha="right", va="center")
    ax.set_title({"local_mean": "noised means", "mean": "estimates"}[column])
    ax.axis("off")
figure.colorbar(drawn, ax=axes, label="mean log radon", shrink=0.6)

# %%
# Totals that agree
# -----------------
# If the mean of all homes was published before (with an epsilon of its own), the counties should
# agree with it. ``benchmark`` moves each estimate by as little as its error allows.
published_mean = 0.85
agreed = model.benchmark(published_mean * len(homes))
print(round(float(np.average(agreed, weights=model.n_samples_per_client_)), 3))
(agreed - table["mean"]).abs().describe().round(3)
