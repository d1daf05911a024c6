"""
Credibility: failures of ten pumps, claims of 300 fleets
========================================================

A fleet had no claim in its only year. Is its claim frequency 0? No insurer would charge nothing.
Actuaries give the fleet's own frequency a weight between 0 and 1, its *credibility*, which grows
with exposure. The frequency of all fleets gets the remaining weight.

:class:`~pfl_sklearn.estimation.PoissonMean` does this for counts with exposure. The first table is
real and small: ten pumps of a nuclear plant, their failures and their operating times (Gaver and
O'Muircheartaigh, 1987). The second is a simulated portfolio, whose true frequencies are known.
"""

# %%
# Ten pumps
# ---------
# Each pump is a client, with a count and its exposure in thousands of hours.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.estimation import PoissonMean
from pfl_sklearn.inspection import ShrinkageDisplay

failures = [5, 1, 5, 14, 3, 19, 1, 1, 4, 22]
hours = [94.32, 15.72, 62.88, 125.76, 5.24, 31.44, 1.048, 1.048, 2.096, 10.48]
pumps = [f"pump {k:02d}" for k in range(1, 11)]

model = PoissonMean().fit_counts(failures, hours, groups=pumps)
table = model.summary()
table["credibility"] = 1 - table.pop("shrinkage")
print(table.round(2).to_string())
print(f"\ncollective rate {model.population_mean_:.2f} ± {model.population_mean_std_:.2f}")
print(f"credibility constant {model.prior_.rate:.2f} thousand hours")

# %%
# Rings are the pumps' own rates, and dots the estimates with 95 % intervals. Pumps 7, 8 and 9 ran
# for a thousand hours or two. Their rates are the least certain, so they are shrunk most. Pumps 1
# to 4 ran for years and are hardly shrunk. The intervals include the uncertainty about a population
# of which only ten pumps are known.
display = ShrinkageDisplay.from_estimator(model, xlabel="failures per 1,000 hours")
display.ax_.set_title("Ten pumps")
plt.show()

# %%
# A portfolio
# -----------
# 300 fleets have between a few and a few hundred vehicles. Their claim frequencies have a
# coefficient of variation of one half. Three years are known, and the claims of the fourth are
# predicted. Each row is one year of one fleet, so the table goes to ``fit``, with the exposure of
# every row.
rng = np.random.default_rng(0)
n_fleets = 300
vehicles = rng.lognormal(2.5, 1.2, n_fleets).round() + 1
frequency = rng.gamma(4.0, 0.08 / 4.0, n_fleets)
rows = pd.DataFrame(
    {
        "fleet": np.tile(np.arange(n_fleets), 4),
        "year": np.repeat([2021, 2022, 2023, 2024], n_fleets),
        "vehicle_years": np.tile(vehicles, 4) * rng.uniform(0.8, 1.2, 4 * n_fleets),
    }
)
rows["claims"] = rng.poisson(frequency[rows["fleet"]] * rows["vehicle_years"])
past, future = rows[rows["year"] < 2024], rows[rows["year"] == 2024]


def fitted(**params):
    """Model fitted to the first three years."""
    model = PoissonMean(**params)
    exposure = past["vehicle_years"]
    return model.fit(past[["year"]], past["claims"], groups=past["fleet"], exposure=exposure)


models = {
    "credibility, maximum likelihood": fitted(),
    "credibility, Bühlmann and Straub": fitted(method="moments"),
    "any population": fitted(prior="grid"),
}
ml = models["credibility, maximum likelihood"]
rates = {
    "own frequency": ml.local_means_,
    "one frequency for all": np.full(n_fleets, past["claims"].sum() / past["vehicle_years"].sum()),
    **{name: model.means_ for name, model in models.items()},
}
errors = pd.DataFrame(
    {
        "RMSE of frequency": {
            name: np.sqrt(np.mean((rate - frequency) ** 2)) for name, rate in rates.items()
        },
        "RMSE of next year's claims": {
            name: np.sqrt(np.mean((future["vehicle_years"] * rate - future["claims"]) ** 2))
            for name, rate in rates.items()
        },
    }
)
print(errors.round(4).to_string())

# %%
# A fleet's own frequency has a larger error than one frequency for all, and credibility nearly
# halves that error. The method that estimates the prior matters little here, since the population
# is a gamma distribution. Much of next year's claims is chance, which no rate predicts.
#
# Credibility grows with exposure, and is one half at the credibility constant.
exposure = ml.exposure_per_client_
constant = ml.prior_.rate
fig, axes = plt.subplots(1, 2, figsize=(8.3, 3.8), layout="constrained")
grid = np.geomspace(exposure.min(), exposure.max(), 200)
axes[0].plot(grid, grid / (grid + constant), color="#555555", lw=1)
axes[0].plot(exposure, 1 - ml.shrinkage_, ".", color="#1f5fa8", alpha=0.5)
axes[0].axvline(
    constant, color="#c1440e", lw=1, ls="--", label=f"credibility constant: {constant:.0f}"
)
axes[0].set(xscale="log", xlabel="vehicle-years", ylabel="credibility", ylim=(0, 1))
axes[0].legend(frameon=False)
ShrinkageDisplay.from_estimator(ml, truth=frequency, kind="points", ax=axes[1])
axes[1].set(xlabel="own claim frequency", ylabel="estimate")
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# A new fleet gets the frequency of the portfolio, with the standard deviation between fleets.
rate, std = ml.set_params(unseen="population").predict(
    future[["year"]][:1], groups=[n_fleets], exposure=[1.0], return_std=True
)
print(f"new fleet: {rate[0]:.3f} ± {std[0]:.3f} claims per vehicle-year")

# %%
# With privacy
# ------------
# Fleets may want to keep their claims secret. With a finite epsilon, the portfolio's frequency is
# learned from private reports (unit: one fleet; relation: all of its claims replaced by any others;
# exposures are public). Under local trust, every fleet randomizes its own report, and the adversary
# is everybody who sees the reports. Under central trust, a server adds noise to a histogram, delta
# is .001, and the adversary is everybody but the server. ``cap`` is a number of claims in three
# years that few fleets exceed, chosen beforehand.
releases = {
    "local trust": {"trust": "local"},
    "central trust": {"trust": "central", "delta": 1e-3},
}
epsilons, n_repetitions = [0.5, 1.0, 4.0], 3


def private_errors(**release):
    """Errors of the frequency, one for every repetition of the noise."""
    fits = [fitted(cap=40, **release) for _ in range(n_repetitions)]
    return [np.sqrt(np.mean((fit.means_ - frequency) ** 2)) for fit in fits]


private = {
    name: np.array([private_errors(epsilon=epsilon, **release) for epsilon in epsilons])
    for name, release in releases.items()
}
table = pd.DataFrame({name: rmse.mean(axis=1) for name, rmse in private.items()}, index=epsilons)
print(table.rename_axis("epsilon").round(4).to_string())

# %%
# Local trust needs a larger epsilon to come close to the error without privacy (above). A fleet
# knows its own claims and combines them with the release. If the release is too noisy, fleets keep
# their own frequencies: noise makes the release less useful, not harmful.
