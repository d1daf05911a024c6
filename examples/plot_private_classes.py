"""
Private logistic mixed models: what noise costs
===============================================

Clients answer questions, and how they differ from each other is to be learnt without learning
anything of one of them. A finite ``epsilon`` lets
:class:`~pfl_sklearn.linear_model.PersonalizedLogisticRegression` see no more than twelve noisy sums
of the clients' messages. Each client then adds its own rows, at home. What does the noise cost?

That depends on how many clients there are. We simulate clients with 24 rows each, whose log odds
differ with a standard deviation of 1, and look at the log-loss of other rows of theirs and of new
clients.
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

# Seeds, so that this page is the same tomorrow. For a release leave random_state at None.
warnings.simplefilter("ignore", PrivacyWarning)


def draw(n_clients, rng):
    """Rows of clients: 24 to learn from and 24 to predict, with two binary features."""
    groups = np.repeat(np.arange(n_clients), 48)
    X = rng.integers(0, 2, (len(groups), 2)).astype(float)
    odds = -1.0 + X @ [0.7, -0.7] + rng.normal(size=n_clients)[groups]
    return X, (rng.random(len(groups)) < expit(odds)).astype(int), groups


# %%
# Bounds are public knowledge: two binary features have an L2 norm of at most :math:`\sqrt 2`, and a
# client has 24 rows. They set the scale of the messages; privacy rests on the clipping alone.
BOUNDS = {"feature_bound": np.sqrt(2), "max_rows_per_client": 24, "unseen": "population"}

X, y, groups = draw(300, np.random.default_rng(0))
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
# The standard errors of the private model count the noise, too. Its report says what is promised to
# whom, and what is not.
print(model.privacy_)

# %%
# Now the curves, each point the mean of four tables. "Alone" is a logistic regression for each
# client, with scikit-learn's penalty; "one model" knows no clients.
EPSILONS = [0.5, 1.0, 2.0, 4.0]
SIZES = [30, 60, 120, 300, 1000]


def losses(n_clients, seed):
    """Log-loss of other rows of the clients by model, and for new clients."""
    rng = np.random.default_rng(seed)
    X, y, groups = draw(n_clients, rng)
    train = np.arange(len(y)) % 48 < 24
    strangers = draw(500, rng)
    models = {
        "exact": PersonalizedLogisticRegression(random="intercept", unseen="population"),
        "one model": PersonalizedLogisticRegression(GaussianPrior(covariance=0.0), **BOUNDS),
    }
    for epsilon in EPSILONS:
        models[epsilon] = PersonalizedLogisticRegression(
            epsilon=epsilon, random_state=seed, **BOUNDS
        )
    known, new = {}, {}
    for name, model in models.items():
        model.fit(X[train], y[train], groups=groups[train])
        known[name] = log_loss(y[~train], model.predict_proba(X[~train], groups=groups[~train]))
        unseen = model.predict_proba(strangers[0], groups=strangers[2] + n_clients)
        new[name] = log_loss(strangers[1], unseen)
    alone = [
        log_loss(
            y[rows & ~train],
            _alone(X[rows & train], y[rows & train], X[rows & ~train]),
            labels=[0, 1],
        )
        for rows in (groups == client for client in range(min(n_clients, 60)))
    ]
    return known | {"alone": np.mean(alone)}, new


def _alone(X, y, rows):
    """Chances of a client that learns from its own rows; one class has nothing to tell it apart."""
    if y.min() == y.max():
        share = (y.sum() + 0.5) / (len(y) + 1)
        return np.tile([1 - share, share], (len(rows), 1))
    return LogisticRegression().fit(X, y).predict_proba(rows)


found = [[losses(n, seed) for seed in range(4)] for n in SIZES]
known, new = (
    pd.DataFrame([pd.DataFrame([each[k] for each in tables]).mean() for tables in found], SIZES)
    for k in (0, 1)
)
print("known clients\n", known.round(3), "\nnew clients\n", new.round(3))

# %%
# With 300 clients an epsilon of 1 costs a few thousandths, and with 1,000 next to nothing. With 30
# noise leaves nothing for new clients; known ones still gain, because each adds its own
# rows to what the noisy sums of the others say.
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True, layout="constrained")
shades = plt.get_cmap("viridis_r")(np.linspace(0.1, 0.9, len(EPSILONS)))
for axis, table, title in zip(axes, (known, new), ("known clients", "new clients"), strict=True):
    for epsilon, shade in zip(EPSILONS, shades, strict=True):
        axis.plot(SIZES, table[epsilon], "o-", color=shade, label=f"epsilon {epsilon:g}")
    axis.plot(SIZES, table["exact"], color="black", label="exact, no privacy")
    axis.plot(SIZES, table["one model"], "--", color="black", label="one model, no privacy")
    if "alone" in table:
        axis.plot(SIZES, table["alone"], ":", color="tab:red", label="each client alone")
    axis.set(xscale="log", xlabel="clients", title=title)
    axis.set_xticks(SIZES, SIZES, minor=False)
    axis.minorticks_off()
axes[0].set_ylabel("log-loss")
axes[0].legend(fontsize="small")
plt.show()
