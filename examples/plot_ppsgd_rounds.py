"""
How many rounds: until the held-out loss is flat
================================================

PPSGD's local models have no penalty. Run for long enough, every client's model fits its own few
rows and their noise. What keeps it from that is the number of rounds: the global model is learned
first, local ones bit by bit. So without noise a part of every client's rows is held out, and
``fit`` goes on until their loss is flat.
"""

# %%
# Clients
# -------
# 300 clients with 20 rows each share most of their coefficients. A fifth of the rows is for the
# test.
import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import Ridge
from sklearn.metrics import root_mean_squared_error

from pfl_sklearn.linear_model import PPSGDRegressor
from pfl_sklearn.model_selection import ClientKFold

rng = np.random.default_rng(0)
who = np.repeat(np.arange(300), 20)
coef = np.array([2.0, -1.0, 0.5, 0.0]) + 0.4 * rng.normal(size=(300, 4))
X = rng.normal(size=(6000, 4))
y = np.sum(X * coef[who], axis=1) + 1.5 * rng.normal(size=6000)
train, test = next(ClientKFold(5, random_state=0).split(X, groups=who))


def error(model, **given):
    return root_mean_squared_error(y[test], model.predict(X[test], **given))


# %%
# Rounds
# ------
# The defaults need no number of rounds, no step and no ``alpha``.
model = PPSGDRegressor(random_state=0).fit(X[train], y[train], groups=who[train])
pooled = Ridge().fit(X[train], y[train])
print(f"{model.n_rounds_} rounds; root mean squared error of the test rows:")
print(f"  PPSGD        {error(model, groups=who[test]):.3f}")
print(f"  pooled ridge {error(pooled):.3f}")
print(f"  true models  {root_mean_squared_error(y[test], np.sum(X * coef[who], axis=1)[test]):.3f}")

# %%
# A number of rounds that is given is run as it is, on all rows. The training loss keeps falling,
# and the test error turns.
grid = np.unique(np.geomspace(1, 3000, 25).astype(int))
longer = PPSGDRegressor(warm_start=True, random_state=0)
errors = []
for n_rounds in grid:
    longer.set_params(n_rounds=n_rounds).fit(X[train], y[train], groups=who[train])
    errors.append(error(longer, groups=who[test]))

fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
loss = longer.history_["loss"]
ax.plot(np.arange(1, len(loss) + 1), np.sqrt(2 * loss), color="0.7", lw=0.8, label="training rows")
ax.plot(grid, errors, color="C0", label="test rows")
ax.axhline(error(pooled), color="C1", ls="--", label="test rows, pooled ridge")
ax.axvline(model.n_rounds_, color="0.3", ls=":", label="rounds that the default chose")
ax.set(xscale="log", xlabel="rounds", ylabel="root mean squared error")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
plt.show()

# %%
# With noise
# ----------
# The number of rounds is then a part of the mechanism: if it followed the data, it would reveal
# something about them. ``n_rounds=None`` is 100 rounds there, and the learning rate has to be
# given. The :ref:`user guide <ppsgd_rounds>` says how to choose them.
