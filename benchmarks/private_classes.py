"""Private models of classes: log-loss of held-out rows of clients, and of clients left out.

The mixed model (level alone) and PPSGD at the same epsilon of one client whose data are replaced,
delta 1e-5: means over draws of the noise. PPSGD is tuned to the test rows themselves.

    PFL_SKLEARN_DATA=folder python benchmarks/private_classes.py             # all tables
    PFL_SKLEARN_DATA=folder python benchmarks/private_classes.py verbagg
"""

import os
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import ParameterGrid

from pfl_sklearn import PPSGDClassifier
from pfl_sklearn.linear_model import PersonalizedLogisticRegression
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.privacy import PrivacyWarning, calibrate_rounds

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers import public_tasks

DRAWS, DELTA = 20, 1e-5
GRID = {
    "clip_norm": (0.03, 0.1, 0.3, 1.0),
    "learning_rate": (0.3, 1.0, 3.0, 10.0),
    "n_rounds": (25, 50, 100, 200),
}
# Bound on rows, rows of a typical client, and every epsilon.
TABLES = {
    "verbagg": (2.5, 24, (0.5, 1, 2)),
    "movielens_liked": (2.0, 100, (0.5, 1, 2)),
    "contraception": (3.0, 30, (2,)),
    "landmine": (3.0, 500, (2,)),
}


def read(name, home):
    """Features (n, d) of size 1 or so by numbers that anybody could know, labels and clients."""
    X, y, groups = getattr(public_tasks, name)(home)[:3]
    if name == "verbagg":
        X = (2 * X - 1).assign(Anger=(X["Anger"] - 25) / 7)  # a score from 11 to 39
        X = X.drop(columns=["Gender_F", "btype_curse", "situ_other", "mode_do"])
    elif name == "movielens_liked":
        X = X.assign(year=(X["year"] - 1990) / 20)
    elif name == "contraception":
        X = X.assign(age=X["age"] / 10, square=X["square"] / 100).drop(columns="livch_0")
    return X.to_numpy(), y, np.unique(groups, return_inverse=True)[1]


def ppsgd(epsilon, *, n_rounds=100, **params):
    """PPSGD whose epsilon counts the replacement of a client, as that of the mixed model does."""
    z = calibrate_rounds(epsilon, DELTA, n_rounds=n_rounds, rate=1.0, relation="replace_one")
    return PPSGDClassifier(noise_multiplier=z, delta=DELTA, n_rounds=n_rounds, **params)


def alone(X, y, groups, train):
    """Log-loss of test rows, each under a logistic regression of its client's other rows."""
    p = np.empty((len(y), 2))
    for client in np.unique(groups):
        own, at = train & (groups == client), ~train & (groups == client)
        share = (y[own].sum() + 0.5) / (own.sum() + 1)  # one class has nothing to tell it apart
        p[at] = 1 - share, share
        if at.any() and 0 < y[own].sum() < own.sum():
            p[at] = LogisticRegression().fit(X[own], y[own]).predict_proba(X[at])
    return log_loss(y[~train], p[~train])


def compare(name, home):
    """Lines of losses of known clients and of new ones, and the settings that PPSGD took."""
    X, y, groups = read(name, home)
    bound, max_rows_per_client, epsilons = TABLES[name]
    fitted = np.zeros(len(y), dtype=bool)
    fitted[next(ClientKFold(5, random_state=0).split(X, groups=groups))[0]] = True
    for kind, train in (("known", fitted), ("new", groups % 5 != 0)):
        test = ~train

        def loss(model, train=train, test=test):
            model.set_params(unseen="population").fit(X[train], y[train], groups=groups[train])
            return log_loss(y[test], model.predict_proba(X[test], groups=groups[test]))

        pooled = LogisticRegression().fit(X[train], y[train]).predict_proba(X[test])
        exact = [
            alone(X, y, groups, train) if kind == "known" else np.nan,
            log_loss(y[test], pooled),
            loss(PersonalizedLogisticRegression(random="intercept")),
        ]
        for epsilon in epsilons:
            grid = ParameterGrid(GRID)
            best = min(grid, key=lambda each: loss(ppsgd(epsilon, random_state=DRAWS, **each)))
            bounds = {
                "feature_bound": bound,
                "max_rows_per_client": max_rows_per_client,
                "delta": DELTA,
            }
            models = (
                partial(PersonalizedLogisticRegression, epsilon=epsilon, **bounds),
                partial(ppsgd, epsilon),
                partial(ppsgd, epsilon, **best),
            )
            private = [
                np.mean([loss(model(random_state=seed)) for seed in range(DRAWS)])
                for model in models
            ]
            values = " ".join(f"{value:.3f}" for value in (*private, *exact))
            print(f"{name} {kind} {epsilon:g}: {values} {best}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", PrivacyWarning)
    print("table clients epsilon: mixed, PPSGD, PPSGD tuned; exact: alone, one model, mixed")
    for table in sys.argv[1:] or TABLES:
        compare(table, Path(os.environ["PFL_SKLEARN_DATA"]))
