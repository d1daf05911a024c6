"""
Private nets: what noise takes from one net, and what it leaves to personal ones
=================================================================================

With differential privacy the global net gets noise in every round, and with sixty clients the noise
is large. Clients train their personal nets on their own rows, which costs no privacy. AdaPeD keeps
these close to the global net only as far as that helps.
"""

# %%
# Clients
# -------
# Sixty clients have three of the ten digits each, and about fifteen rows to train on.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
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


def accuracy(model):
    model.fit(X[train], y[train], groups=who[train])
    return model.score(X[test], y[test], groups=who[test])


# %%
# Methods
# -------
# All methods have a linear net, whose features are pixels from 0 to 1: with noise the fit does not
# scale them by the data. In each of 20 rounds every client takes five steps. Messages are clipped
# to .5.
net = NeuralNetClassifier(
    MLP, module__hidden=(), criterion=nn.CrossEntropyLoss, lr=0.2, batch_size=10
)
rounds = {"n_rounds": 20, "local_steps": 5}
noise = {**rounds, "clip_norm": 0.5, "delta": 1e-3}
methods = {
    "one net (FedAvg)": FedAvgClassifier(net, **noise),
    "one net, fine-tuned by each client": FedAvgClassifier(net, fine_tune_steps=30, **noise),
    "AdaPeD": AdaPeDClassifier(net, **noise),
}

# %%
# Privacy against accuracy
# ------------------------
# Noise differs from fit to fit; these are means of two. The last ticks are without noise. Clients
# that train alone send nothing.
rows = [
    {"method": name, "epsilon": epsilon, "accuracy": accuracy(model.set_params(epsilon=epsilon))}
    for name, model in methods.items()
    for epsilon in (1.0, 2.0, 4.0, 8.0, np.inf)
    for _ in range(2)
]
alone = accuracy(LocalNetClassifier(net, **rounds))
rows.append({"method": "each client alone", "epsilon": 0.0, "accuracy": alone})
found = pd.DataFrame(rows).groupby(["method", "epsilon"], as_index=False).mean()
print(found.pivot(index="epsilon", columns="method", values="accuracy").round(3).to_string())

private = methods["AdaPeD"].set_params(epsilon=4.0)
report = private.fit(X[train], y[train], groups=who[train]).privacy_
PrivacyAccuracyDisplay.from_scores(
    found["epsilon"],
    found["accuracy"],
    lines=found["method"],
    score_name="accuracy, test rows",
    unit=report.unit,
    relation=report.relation,
    delta=report.delta,
)
plt.show()

# %%
# What is protected
# -----------------
# Each client's changes of the global net and of psi are clipped, and the sum over clients gets
# noise. A client's own net never leaves it.
print(report)

# %%
# Psi, the distance of personal nets from the global one, is released along with it.
ConvergenceDisplay.from_estimator(private, quantities=["psi", "epsilon"])
plt.show()
