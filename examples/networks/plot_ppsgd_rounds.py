"""
How many rounds: until the held-out loss is flat
================================================

PPSGD's local models have no penalty, so after enough rounds every client's model overfits its few
rows. Only the number of rounds prevents that: the fit learns the global model first and the local
models slowly. Without noise, ``fit`` therefore holds out some rows of every client and continues
until their loss is flat.
"""

# %%
# Clients
# -------
# The coefficients of 300 clients with 20 rows each differ little. A fifth of the rows is held out.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import Ridge
from sklearn.metrics import root_mean_squared_error

from pfl_sklearn.inspection import ClientGainDisplay, ConvergenceDisplay
from pfl_sklearn.linear_model import PPSGDRegressor
from pfl_sklearn.model_selection import ClientKFold

rng = np.random.default_rng(0)
who = np.repeat(np.arange(300), 20)
coef = np.array([2.0, -1.0, 0.5, 0.0]) + 0.4 * rng.normal(size=(300, 4))
X = rng.normal(size=(6000, 4))
y = np.sum(X * coef[who], axis=1) + 1.5 * rng.normal(size=6000)
train, test = next(ClientKFold(5, random_state=0).split(X, groups=who))


def error(model, **metadata):
    return root_mean_squared_error(y[test], model.predict(X[test], **metadata))


# %%
# Rounds
# ------
# With the defaults, no number of rounds, step size or ``alpha`` is needed.
model = PPSGDRegressor(random_state=0).fit(X[train], y[train], groups=who[train])
pooled = Ridge().fit(X[train], y[train])
print(f"{model.n_rounds_} rounds; root mean squared error of the test rows:")
print(f"  PPSGD        {error(model, groups=who[test]):.3f}")
print(f"  pooled ridge {error(pooled):.3f}")
print(f"  true models  {root_mean_squared_error(y[test], np.sum(X * coef[who], axis=1)[test]):.3f}")

# %%
# If you specify the number of rounds, the fit runs that many, on all rows. The training loss keeps
# falling, while the test error rises again.
grid = np.unique(np.geomspace(1, 1500, 20).astype(int))
longer = PPSGDRegressor(warm_start=True, random_state=0)
errors = []
for n_rounds in grid:
    longer.set_params(n_rounds=n_rounds).fit(X[train], y[train], groups=who[train])
    errors.append(error(longer, groups=who[test]))

scores = pd.DataFrame({"root mean squared error\n(test rows)": errors}, index=grid)
display = ConvergenceDisplay.from_estimator(longer, scores=scores, xscale="log")
loss, test_error = display.axes_
test_error.axhline(error(pooled), color="C1", ls="--", label="pooled ridge")
for ax in (loss, test_error):
    ax.axvline(model.n_rounds_, color="0.3", ls=":", label="rounds chosen by default")
test_error.legend(frameon=False, fontsize="small", loc="upper right", bbox_to_anchor=(1, 1.05))
plt.show()

# %%
# Gains by client
# ---------------
# Every client has only four test rows, so its error is noisy, and so is the sign of its gain: only
# a few more than half of the clients are below the line. The mean gain is more informative.
display = ClientGainDisplay.from_estimator(
    model,
    X[test],
    y[test],
    groups=who[test],
    scoring="neg_root_mean_squared_error",
    negate_score=True,
)
plt.show()

# %%
# With noise
# ----------
# With noise, the number of rounds must not depend on the data, since it would reveal something
# about them. ``n_rounds=None`` then means 100 rounds, and you have to specify the learning rate.
# The :ref:`user guide <ppsgd_rounds>` says how to choose both.
private = PPSGDRegressor(
    learning_rate=0.1,
    alpha=0.02,
    weighting="clients",
    epsilon=4.0,
    delta=1e-5,
    clip_norm=20.0,
    clip_quantile=0.5,
).fit(X[train], y[train], groups=who[train])
print(private.privacy_)
print(f"root mean squared error of the test rows: {error(private, groups=who[test]):.3f}")

# %%
# The clipping bound starts too high and falls to the median norm of the messages. The last panel
# shows the epsilon spent up to each round. Epsilon covers only the global models, and not the
# training loss: show such a plot only to people who may see the data.
ConvergenceDisplay.from_estimator(private)
plt.show()
