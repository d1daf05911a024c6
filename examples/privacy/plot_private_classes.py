"""
Private logistic mixed models: the cost of noise
================================================

We want to learn how clients differ from each other without revealing much about any one of them.
With a finite ``epsilon``, :class:`~pfl_sklearn.linear_model.PersonalizedLogisticRegression` sees
only twelve noisy sums of the clients' messages. Each client then adds its own rows, locally. How
much does the noise cost?

That depends on the number of clients. We simulate clients with 24 rows each, whose log odds have a
standard deviation of 1, and compute the log-loss on further rows of these clients and of new ones.
"""

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from pfl_sklearn.linear_model import PersonalizedLogisticRegression
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import PrivacyWarning

# Seeds make this page reproducible. For a release, leave random_state at None.
warnings.simplefilter("ignore", PrivacyWarning)


def simulate_clients(n_clients, rng):
    """Rows of clients: 24 to learn from and 24 to predict, with two binary features."""
    groups = np.repeat(np.arange(n_clients), 48)
    X = rng.integers(0, 2, (len(groups), 2)).astype(float)
    log_odds = -1.0 + X @ [0.7, -0.7] + rng.normal(size=n_clients)[groups]
    return X, (rng.random(len(groups)) < expit(log_odds)).astype(int), groups


# %%
# Bounds are public knowledge: two binary features have an L2 norm of at most :math:`\sqrt 2`, and a
# client has 24 rows. They set the scale of the messages; privacy depends on the clipping alone.
BOUNDS = {"feature_bound": np.sqrt(2), "max_rows_per_client": 24, "unseen": "population"}

X, y, groups = simulate_clients(300, np.random.default_rng(0))
train = np.arange(len(y)) % 48 < 24
model = PersonalizedLogisticRegression(epsilon=1.0, random_state=0, **BOUNDS)
model.fit(X[train], y[train], groups=groups[train])
exact = PersonalizedLogisticRegression(random="intercept")
exact.fit(X[train], y[train], groups=groups[train])
columns = {"private": model, "exact": exact}
terms = [("fixed", "intercept"), ("fixed", "x0"), ("fixed", "x1"), ("between", "intercept")]
print(
    pd.concat(
        {k: m.summary().loc[terms, ["estimate", "std_error"]] for k, m in columns.items()}, axis=1
    ).round(2)
)

# %%
# The standard errors of the private model include the noise. Its report states what is protected,
# and against whom.
print(model.privacy_)

# %%
# Each point of the curves is the mean of two simulated tables. "Local" is scikit-learn's logistic
# regression for each client, with its default penalty; "pooled" ignores the clients.
EPSILONS = [0.5, 1.0, 4.0]
SIZES = [30, 100, 300, 1000]


def losses(n_clients, seed):
    """Log-loss by model, on further rows of the clients and on rows of new clients."""
    rng = np.random.default_rng(seed)
    X, y, groups = simulate_clients(n_clients, rng)
    train = np.arange(len(y)) % 48 < 24
    new_X, new_y, new_groups = simulate_clients(500, rng)
    models = {
        "exact": PersonalizedLogisticRegression(random="intercept", unseen="population"),
        "pooled": PersonalizedLogisticRegression(GaussianPrior(covariance=0.0), **BOUNDS),
    }
    for epsilon in EPSILONS:
        models[epsilon] = PersonalizedLogisticRegression(
            epsilon=epsilon, random_state=seed, **BOUNDS
        )
    known, new = {}, {}
    for name, model in models.items():
        model.fit(X[train], y[train], groups=groups[train])
        known[name] = log_loss(y[~train], model.predict_proba(X[~train], groups=groups[~train]))
        new[name] = log_loss(new_y, model.predict_proba(new_X, groups=new_groups + n_clients))
    local = [
        log_loss(
            y[rows & ~train],
            local_probabilities(X[rows & train], y[rows & train], X[rows & ~train]),
            labels=[0, 1],
        )
        for rows in (groups == client for client in range(min(n_clients, 60)))
    ]
    return known | {"local": np.mean(local)}, new


def local_probabilities(X, y, X_test):
    """Probabilities from one client's rows; a smoothed share of its rows if all have one class."""
    if y.min() == y.max():
        share = (y.sum() + 0.5) / (len(y) + 1)
        return np.tile([1 - share, share], (len(X_test), 1))
    return LogisticRegression().fit(X, y).predict_proba(X_test)


results = [[losses(n, seed) for seed in range(2)] for n in SIZES]
known, new = (
    pd.DataFrame([pd.DataFrame([pair[k] for pair in pairs]).mean() for pairs in results], SIZES)
    for k in (0, 1)
)
print("known clients\n", known.round(3), "\nnew clients\n", new.round(3))

# %%
# With 300 clients, an epsilon of 1 costs one or two thousandths, and with 1,000 next to nothing.
# With 30 clients, the noise is too large to predict for new clients; known clients lose less,
# because each adds its own rows to the noisy sums of the others.
figure, axes = plt.subplots(1, 2, figsize=(8.3, 3.8), sharey=True, layout="constrained")
shades = plt.get_cmap("viridis_r")(np.linspace(0.1, 0.9, len(EPSILONS)))
for axis, table, title in zip(axes, (known, new), ("known clients", "new clients"), strict=True):
    for epsilon, shade in zip(EPSILONS, shades, strict=True):
        axis.plot(SIZES, table[epsilon], "o-", color=shade, label=f"epsilon {epsilon:g}")
    axis.plot(SIZES, table["exact"], color="black", label="exact, no privacy")
    axis.plot(SIZES, table["pooled"], "--", color="black", label="pooled, no privacy")
    if "local" in table:
        axis.plot(SIZES, table["local"], ":", color="tab:red", label="local")
    axis.set(xscale="log", xlabel="clients", title=title)
    axis.set_xticks(SIZES, SIZES, minor=False)
    axis.minorticks_off()
axes[0].set_ylabel("log-loss")
axes[0].legend(fontsize="small")
plt.show()
