"""
Handwriting: neural networks for writers with few images
========================================================

206 people wrote digits and letters, 62 classes in all. Each of them is a client with 2 to 35
training images (median 14). That is far too few for a separate network. How much can a writer's own
rows still add to a network that all writers train?

The images ``femnist_206writers.npz`` are read from the folder in ``PFL_SKLEARN_DATA``. Without it,
the example distributes scikit-learn's digits over artificial clients; all output and titles say so.
"""

# %%
# Writers
# -------
# Half of every writer's images are for training.
import copy

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.metrics import log_loss

from pfl_sklearn import FedAvgClassifier, LocalNetClassifier
from pfl_sklearn.datasets import fetch_femnist, load_digits_clients
from pfl_sklearn.inspection import ClientGainDisplay, ConvergenceDisplay
from pfl_sklearn.model_selection import ClientShuffleSplit

try:
    table, SOURCE = fetch_femnist(), "handwriting"
except FileNotFoundError:
    table = load_digits_clients(60, classes_per_client=4, random_state=0)
    SOURCE = "ARTIFICIAL WRITERS"
X, y, writer = table.data, table.target, table.groups
X = X.reshape(len(X), -1)
train, test = next(ClientShuffleSplit(1, test_size=0.5, random_state=0).split(X, y, writer))
sizes = np.bincount(writer[train])
print(f"data: {SOURCE}")
print(f"{len(sizes)} writers, {len(np.unique(y))} characters")
print(f"training images per writer: {sizes.min()} to {sizes.max()}, median {np.median(sizes):.0f}")

# %%
# One network, adapted by each writer
# -----------------------------------
# The network has 64 hidden units. In each of 80 rounds, a fifth of the writers take ten steps.
# After the rounds, every writer adapts the network with its own rows: it takes ten more steps,
# corrects probabilities by its label frequencies, or fits a last layer, the mode of a posterior
# around the global one. All variants use the same network, since ``warm_start`` runs no further
# rounds. Writers who train alone take a hundred steps.
net = FedAvgClassifier(n_rounds=80, client_fraction=0.2, warm_start=True, random_state=0)
net.fit(X[train], y[train], groups=writer[train])


def personalize(**params):
    """The same global network, adapted by each writer after the rounds."""
    return copy.deepcopy(net).set_params(**params).fit(X[train], y[train], groups=writer[train])


local = LocalNetClassifier(n_rounds=10, random_state=0)
models = {
    "each writer alone": local.fit(X[train], y[train], groups=writer[train]),
    "one network (FedAvg)": net,
    "fine-tuned": personalize(fine_tune_steps=10),
    "label frequencies": personalize(label_prior="client"),
    "last layer": personalize(head=1.0),
    "label frequencies and last layer": personalize(label_prior="client", head=1.0),
}


def scores(model):
    """Accuracy on all test images and in the worst tenth of writers, and the log loss."""
    proba = model.predict_proba(X[test], groups=writer[test])
    correct = model.classes_[proba.argmax(axis=1)] == y[test]
    by_writer = pd.Series(correct).groupby(writer[test]).mean()
    return {
        "accuracy": correct.mean(),
        "10th percentile of writers": by_writer.quantile(0.1),
        "log loss": log_loss(y[test], np.clip(proba, 1e-12, 1), labels=model.classes_),
    }


print(f"data: {SOURCE}")
print(pd.DataFrame({name: scores(model) for name, model in models.items()}).T.round(3).to_string())

# %%
# Writer by writer
# ----------------
# The plots compare the accuracy of the personal model and of the common network on each writer's
# test images. Above the line, the personal model is better.
for name in ("fine-tuned", "last layer"):
    display = ClientGainDisplay.from_estimator(
        models[name], X[test], y[test], groups=writer[test], scoring="accuracy"
    )
    display.ax_.set_title(f"{name} ({SOURCE})")
    plt.show()

# %%
# With the real handwriting, separate networks classify 28 % of the images correctly, the common
# network 57.5 %.
#
# - *Ten more steps* help writers for whom the common network is poor (at the left of the first
#   picture) and cost as much elsewhere. Accuracy does not change, the log loss gets worse, and 47
#   writers gain while 76 lose.
# - *Label frequencies* change almost nothing. Everybody writes the same characters, and 14 images
#   say little about their frequencies. If clients do differ in their labels, label frequencies
#   bring most of the gain: see the :ref:`example on labels
#   <sphx_glr_auto_examples_networks_plot_label_skew.py>`.
# - *A last layer per writer* gains two points and has the best log loss: 47 writers gain, 17 lose.
#   Most predictions stay the same, because a dozen images change the layer little.
#
# Half of the writers have 14 test images or fewer, so one more correct image moves a mark by .07 or
# more.

# %%
# Are 80 rounds enough?
# ---------------------
# No: the loss still falls. After 120 rounds, the common network has an accuracy of 60 %, and of
# 61 % with a last layer per writer.
display = ConvergenceDisplay.from_estimator(net, quantities=["loss"])
display.axes_[0].set_title(f"Training loss of each round's writers ({SOURCE})")
plt.show()
