"""
Personal nets where clients differ in their labels
==================================================

Twenty clients have three of the ten digits each, and few rows. What does a net for each client gain
over one for all? Most of the gain comes from the label frequencies, and Bayes' rule uses them
without any training.
"""

# %%
# Clients
# -------
# A third of every client's rows is for training, about thirty of them.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.metrics import log_loss

from pfl_sklearn import AdaPeDClassifier, FedAvgClassifier, LocalNetClassifier
from pfl_sklearn.datasets import load_digits_clients
from pfl_sklearn.inspection import ClientGainDisplay, ConvergenceDisplay
from pfl_sklearn.model_selection import ClientShuffleSplit

digits = load_digits_clients(20, classes_per_client=3)
X, y, who = digits.data, digits.target, digits.groups
train, test = next(ClientShuffleSplit(1, test_size=2 / 3, random_state=0).split(X, y, who))
print(f"{np.bincount(who[train]).mean():.0f} rows a client")

# %%
# Six ways
# --------
# In each of 60 rounds half of the clients take ten steps. The net has one hidden layer of 64 units,
# the default.
rounds = {"n_rounds": 60, "client_fraction": 0.5, "random_state": 0}
models = {
    "each client alone": LocalNetClassifier(**rounds),
    "one net (FedAvg)": FedAvgClassifier(**rounds),
    "fine-tuned": FedAvgClassifier(fine_tune_steps=30, **rounds),
    "AdaPeD, as printed": AdaPeDClassifier(
        global_loss=0.0, personal_start="own", psi_min=0.5, **rounds
    ),
    "AdaPeD": AdaPeDClassifier(**rounds),
    "one net, label frequencies": FedAvgClassifier(label_prior="client", **rounds),
}
rows = {}
for name, model in models.items():
    model.fit(X[train], y[train], groups=who[train])
    proba = model.predict_proba(X[test], groups=who[test])
    right = model.classes_[proba.argmax(axis=1)] == y[test]
    by_client = pd.Series(right).groupby(who[test]).mean()
    rows[name] = {
        "accuracy": right.mean(),
        "worst tenth of the clients": by_client.quantile(0.1),
        "log loss": log_loss(y[test], np.clip(proba, 1e-12, 1), labels=model.classes_),
    }
print(pd.DataFrame(rows).T.round(3).to_string())

# %%
# With thirty rows of three digits a client alone does well, and a net of many digits adds little.
# With half as many rows AdaPeD is ahead of it; see the user guide.
#
# The net that is corrected by the clients' label frequencies is the plain FedAvg net: nothing is
# trained on a client's own rows alone. Clients for which it is better are above the line.
ClientGainDisplay.from_estimator(
    models["one net, label frequencies"], X[test], y[test], groups=who[test], scoring="accuracy"
)
plt.show()

# %%
# How close personal nets stay
# ----------------------------
# AdaPeD learns how close personal nets stay to the global one: the smaller psi, the closer.
ConvergenceDisplay.from_estimator(models["AdaPeD, as printed"], quantities=["loss", "psi"])
plt.show()
