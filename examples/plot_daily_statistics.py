"""
Statistics that add up: a model that learns every day
======================================================

A chain of 200 shops wants one model per shop, and gets 4,000 receipts a day. It keeps no receipt
for longer than a day. It need not: a linear model sees the rows of a shop through their second
moments alone, and those of a month are the sums of those of its days.

:class:`~pfl_sklearn.statistics.ClientStatistics` holds them. The example adds days up, watches the
estimates settle, and checks in the end that the model is the one of all rows.
"""

# %%
# A day
# -----
# What a basket costs depends on its number of items and on a discount. Shops differ in their level
# and in what the discount does. Most shops are small: a handful of receipts a day.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.statistics import ClientStatistics

rng = np.random.default_rng(0)
n_shops, n_days = 200, 30
share = rng.dirichlet(np.full(n_shops, 0.6))  # of the receipts
level, effect = rng.normal(20, 4, n_shops), rng.normal(-3, 1.5, n_shops)


def receipts(n=4000):
    """Receipts of a day."""
    shop = rng.choice(n_shops, n, p=share)
    items, discount = rng.poisson(4, n) + 1, rng.integers(0, 2, n)
    paid = level[shop] + 2.5 * items + effect[shop] * discount + rng.normal(0, 6, n)
    return pd.DataFrame({"shop": shop, "items": items, "discount": discount, "paid": paid})


columns = {"groups": "shop", "target": "paid", "features": ["items", "discount"]}
print(ClientStatistics.from_frame(receipts(), **columns))

# %%
# A month
# -------
# Each evening the day's statistics are added to those so far, and the receipts are gone. A shop
# that sold nothing on a day is missing in that day's statistics; the sum has all shops so far.
total, days, month = 0, [], []
for _ in range(n_days):
    today = receipts()
    month.append(today)  # only to check the result in the end
    total = total + ClientStatistics.from_frame(today, **columns)
    model = PersonalizedLinearRegression(random=["intercept", "discount"]).fit_statistics(total)
    days.append(model)
print(total)
print(model.summary().round(2).to_string())

# %%
# Three shops, from the first day to the last: the effect of the discount with an interval of 95 %.
# The dashes are the truth. The large shop leaves the population in the first week. The small one
# stays near it, with an interval about as wide as shops differ.
order = np.argsort(share)
chosen = {"large": order[-1], "medium": order[n_shops // 2], "small": order[n_shops // 8]}
fig, axes = plt.subplots(1, 3, figsize=(10, 3.5), sharey=True)
for ax, (name, shop) in zip(axes, chosen.items(), strict=True):
    tables = [model.coef_table().set_index("client") for model in days]
    seen = [day for day, table in enumerate(tables, 1) if shop in table.index]
    rows = pd.DataFrame([tables[day - 1].loc[shop] for day in seen], index=seen)
    middle, width = rows["discount"], 1.96 * rows["discount_std"]
    ax.fill_between(seen, middle - width, middle + width, alpha=0.25)
    ax.plot(seen, middle, label="shop")
    ax.plot(range(1, n_days + 1), [m.population_coef_[1] for m in days], ":", label="population")
    ax.axhline(effect[shop], color="black", linestyle="--", linewidth=1, label="truth")
    n_receipts = total.n_samples_per_client[total.clients == shop][0]
    ax.set(title=f"{name} shop, {n_receipts} receipts", xlabel="day")
axes[0].set_ylabel("effect of the discount")
axes[0].legend()
fig.tight_layout()
plt.show()

# %%
# The same model
# --------------
# The receipts of the month, had they been kept, give the same coefficients.
rows = pd.concat(month)
of_rows = PersonalizedLinearRegression(random=["intercept", "discount"]).fit(
    rows[["items", "discount"]], rows["paid"], groups=rows["shop"]
)
print(f"largest difference: {np.abs(of_rows.coef_ - model.coef_).max():.0e}")
print(f"{rows.memory_usage(index=False).sum():,} bytes of rows, {total.packed.nbytes:,} of sums")

# %%
# For a score where the receipts are, ``coef_table`` has a row per shop:
print(model.coef_table().head().round(2).to_string(index=False))
