"""FedAvg of pfl, Apple's simulator, and ours: the same net, clients, rounds and steps.

Prints "not installed" without pfl, which asks for an older dp-accounting than ours: give it an
environment of its own, with ``pip install --no-deps pfl multiprocess dill prv-accountant`` on top
of the extra "bench". It has neither Ditto nor pFedMe. PFLlib, which has both, is no package.
"""

import logging
import warnings

import numpy as np
import torch
from net_regimes import digits
from sklearn.model_selection import StratifiedShuffleSplit
from skorch import NeuralNetClassifier
from timing import compare, per_round
from torch import nn
from torch.nn import functional as F

from pfl_sklearn.neural_network import FedAvgClassifier

try:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
except ImportError:
    PyTorchModel = None

N_CLIENTS, N_SAMPLED, N_ROWS, BATCH, RATE = 20, 4, 60, 20, 0.1
STEPS = N_ROWS // BATCH  # one epoch
SEEDS, N_ROUNDS = (1, 2, 3, 4, 5), 60


class LeNet(nn.Sequential):
    """Two convolutions and three linear layers."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )

    def loss(self, X, y, eval=False):
        """Loss, in the words of pfl."""
        return F.cross_entropy(self(X), y)

    def metrics(self, X, y):
        """Nothing to report."""
        return {}


def rows(seed):
    """Images and labels of the clients, N_ROWS each, and test rows of everybody."""
    X, y = digits(return_X_y=True)
    split = StratifiedShuffleSplit(1, train_size=N_CLIENTS * N_ROWS, random_state=seed)
    train, test = next(split.split(X, y))
    train = np.random.default_rng(seed).permutation(train)
    return X[train], y[train], np.repeat(np.arange(N_CLIENTS), N_ROWS), X[test], y[test]


def net_of(seed):
    torch.manual_seed(seed)
    return LeNet()


def ours(seed):
    """Function of a number of rounds."""
    X, y, groups, *_ = rows(seed)

    def fit(n_rounds):
        net = NeuralNetClassifier(
            net_of(seed), criterion=nn.CrossEntropyLoss, lr=RATE, batch_size=BATCH
        )
        model = FedAvgClassifier(
            net,
            n_rounds=n_rounds,
            local_steps=STEPS,
            client_fraction=N_SAMPLED / N_CLIENTS,
            sampling="fixed",
            random_state=seed,
        )
        return model.fit(X, y, groups=groups)

    return fit


def theirs(seed):
    """Function of a number of rounds."""
    X, y, groups, *_ = rows(seed)
    X, y = torch.from_numpy(X), torch.from_numpy(y)
    data = {i: Dataset(raw_data=[X[groups == i], y[groups == i]]) for i in range(N_CLIENTS)}

    def fit(n_rounds):
        np.random.seed(seed)
        net = net_of(seed)
        clients = FederatedDataset(data.get, get_user_sampler("random", list(data)))
        model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
        params = NNAlgorithmParams(
            central_num_iterations=n_rounds,
            evaluation_frequency=n_rounds + 1,
            train_cohort_size=N_SAMPLED,
            val_cohort_size=None,
        )
        FederatedAveraging().run(
            params,
            SimulatedBackend(clients, clients),
            model,
            NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH
            ),
            NNEvalHyperParams(local_batch_size=None),
            send_metrics_to_platform=False,
        )
        return net

    return fit


def accuracies():
    """Line of both accuracies on test rows, over seeds."""
    found = []
    for seed in SEEDS:
        *_, X, y = rows(seed)
        net = theirs(seed)(N_ROUNDS)
        with torch.no_grad():
            right = (net(torch.from_numpy(X)).argmax(dim=1).numpy() == y).mean()
        model = ours(seed)(N_ROUNDS).for_client(0)
        found.append((right, (model.predict(X) == y).mean()))
    (their, our), (their_sd, our_sd) = np.mean(found, axis=0), np.std(found, axis=0)
    print(
        f"| FedAvg, {N_ROUNDS} rounds, digits: accuracies | {their:.3f} ± {their_sd:.3f} "
        f"| {our:.3f} ± {our_sd:.3f} | - | within 2 sd |",
        flush=True,
    )


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    name = f"FedAvg, a round of {N_SAMPLED} of {N_CLIENTS} clients x {STEPS} batches of {BATCH}"
    if PyTorchModel is None:
        print(f"| {name}, LeNet; pfl, CPU | not installed | | | |")
        return
    compare(f"{name}, LeNet; pfl, CPU", (theirs(0), 30), (ours(0), 30), ">= 1x", 7, per_round)
    accuracies()


if __name__ == "__main__":
    main()
