"""
Methods for clients that differ in three ways
=============================================

Clients may differ in which labels they have, in what their rows look like, or in groups that
contradict each other. No method is good at all three. Here the same digits go to twenty clients in
each of these ways, and twelve methods train on about eighteen rows of each client.
"""

# %%
# Three kinds of clients
# ----------------------
# A fifth of every client's rows is for training. In the first table clients have three of the ten
# digits each. In the others they have all digits. In the second every client turns its images, and
# every second one inverts them; in the third half of the clients name the digits in reverse order.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn import AdaPeDClassifier, FedAvgClassifier, LocalNetClassifier
from pfl_sklearn.datasets import load_digits_clients
from pfl_sklearn.model_selection import ClientShuffleSplit
from pfl_sklearn.neural_network import (
    AdaMixNetClassifier,
    DittoClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    PerFedAvgClassifier,
    PPSGDNetClassifier,
)

few_labels = load_digits_clients(20, classes_per_client=3)
all_labels = load_digits_clients(20, classes_per_client=10)


def turned(X, groups):
    """Images that every client rotates by quarter turns, and every second client inverts."""
    images, found = X.reshape(-1, 8, 8), np.empty_like(X)
    for client in np.unique(groups):
        own = np.rot90(images[groups == client], client % 4, axes=(1, 2)).reshape(-1, 64)
        found[groups == client] = X.max() - own if client % 2 else own
    return found


data, target, groups = all_labels.data, all_labels.target, all_labels.groups
tables = {
    "labels": (few_labels.data, few_labels.target, few_labels.groups),
    "looks": (turned(data, groups), target, groups),
    "groups": (data, np.where(groups % 2, 9 - target, target), groups),
}

# %%
# Twelve methods
# --------------
# All have the default net, with one hidden layer of 64 units, and take ten steps with half of the
# clients in each of 30 rounds.
rounds = {"n_rounds": 30, "client_fraction": 0.5, "random_state": 0}
models = {
    "Local": LocalNetClassifier(**rounds),
    "FedAvg": FedAvgClassifier(**rounds),
    "FedAvg, fine-tuned": FedAvgClassifier(fine_tune_steps=30, **rounds),
    "FedAvg, label frequencies": FedAvgClassifier(label_prior="client", **rounds),
    "AdaPeD": AdaPeDClassifier(**rounds),
    "Ditto": DittoClassifier(**rounds),
    "Per-FedAvg": PerFedAvgClassifier(adapt_steps=10, **rounds),
    "FedPer": FedPerClassifier(**rounds),
    "PPSGD": PPSGDNetClassifier(**rounds),
    "Mutual learning": FedMutualClassifier(**rounds),
    "FedEM": FedEMClassifier(**rounds),
    "AdaMix": AdaMixNetClassifier(**rounds),
}
accuracy = pd.DataFrame(index=list(models), columns=list(tables), dtype=float)
for kind, (X, y, who) in tables.items():
    train, test = next(ClientShuffleSplit(1, test_size=0.8, random_state=0).split(X, y, who))
    for name, model in models.items():
        model.fit(X[train], y[train], groups=who[train])
        accuracy.loc[name, kind] = model.score(X[test], y[test], groups=who[test])
print(accuracy.round(3).to_string())

# %%
# Where they are good
# -------------------
# Where labels differ, the label frequencies alone do more than any personal net. Where images look
# different, one net for all has seen most, and methods that keep whole nets apart have seen too
# little. Where groups contradict each other, one net must be wrong for half of the clients; FedEM
# and AdaMix find the groups, and lose little elsewhere.
fig, ax = plt.subplots(figsize=(7.5, 5), layout="constrained")
places = np.arange(len(models))[::-1]
for (kind, values), marker, color in zip(
    accuracy.items(), "osD", ["tab:blue", "tab:orange", "tab:green"], strict=True
):
    ax.plot(values, places, marker, color=color, markersize=8, label=f"clients differ in {kind}")
ax.set(yticks=places, yticklabels=list(models), xlabel="accuracy on new rows of the clients")
ax.grid(alpha=0.3)
ax.legend(loc="upper left", bbox_to_anchor=(0, 1.14), ncols=3, frameon=False, fontsize="small")
plt.show()
