"""
Network methods for three kinds of differences between clients
==============================================================

Clients may have different labels, their rows may look different, or they may form groups that
contradict each other. No method is best in all three cases. Here the same digits are distributed
over ten clients in each of these ways, and twelve methods train on about eighteen rows of each
client.
"""

# %%
# Three tables
# ------------
# A tenth of every client's rows is for training. In the first table, each client has three of the
# ten digits; in the others, all digits. In the second table, clients rotate their images, and every
# second client inverts them. In the third, half of the clients label the digits in reverse order.
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

few_labels = load_digits_clients(10, classes_per_client=3)
all_labels = load_digits_clients(10, classes_per_client=10)


def distort_images(X, groups):
    """Rotate images by quarter turns, differently by client, and invert every second client's."""
    images, distorted = X.reshape(-1, 8, 8), np.empty_like(X)
    for client in np.unique(groups):
        rows = groups == client
        rotated = np.rot90(images[rows], client % 4, axes=(1, 2)).reshape(-1, 64)
        distorted[rows] = X.max() - rotated if client % 2 else rotated
    return distorted


data, target, groups = all_labels.data, all_labels.target, all_labels.groups
tables = {
    "labels": (few_labels.data, few_labels.target, few_labels.groups),
    "images": (distort_images(data, groups), target, groups),
    "groups": (data, np.where(groups % 2, 9 - target, target), groups),
}

# %%
# Twelve methods
# --------------
# All use the default network, with one hidden layer of 64 units. In each of 20 rounds, half of the
# clients take ten steps.
rounds = {"n_rounds": 20, "client_fraction": 0.5, "random_state": 0}
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
    train, test = next(ClientShuffleSplit(1, test_size=0.9, random_state=0).split(X, y, who))
    for name, model in models.items():
        model.fit(X[train], y[train], groups=who[train])
        accuracy.loc[name, kind] = model.score(X[test], y[test], groups=who[test])
print(accuracy.round(3).to_string())

# %%
# Which method suits which clients
# --------------------------------
# If labels differ, label frequencies alone gain more than any personal network. If images look
# different, one network learns most from the rows of all clients, and separate personal networks
# learn from too few. If groups contradict each other, one network must be wrong for half of the
# clients; FedEM and AdaMix find the groups, and lose little elsewhere.
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
