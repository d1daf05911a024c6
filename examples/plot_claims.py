"""
Claims of insured cars
======================

An insurer has cars in 60 regions and wants the expected number of claims of each: by the driver's
age and the car's power, which matter alike everywhere, and by region. Cars are insured for parts of
a year, so counts come with an exposure. Some regions have ten cars, some 300.

The table is simulated, so that the truth is known.
"""

# %%
# The table
# ---------
# Regions differ by a factor of up to four or so: the standard deviation of their log rates is .5.
# On top of that, cars of a region differ in ways that no column has, and their counts vary more
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
level = 0.5 * rng.normal(size=60)
table = pd.DataFrame(
    {
        "young": (rng.random(len(cars)) < 0.2).astype(float),
        "power": rng.normal(size=len(cars)),
        "years": rng.uniform(0.1, 1.0, size=len(cars)),
        "region": cars,
    }
)
rate = np.exp(-1.5 + level[cars] + 0.6 * table["young"] + 0.2 * table["power"])
claims = rng.poisson(table["years"] * rate * rng.gamma(2.0, 0.5, size=len(cars)))
print(f"{len(cars)} cars, {claims.sum()} claims in {table['years'].sum():.0f} years")

# %%
# The fit
# -------
# ``ClientColumn`` takes the ids and the exposure out of the table, so the model is used as any
# other of scikit-learn. The likelihood ratio test says that counts vary more than Poisson counts.
poisson = PersonalizedPoissonRegression(random="intercept")
negative_binomial = PersonalizedPoissonRegression(random="intercept", family="negative_binomial")
simple = ClientColumn(poisson, "region", exposure="years").fit(table, claims)
model = ClientColumn(negative_binomial, "region", exposure="years").fit(table, claims)
print(likelihood_ratio_test(simple, model))
print(model.summary().round(3).to_string(na_rep=""))

# %%
# The standard deviation between regions has an interval, too. With 60 regions it is wide.
print(model.estimator_.conf_int().round(3))

# %%
# New cars
# --------
# A third of the cars of each region is held out. One Poisson regression for all cars knows no
# regions. One with a column per region (and a small penalty, or regions without claims would have a
# rate of 0) takes the claims of ten cars at their word.
train, test = next(ClientShuffleSplit(1, test_size=1 / 3, random_state=0).split(table, groups=cars))
features = table[["young", "power"]]
by_region = features.join(pd.get_dummies(cars, prefix="region", dtype=float))


def predicted(columns, alpha):
    """Expected claims of scikit-learn's regression of claims per year."""
    years = table["years"]
    peer = PoissonRegressor(alpha=alpha, max_iter=1000)
    peer.fit(columns.iloc[train], (claims / years)[train], sample_weight=years[train])
    return years[test] * peer.predict(columns.iloc[test])


ours = model.fit(table.iloc[train], claims[train]).predict(table.iloc[test])
predictions = {
    "one model": predicted(features, 0.0),
    "a column per region": predicted(by_region, 1e-4),
    "personalized": ours,
    "truth": (table["years"] * rate)[test],
}
sizes = pd.cut(np.bincount(cars)[cars[test]], [0, 30, 100, 300])
deviances = pd.DataFrame(
    {
        name: [mean_poisson_deviance(claims[test][own], mean[own]) for own in
               [sizes == size for size in sizes.categories]]
        for name, mean in predictions.items()
    },
    index=[f"{size.left + 1:.0f} to {size.right:.0f} cars" for size in sizes.categories],
)  # fmt: skip
print(deviances.round(3))

# %%
# Small regions gain most. Their rates are drawn towards the others', as far as their few claims
# leave it open, and their intervals say how far that is.
one = negative_binomial.fit(features, claims, groups=cars, exposure=table["years"])
lower, upper = (bound[:, 0] for bound in one.credible_interval())
covered = np.mean((lower < level - 1.5) & (level - 1.5 < upper))
print(f"{covered:.0%} of the 95 % intervals hold the true level")

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
expected = table["years"] * np.exp(features @ one.population_coef_)
own = np.bincount(cars, claims) / np.bincount(cars, expected)
position = np.arange(60)
left.vlines(position, np.exp(lower), np.exp(upper), color="tab:blue", alpha=0.5)
left.plot(position, np.exp(one.intercept_), "o", ms=4, label="personalized, with 95 % interval")
left.plot(position, np.exp(level - 1.5), "_", color="black", ms=8, label="truth")
left.plot(position, own, ".", color="tab:orange", label="claims alone")
left.set(xlabel="region, from 10 to 300 cars", ylabel="claims a year of a usual car")
left.legend(frameon=False)
deviances.plot.bar(ax=right, rot=0, legend=False)
right.legend(frameon=False, ncols=2)
right.set_ylabel("Poisson deviance of held-out cars")
right.set_ylim(0.9 * deviances.to_numpy().min(), 1.12 * deviances.to_numpy().max())
plt.show()
