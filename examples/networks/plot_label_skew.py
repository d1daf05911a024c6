"""
Personal neural networks for clients with different labels
==========================================================

Each of twenty clients has three of the ten digits and few rows. How much does a network for each
client gain over one network for all? Most of the gain comes from the label frequencies, and Bayes'
rule uses them without any training.
"""

# %%
# Clients
# -------
# A third of every client's rows, about thirty, is for training.
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
print(f"{np.bincount(who[train]).mean():.0f} training rows per client")

# %%
# Five methods
# ------------
# In each of 30 rounds, half of the clients take ten steps. The default network has one hidden layer
# of 64 units.
rounds = {"n_rounds": 30, "client_fraction": 0.5, "random_state": 0}
models = {
    "each client alone": LocalNetClassifier(**rounds),
    "one network (FedAvg)": FedAvgClassifier(**rounds),
    "AdaPeD, as printed": AdaPeDClassifier(
        global_loss=0.0, personal_start="own", psi_min=0.5, **rounds
    ),
    "AdaPeD": AdaPeDClassifier(**rounds),
    "one network, label frequencies": FedAvgClassifier(label_prior="client", **rounds),
}
rows = {}
for name, model in models.items():
    model.fit(X[train], y[train], groups=who[train])
    proba = model.predict_proba(X[test], groups=who[test])
    correct = model.classes_[proba.argmax(axis=1)] == y[test]
    by_client = pd.Series(correct).groupby(who[test]).mean()
    rows[name] = {
        "accuracy": correct.mean(),
        "10th percentile of clients": by_client.quantile(0.1),
        "log loss": log_loss(y[test], np.clip(proba, 1e-12, 1), labels=model.classes_),
    }
print(pd.DataFrame(rows).T.round(3).to_string())

# %%
# With thirty rows of only three digits, a client alone does well, and a network for all ten digits
# adds little. With half as many rows, AdaPeD is better; see the user guide.
#
# The network corrected by label frequencies is FedAvg's network: nothing is trained on one client's
# rows alone. The correction improves the clients above the line.
ClientGainDisplay.from_estimator(
    models["one network, label frequencies"], X[test], y[test], groups=who[test], scoring="accuracy"
)
plt.show()

# %%
# How close personal networks stay
# --------------------------------
# AdaPeD learns how close personal networks stay to the global one: the smaller psi, the closer.
ConvergenceDisplay.from_estimator(models["AdaPeD, as printed"], quantities=["loss", "psi"])
plt.show()
