"""Rounds of nets against loops of PyTorch, and start-up, idle clients, two workers and memory.

All times of rounds are processor seconds of one round: those of a long run less those of a short
one, over the difference of their rounds. Peers draw their batches at random, gather them step by
step as ours do, and average what clients changed.
"""

import copy
import os
import warnings

import net_loops
import numpy as np
import torch
from joblib import parallel_config
from net_loops import RATE, divergence
from skorch import NeuralNetClassifier
from timing import SHORT, compare, cpu_seconds, peak_above_input, per_round, seconds
from torch import nn
from torch.nn import functional as F

from pfl_sklearn.neural_network import (
    AdaMixNetClassifier,
    AdaPeDClassifier,
    APFLClassifier,
    DittoClassifier,
    FedAvgClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    FedRepClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
    PPSGDNetClassifier,
    QuPeDClassifier,
)

STEPS = 10
PSI, PSI_RATE, PSI_MIN = 4.0, 0.05, 0.5  # of AdaPeD
PRINTED = {"global_loss": 0.0, "personal_start": "own"}  # AdaPeD of the paper


class Job:
    """Random images of equally many classes and rows for each client, and a net for them."""

    def __init__(self, make, shape, n_clients, n_rows, batch_size, n_sampled):
        rng = np.random.default_rng(0)
        self.make, self.batch_size, self.n_sampled = make, batch_size, n_sampled
        self.n_clients, self.n_rows = n_clients, n_rows
        self.X = rng.standard_normal((n_clients * n_rows, *shape), dtype=np.float32)
        self.y = rng.integers(0, 10, n_clients * n_rows)
        self.groups = np.repeat(np.arange(n_clients), n_rows)

    def fit(self, estimator, n_rounds, **params):
        """Estimator after some rounds of a fixed number of clients."""
        torch.manual_seed(0)
        recipe = NeuralNetClassifier(
            self.make, criterion=nn.CrossEntropyLoss, lr=RATE, batch_size=self.batch_size
        )
        fraction = self.n_sampled / self.n_clients
        params = {"sampling": "fixed", "client_fraction": fraction, "random_state": 0} | params
        model = estimator(recipe, n_rounds=n_rounds, local_steps=STEPS, **params)
        return model.fit(self.X, self.y, groups=self.groups)

    def ours(self, estimator, **params):
        """Function of a number of rounds."""
        return lambda n_rounds: self.fit(estimator, n_rounds, **params)

    def peer(self, client_steps, n_steps=STEPS, n_nets=0):
        """Function of a number of rounds, in which ``client_steps(net, own, batches)`` changes
        a copy of the global net and returns it, with what the client keeps.

        Several nets go as one module.
        """
        X, y = torch.from_numpy(self.X), torch.from_numpy(self.y)
        make = net_loops.several(self.make, n_nets) if n_nets else self.make

        def run(n_rounds):
            torch.manual_seed(0)
            net, rng, kept = make(), np.random.default_rng(0), {}
            for _ in range(n_rounds):
                changes = [torch.zeros_like(values) for values in net.parameters()]
                for i in rng.choice(self.n_clients, self.n_sampled, replace=False).tolist():
                    batches = self._batches(rng, X, y, i, n_steps)
                    trained, kept[i] = client_steps(net, kept.get(i), batches)
                    with torch.no_grad():
                        for change, new, old in zip(
                            changes, trained.parameters(), net.parameters(), strict=True
                        ):
                            change += new - old
                with torch.no_grad():
                    for values, change in zip(net.parameters(), changes, strict=True):
                        values += change / self.n_sampled
            return net

        return run

    def _batches(self, rng, X, y, i, n_steps):
        order = np.concatenate(
            [
                rng.permutation(self.n_rows)
                for _ in range(-(-n_steps * self.batch_size // self.n_rows))
            ]
        )
        for k in range(n_steps):
            rows = torch.from_numpy(
                i * self.n_rows + order[k * self.batch_size : (k + 1) * self.batch_size]
            )
            yield X[rows], y[rows]


# Peers --------------------------------------------------------------------------------------------


def with_optimizer(net, own, batches):
    """FedAvg as tutorials have it."""
    net = copy.deepcopy(net)
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=RATE), nn.CrossEntropyLoss()
    for X, y in batches:
        optimizer.zero_grad()
        criterion(net(X), y).backward()
        optimizer.step()
    return net, None


def adaped(net, personal, batches):
    """AdaPeD as its listing reads: three parts of a step, six forward passes, two optimizers."""
    shared = copy.deepcopy(net)
    personal = copy.deepcopy(net) if personal is None else personal
    first, second = (torch.optim.SGD(each.parameters(), lr=RATE) for each in (personal, shared))
    psi = PSI
    for X, y in batches:
        first.zero_grad()
        outputs = personal(X)
        with torch.no_grad():
            others = shared(X)
        (F.cross_entropy(outputs, y) + divergence(others, outputs) / (2 * psi)).backward()
        first.step()
        second.zero_grad()
        with torch.no_grad():
            outputs = personal(X)
        (divergence(shared(X), outputs) / (2 * psi)).backward()
        second.step()
        with torch.no_grad():
            gap = divergence(shared(X), personal(X)).item()
        psi = max(psi - PSI_RATE * (1 / (2 * psi) - gap / (2 * psi**2)), PSI_MIN)
    return shared, personal


# Nets ---------------------------------------------------------------------------------------------


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


# Lines of the table -------------------------------------------------------------------------------


def images(n_clients=50):
    return Job(lenet, (1, 28, 28), n_clients, 640, 64, 5)


def vectors(make, n_clients, n_sampled=None, n_rows=20):
    return Job(make, (784,), n_clients, n_rows, 10, n_sampled or n_clients)


def against_loops():
    few = "a round of 5 of 50 clients x 10 batches of 64, LeNet"
    many = "a round of 200 of 1,000 clients x 10 batches of 10, linear 784 x 10"
    some = "a round of 100 clients x 10 batches of 10, MLP 784-128-10"
    ours, loop = FedAvgClassifier, "modules with optimizers"
    against(images(), few, ours, ("bare torch", net_loops.fedavg), ">= 0.91x", 4, pairs=9)
    against(vectors(linear, 1000, 200), many, ours, (loop, with_optimizer), ">= 5x", 3)
    against(vectors(perceptron, 100), some, ours, (loop, with_optimizer), ">= 3x", 4)
    ours, loop = AdaPeDClassifier, "modules with optimizers, 6 forward passes a step"
    against(images(), few, ours, (loop, adaped), ">= 1.15x", 2, pairs=9, **PRINTED)
    against(vectors(linear, 1000, 200), many, ours, (loop, adaped), ">= 5x", 2, **PRINTED)


# Methods, the loops that they are compared with, and what these need to know.
FIELD = {
    "ditto": (DittoClassifier, {}),
    "pfedme": (PFedMeClassifier, {}),
    "per_fedavg": (PerFedAvgClassifier, {"n_steps": 2 * STEPS}),
    "quped": (QuPeDClassifier, {}),
    "fml": (FedMutualClassifier, {}),
    "apfl": (APFLClassifier, {}),
    "fedper": (FedPerClassifier, {}),
    "fedrep": (FedRepClassifier, {"n_steps": 2 * STEPS}),
    "ppsgd": (PPSGDNetClassifier, {}),
    "fedem": (FedEMClassifier, {"n_nets": 2}),
    "adamix": (AdaMixNetClassifier, {"n_nets": 2}),
}


def field_against_loops():
    """All clients are sampled, since some methods train nets of the others after the rounds."""
    name = "a round of 5 clients x 10 batches of 64, LeNet"
    for loop, (estimator, given) in FIELD.items():
        peer = "bare torch", getattr(net_loops, loop)
        against(images(5), name, estimator, peer, ">= 0.87x", 2, given=given)


def against(job, name, estimator, peer, target, n_rounds, pairs=5, given=None, **params):
    """Line of an estimator with parameters and a peer, its name and its client's steps.

    What the peer is `given` is how many batches, or nets, it takes.
    """
    compare(
        f"{estimator.__name__}, {name}; {peer[0]}, CPU",
        (job.peer(peer[1], **(given or {})), n_rounds),
        (job.ours(estimator, **params), 2 * n_rounds),
        target,
        pairs,
        per_round,
    )


def start_up():
    """Fit of one round in a process that never fitted, but has imported what torch needs.

    The first optimizer of a process has torch load its compiler, which takes longer than all else.
    """
    job = images()
    loading = cpu_seconds(lambda: torch.optim.SGD(lenet().parameters(), lr=RATE))
    first = cpu_seconds(lambda: job.fit(FedAvgClassifier, 1))
    name = "FedAvg, LeNet, CPU: torch's first optimizer; the first fit of one round after it"
    print(f"| {name} | {loading:.3g} | {first:.3g} | - | < 1 s |", flush=True)


def idle_clients():
    few, many = vectors(perceptron, 50, 5, 20), vectors(perceptron, 1000, 5, 20)
    for estimator in (FedAvgClassifier, AdaPeDClassifier):
        compare(
            f"{estimator.__name__}, a round of 5 of 50 clients; of 5 of 1,000, MLP 784-128-10",
            (few.ours(estimator), 200),
            (many.ours(estimator), 200),
            ">= 0.95x",
            clock=per_round,
        )


def workers():
    job = images()
    one, two = (job.ours(FedAvgClassifier, n_jobs=n) for n in (1, 2))

    def threads(n_rounds):
        with parallel_config("threading"):
            two(n_rounds)

    for name, fit in (("processes", two), ("threads", threads)):
        compare(
            f"FedAvg, LeNet, wall clock of a round: 1 worker; 2 {name}",
            (one, 6),
            (fit, 6),
            "-",
            pairs=3,
            clock=lambda side: per_round(side, seconds),
        )


def memory():
    """Peak of a fit with 1,000 clients, of which 5 take part."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return
    job = vectors(perceptron, 1000, 5, 20)
    p = sum(values.numel() for values in perceptron().parameters())
    peak = peak_above_input(lambda: job.fit(AdaPeDClassifier, SHORT))
    one = 1000 * p * 4 / 2**20
    print(
        f"| AdaPeD, 5 of 1,000 clients, MLP 784-128-10: peak above input; "
        f"one vector a client, MB | {one:.0f} | {peak:.0f} | {peak / one:.2f}x | - |",
        flush=True,
    )


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start_up()
    against_loops()
    field_against_loops()
    idle_clients()
    workers()
    memory()


if __name__ == "__main__":
    main()
