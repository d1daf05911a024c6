"""
Daily statistics: a model that is updated every day
===================================================

A chain of 100 shops wants one model per shop. It gets 2,000 receipts a day and keeps them for one
day only. That is enough: a linear model depends on a shop's rows only through their second moments,
and the moments of a month are the sums of those of its days.

:class:`~pfl_sklearn.statistics.ClientStatistics` holds these moments. The example adds up days,
shows how the estimates converge, and checks that the final model equals the one of all rows.
"""

# %%
# One day
# -------
# The amount paid depends on the number of items and on a discount. The intercept and the effect of
# the discount differ between shops. Most shops are small, with a handful of receipts a day.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.statistics import ClientStatistics

rng = np.random.default_rng(0)
n_shops, n_days = 100, 30
share = rng.dirichlet(np.full(n_shops, 0.6))  # of the receipts
intercept, effect = rng.normal(20, 4, n_shops), rng.normal(-3, 1.5, n_shops)


def receipts(n=2000):
    """Simulate the receipts of one day."""
    shop = rng.choice(n_shops, n, p=share)
    items, discount = rng.poisson(4, n) + 1, rng.integers(0, 2, n)
    paid = intercept[shop] + 2.5 * items + effect[shop] * discount + rng.normal(0, 6, n)
    return pd.DataFrame({"shop": shop, "items": items, "discount": discount, "paid": paid})


columns = {"groups": "shop", "target": "paid", "features": ["items", "discount"]}
print(ClientStatistics.from_frame(receipts(), **columns))

# %%
# One month
# ---------
# Each evening, the day's statistics are added to the total, and the receipts are deleted. A shop
# without receipts on a day is missing from that day's statistics; the sum has all shops so far.
total, days, month = 0, [], []
for _ in range(n_days):
    today = receipts()
    month.append(today)  # only to check the result at the end
    total = total + ClientStatistics.from_frame(today, **columns)
    model = PersonalizedLinearRegression(random=["intercept", "discount"]).fit_statistics(total)
    days.append(model)
print(total)
print(model.summary().round(2).to_string())

# %%
# The effect of the discount in three shops, with 95 % intervals, from the first day to the last.
# Dashed lines are the true effects. The large shop's estimate departs from the population's in the
# first week. The small shop's estimate stays close to it, and its interval is about as wide as the
# spread between shops.
order = np.argsort(share)
chosen = {"large": order[-1], "medium": order[n_shops // 2], "small": order[n_shops // 8]}
fig, axes = plt.subplots(1, 3, figsize=(8.3, 3.5), sharey=True)
for ax, (name, shop) in zip(axes, chosen.items(), strict=True):
    # every third day: standard errors include those of the variances, which takes longer than a fit
    known = [day for day in range(1, n_days + 1, 3) if shop in days[day - 1].clients_]
    models = [(days[day - 1], days[day - 1].clients_ == shop) for day in known]
    estimate = np.ravel([model.coef_[row, 1] for model, row in models])
    width = 1.96 * np.ravel([model.coef_std_[row, 1] for model, row in models])
    ax.fill_between(known, estimate - width, estimate + width, alpha=0.25)
    ax.plot(known, estimate, label="shop")
    ax.plot(range(1, n_days + 1), [m.population_coef_[1] for m in days], ":", label="population")
    ax.axhline(effect[shop], color="black", linestyle="--", linewidth=1, label="true effect")
    n_receipts = total.n_samples_per_client[total.clients == shop][0]
    ax.set(title=f"{name} shop, {n_receipts} receipts", xlabel="day")
axes[0].set_ylabel("effect of the discount")
axes[0].legend()
fig.tight_layout()
plt.show()

# %%
# The same model from all rows
# ----------------------------
# The month's receipts, had they been kept, give the same coefficients.
rows = pd.concat(month)
full = PersonalizedLinearRegression(random=["intercept", "discount"]).fit(
    rows[["items", "discount"]], rows["paid"], groups=rows["shop"]
)
print(f"largest difference: {np.abs(full.coef_ - model.coef_).max():.0e}")
print(f"{rows.memory_usage(index=False).sum():,} bytes of rows, {total.packed.nbytes:,} of sums")

# %%
# To predict where the receipts are stored, use ``coef_table``, which has a row per shop:
print(model.coef_table().head().round(2).to_string(index=False))
