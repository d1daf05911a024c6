"""
Handwriting: nets for writers who gave a few characters each
============================================================

206 people wrote digits and letters. Each of them is a client with 2 to 35 images to train on, 14 in
the median, of 62 classes. That is far too little for a separate net. What can a writer's own rows
still add to a net trained by all of them?

The images are ``femnist_206writers.npz`` in the folder in ``PFL_SKLEARN_DATA``. Without it the
example distributes digits that ship with scikit-learn over artificial clients, and everything
printed and plotted says so.
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
    SOURCE = "MADE-UP WRITERS"
X, y, writer = table.data, table.target, table.groups
X = X.reshape(len(X), -1)
train, test = next(ClientShuffleSplit(1, test_size=0.5, random_state=0).split(X, y, writer))
sizes = np.bincount(writer[train])
print(f"data: {SOURCE}")
print(f"{len(sizes)} writers, {len(np.unique(y))} characters")
print(f"training images a writer: {sizes.min()} to {sizes.max()}, median {np.median(sizes):.0f}")

# %%
# One net for all, and what a writer adds
# ---------------------------------------
# The net has 64 hidden units. In each of 80 rounds a fifth of the writers takes ten steps from it.
# After the rounds every writer adapts it with its own rows: it takes ten more steps, weights the
# classes by its own label frequencies, or fits its own last layer, the mode of a posterior around
# the global one. All variants use the same net: with ``warm_start`` no round is left to run.
# Writers who train alone take a hundred steps.
net = FedAvgClassifier(n_rounds=80, client_fraction=0.2, warm_start=True, random_state=0)
net.fit(X[train], y[train], groups=writer[train])


def continued(**params):
    """The same global net, and what each writer does after the rounds."""
    return copy.deepcopy(net).set_params(**params).fit(X[train], y[train], groups=writer[train])


alone = LocalNetClassifier(n_rounds=10, random_state=0)
models = {
    "each writer alone": alone.fit(X[train], y[train], groups=writer[train]),
    "one net (FedAvg)": net,
    "fine-tuned": continued(fine_tune_steps=10),
    "label frequencies": continued(label_prior="client"),
    "own last layer": continued(head=1.0),
    "label frequencies, own last layer": continued(label_prior="client", head=1.0),
}


def scores(model):
    """Accuracy on all test images and for the writers served worst, and the log loss."""
    proba = model.predict_proba(X[test], groups=writer[test])
    right = model.classes_[proba.argmax(axis=1)] == y[test]
    by_writer = pd.Series(right).groupby(writer[test]).mean()
    return {
        "accuracy": right.mean(),
        "worst tenth of the writers": by_writer.quantile(0.1),
        "log loss": log_loss(y[test], np.clip(proba, 1e-12, 1), labels=model.classes_),
    }


print(f"data: {SOURCE}")
print(pd.DataFrame({name: scores(model) for name, model in models.items()}).T.round(3).to_string())

# %%
# Writer by writer
# ----------------
# The plots show the accuracy for each writer's test images, with the writer's own model and with
# the common net. Above the line the own model is better.
for name in ("fine-tuned", "own last layer"):
    display = ClientGainDisplay.from_estimator(
        models[name], X[test], y[test], groups=writer[test], scoring="accuracy"
    )
    display.ax_.set_title(f"{name} ({SOURCE})")
    plt.show()

# %%
# With the real handwriting, separate nets have 28 % of the images right, the common net 57.5 %.
#
# - *Ten more steps* help writers for whom the common net is bad, at the left of the first picture,
#   and cost as much elsewhere. Accuracy does not change, the log loss gets worse, and 47 writers
#   gain while 76 lose.
# - *Label frequencies* change almost nothing. Everybody writes the same characters, and 14 images
#   say little about their frequencies. Where clients do differ in their labels, label frequencies
#   bring most of the gain: see the :ref:`example on labels
#   <sphx_glr_auto_examples_plot_label_skew.py>`.
# - *A last layer per writer* gains two points and has the best log loss: 47 writers gain, 17 lose.
#   Most predictions do not change, because a dozen images move it little.
#
# Half of the writers have 14 test images or fewer; for these, one more correct image moves a mark
# by .07.

# %%
# Are 80 rounds enough?
# ---------------------
# No: the loss still falls. With 120 rounds the common net has 60 % of the images right, and 61 %
# with a last layer per writer.
display = ConvergenceDisplay.from_estimator(net, quantities=["loss"])
display.axes_[0].set_title(f"Training images of a round's writers ({SOURCE})")
plt.show()
