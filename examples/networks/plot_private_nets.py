"""
Private neural networks: noise harms the global network, not the personal ones
==============================================================================

With differential privacy, the global network gets noise in every round, and with only sixty clients
the noise is large. Clients train their personal networks on their own rows, which costs no privacy.
AdaPeD keeps these close to the global network only as far as that helps.
"""

# %%
# Clients
# -------
# Each of sixty clients has three of the ten digits and about fifteen training rows.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.base import clone
from skorch import NeuralNetClassifier
from torch import nn

from pfl_sklearn import AdaPeDClassifier, FedAvgClassifier, LocalNetClassifier
from pfl_sklearn.datasets import load_digits_clients
from pfl_sklearn.inspection import ConvergenceDisplay, PrivacyAccuracyDisplay
from pfl_sklearn.model_selection import ClientShuffleSplit
from pfl_sklearn.neural_network import MLP

digits = load_digits_clients(60, classes_per_client=3)
X, y, who = digits.data, digits.target, digits.groups
train, test = next(ClientShuffleSplit(1, test_size=0.5, random_state=0).split(X, y, who))


def fit_and_score(model):
    """Accuracy on the test rows, and the fitted model."""
    model.fit(X[train], y[train], groups=who[train])
    return model.score(X[test], y[test], groups=who[test]), model


# %%
# Methods
# -------
# All methods use a linear network. Its features are pixels from 0 to 1, since a fit with noise does
# not scale them by the data. In each of 20 rounds, every client takes five steps. Messages are
# clipped to a norm of .5.
net = NeuralNetClassifier(
    MLP, module__hidden=(), criterion=nn.CrossEntropyLoss, lr=0.2, batch_size=10
)
rounds = {"n_rounds": 20, "local_steps": 5}
noise = {**rounds, "clip_norm": 0.5, "delta": 1e-3}
methods = {
    "one network (FedAvg)": FedAvgClassifier(net, **noise),
    "one network, fine-tuned by each client": FedAvgClassifier(net, fine_tune_steps=30, **noise),
    "AdaPeD": AdaPeDClassifier(net, **noise),
}

# %%
# Privacy against accuracy
# ------------------------
# The last ticks are without noise. Clients that train alone send nothing.
local, _ = fit_and_score(LocalNetClassifier(net, **rounds))
rows = [{"method": "each client alone", "epsilon": 0.0, "accuracy": local}]
for name, model in methods.items():
    for epsilon in (1.0, 2.0, 4.0, np.inf):
        accuracy, fitted = fit_and_score(clone(model).set_params(epsilon=epsilon))
        rows.append({"method": name, "epsilon": epsilon, "accuracy": accuracy})
        if name == "AdaPeD" and epsilon == 4.0:
            private = fitted
scores = pd.DataFrame(rows)
print(scores.pivot(index="epsilon", columns="method", values="accuracy").round(3).to_string())

report = private.privacy_
PrivacyAccuracyDisplay.from_scores(
    scores["epsilon"],
    scores["accuracy"],
    lines=scores["method"],
    score_name="accuracy, test rows",
    unit=report.unit,
    relation=report.relation,
    delta=report.delta,
)
plt.show()

# %%
# What is protected
# -----------------
# Each client's changes of the global network and of psi are clipped, and the sum over clients gets
# noise. A client's personal network never leaves the client.
print(report)

# %%
# Psi, which measures how far personal networks are from the global one, is released as well.
ConvergenceDisplay.from_estimator(private, quantities=["psi", "epsilon"])
plt.show()
