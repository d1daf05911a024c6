"""
Claims of insured cars
======================

An insurer wants the expected number of claims of cars in 60 regions. It depends on the driver's age
and the car's power, with the same effects everywhere, and on the region. Cars are insured for parts
of a year, so counts come with an exposure. Regions have between 10 and 300 cars.

The table is simulated, so that the true rates are known.
"""

# %%
# The table
# ---------
# The log rates of regions have a standard deviation of .5, so rates differ by a factor of four or
# more. In addition, cars of a region differ in ways that no column shows, so their counts vary more
# than those of a Poisson distribution (a dispersion of .5).
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import mean_poisson_deviance

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import likelihood_ratio_test
from pfl_sklearn.linear_model import PersonalizedPoissonRegression
from pfl_sklearn.model_selection import ClientShuffleSplit

rng = np.random.default_rng(0)
cars = np.repeat(np.arange(60), np.geomspace(10, 300, 60).astype(int))
intercepts = -1.5 + 0.5 * rng.normal(size=60)
table = pd.DataFrame(
    {
        "young": (rng.random(len(cars)) < 0.2).astype(float),
        "power": rng.normal(size=len(cars)),
        "years": rng.uniform(0.1, 1.0, size=len(cars)),
        "region": cars,
    }
)
rate = np.exp(intercepts[cars] + 0.6 * table["young"] + 0.2 * table["power"])
claims = rng.poisson(table["years"] * rate * rng.gamma(2.0, 0.5, size=len(cars)))
print(f"{len(cars)} cars, {claims.sum()} claims in {table['years'].sum():.0f} years")

# %%
# The fit
# -------
# ``ClientColumn`` takes the ids and the exposure from columns of the table, so the model works like
# any other in scikit-learn. The likelihood ratio test shows that counts vary more than Poisson
# counts.
poisson = PersonalizedPoissonRegression(random="intercept")
negative_binomial = PersonalizedPoissonRegression(random="intercept", family="negative_binomial")
simple = ClientColumn(poisson, "region", exposure="years").fit(table, claims)
model = ClientColumn(negative_binomial, "region", exposure="years").fit(table, claims)
test = likelihood_ratio_test(simple, model)
print(f"statistic {test.statistic:.1f}, p-value {test.p_value:.2g}")
print(model.summary().round(3).to_string(na_rep=""))

# %%
# The standard deviation between regions also has an interval. With 60 regions it is wide.
print(model.estimator_.conf_int().round(3))

# %%
# New cars
# --------
# A third of the cars in each region is held out. One Poisson regression for all cars ignores the
# regions. Another has a column per region (and a small penalty, or regions without claims would
# have a rate of 0); it overfits the claims of ten cars.
train, test = next(ClientShuffleSplit(1, test_size=1 / 3, random_state=0).split(table, groups=cars))
features = table[["young", "power"]]
by_region = features.join(pd.get_dummies(cars, prefix="region", dtype=float))


def expected_claims(columns, alpha):
    """Predictions of scikit-learn's regression of claims per year."""
    years = table["years"]
    regression = PoissonRegressor(alpha=alpha, max_iter=1000)
    regression.fit(columns.iloc[train], (claims / years)[train], sample_weight=years[train])
    return years[test] * regression.predict(columns.iloc[test])


predictions = {
    "one model": expected_claims(features, 0.0),
    "a column per region": expected_claims(by_region, 1e-4),
    "personalized": model.fit(table.iloc[train], claims[train]).predict(table.iloc[test]),
    "true rates": (table["years"] * rate)[test],
}
sizes = pd.cut(np.bincount(cars)[cars[test]], [0, 30, 100, 300])
deviances = pd.DataFrame(
    {
        name: [
            mean_poisson_deviance(claims[test][sizes == size], mean[sizes == size])
            for size in sizes.categories
        ]
        for name, mean in predictions.items()
    },
    index=[f"{size.left + 1:.0f} to {size.right:.0f} cars" for size in sizes.categories],
)
print(deviances.round(3))

# %%
# Small regions gain most. The fewer claims a region has, the more its rate is shrunk towards the
# others', and the wider is its interval.
model = negative_binomial.fit(features, claims, groups=cars, exposure=table["years"])
lower, upper = (bound[:, 0] for bound in model.credible_interval())
covered = np.mean((lower < intercepts) & (intercepts < upper))
print(f"{covered:.0%} of the 95 % intervals contain the true intercept")

figure, (left, right) = plt.subplots(1, 2, figsize=(8.3, 4.2), layout="constrained")
expected = table["years"] * np.exp(features @ model.population_coef_)
local = np.bincount(cars, claims) / np.bincount(cars, expected)
position = np.arange(60)
left.vlines(position, np.exp(lower), np.exp(upper), color="tab:blue", alpha=0.5)
left.plot(position, np.exp(model.intercept_), "o", ms=4, label="personalized, with 95 % interval")
left.plot(position, np.exp(intercepts), "_", color="black", ms=8, label="true")
left.plot(position, local, ".", color="tab:orange", label="local")
left.set(xlabel="region, from 10 to 300 cars", ylabel="claims per year of a typical car")
left.legend(frameon=False)
for name, mark in zip(deviances, "s^o_", strict=True):
    right.plot(deviances.index, deviances[name], mark, ms=8, label=name)
right.margins(x=0.2)
right.legend(frameon=False)
right.set_ylabel("Poisson deviance of held-out cars")
plt.show()
