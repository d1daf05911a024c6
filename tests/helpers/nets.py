"""Modules, recipes and tables for neural estimators, and the batches that their rounds draw."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from torch import nn
from torch.nn import functional as F

from pfl_sklearn._rounds.loop import Sampling, late_generator, round_generators
from pfl_sklearn._rounds.rows import CatchingUp, ClientRows, Reshuffled
from pfl_sklearn.neural_network import (
    MLP,
    AdaMixNetClassifier,
    APFLClassifier,
    DittoClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    FedRepClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
    PPSGDNetClassifier,
    QuPeDClassifier,
    ScaffoldClassifier,
)

# Methods that others are compared with.
FIELD = [
    AdaMixNetClassifier,
    APFLClassifier,
    DittoClassifier,
    FedEMClassifier,
    FedMutualClassifier,
    FedPerClassifier,
    FedRepClassifier,
    PerFedAvgClassifier,
    PFedMeClassifier,
    PPSGDNetClassifier,
    QuPeDClassifier,
    ScaffoldClassifier,
]
SIZES = np.array([3, 9, 4, 9, 14, 3, 12, 5])  # rows of each client
N_INPUTS, N_CLASSES = 7, 3


class DoubleMLP(MLP):
    """The perceptron in double precision."""

    def __init__(self, n_inputs=N_INPUTS, n_outputs=N_CLASSES, hidden=5):
        super().__init__(n_inputs, n_outputs, hidden)
        self.double()


class Convolutions(nn.Module):
    """A small convolutional net for rows (1, 8, 8)."""

    def __init__(self, channels=2):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, channels, 3, stride=2), nn.Linear(9 * channels, 3)

    def forward(self, X):
        return self.last(torch.relu(self.first(X)).flatten(1))


class Dropped(nn.Module):
    """A net that draws random numbers while it is trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))

    def forward(self, X):
        return self.layers(X)


class Normed(nn.Module):
    """A net with running statistics."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, X):
        return self.layers(X)


class Embedded(nn.Module):
    """A net for rows of two whole numbers from 0 to 9."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(10, 4), nn.Linear(8, 3)

    def forward(self, X):
        return self.last(self.embedding(X).flatten(1))


class Probabilities(nn.Module):
    """A net whose outputs are probabilities."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Softmax(-1))

    def forward(self, X):
        return self.layers(X)


class Logit(nn.Module):
    """A net with one output for each row, without an axis of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, X):
        return self.layers(X).squeeze(-1)


def recipe(module=DoubleMLP, **params):
    """Recipe of a classifier: batches of four rows, and steps of 0.1."""
    given = {"criterion": nn.CrossEntropyLoss, "lr": 0.1, "batch_size": 4, **params}
    return NeuralNetClassifier(module, **given)


def net_of(**params):
    """Recipe of a perceptron in single precision."""
    return recipe(MLP, module__hidden=5, **params)


def table(shape=(N_INPUTS,), sizes=SIZES, seed=0):
    """Rows X (n, *shape), three classes y, and the client of each row."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    X = rng.normal(size=(len(groups), *shape))
    flat = X.reshape(len(X), -1)
    scores = flat[:, :N_CLASSES] + rng.normal(size=(len(sizes), N_CLASSES))[groups]
    y = scores.argmax(axis=1)
    y[:N_CLASSES] = np.arange(N_CLASSES)  # every class occurs
    return X, y, groups


def refused(model, match, X=None, y=None, groups=None, error=ValueError):
    """The fit of our table, or of other rows, fails, and the estimator is as it was."""
    pairs = zip((X, y, groups), table(), strict=True)
    X, y, groups = (old if new is None else new for new, old in pairs)
    before = dict(vars(model))
    with pytest.raises(error, match=match):
        model.fit(X, y, groups=groups)
    assert vars(model) == before


def batches_of_rounds(
    n_rounds, seed, local_steps, rate=1.0, sizes=SIZES, batch_size=4, n_passes=0, dropped=0.0
):
    """The clients of each round, and the numbers (steps, b) of their rows.

    A share of the sampled ones is `dropped`, by draws that come right after those of the sample.
    """
    rows = _numbered(sizes, batch_size, local_steps, n_passes)
    state = rows.schedule.start(rows, len(sizes))
    generators = round_generators((seed, 1))
    for t in range(n_rounds):
        rng = next(generators)
        sampled = Sampling(rate).draw(rng, len(sizes))
        if dropped:
            sampled = sampled[rng.random(len(sampled)) >= dropped]
        yield _by_client(rows, sampled, state, t, rng)


def batches_of_last_phase(n_rounds, seed, n_steps, sizes=SIZES, batch_size=4):
    """All clients, and the numbers (n_steps, b) of their rows after the rounds."""
    rows = _numbered(sizes, batch_size, n_steps)
    rng = late_generator((seed, 1), n_rounds, 1 << 101)
    state = rows.schedule.start(rows, len(sizes))
    return _by_client(rows, np.arange(len(sizes)), state, n_rounds, rng)


def batches_with_missed_rounds(n_rounds, seed, local_steps, rate, most, since=-1):
    """Who takes part in each round, and the rows (local_steps, 4) of a (round, client).

    Also of rounds that clients miss, of which the latest `most` before their next one count.
    """
    rows = _numbered(SIZES, 4, local_steps)
    schedule = CatchingUp(rows.schedule, most, since=since)
    taken, rows_of = [], {}
    state, generators = schedule.start(rows, len(SIZES)), round_generators((seed, 1))
    for t in range(n_rounds):
        rng = next(generators)
        taken.append(Sampling(rate).draw(rng, len(SIZES)))
        found = _by_client(rows.with_schedule(schedule), taken[-1], state, t, rng)
        rows_of |= _by_round(found, local_steps, t + 1)
    after, rng = replace(schedule, now=False), late_generator((seed, 1), n_rounds, 1 << 101)
    everyone = np.arange(len(SIZES))
    found = _by_client(rows.with_schedule(after), everyone, state, n_rounds, rng)
    rows_of |= _by_round(found, local_steps, n_rounds)
    return [sampled.tolist() for sampled in taken], rows_of


def _by_round(found, local_steps, end):
    """Rows of each (round, client), from those of clients up to the round before `end`."""
    rows_of = {}
    for i, numbers in found:
        parts = numbers.reshape(-1, local_steps, numbers.shape[1])
        rows_of |= {(end - len(parts) + k, i): part for k, part in enumerate(parts)}
    return rows_of


def _numbered(sizes, batch_size, n_batches, n_passes=0):
    numbers = np.arange(np.sum(sizes))
    offsets = np.cumsum([0, *sizes])
    schedule = Reshuffled(batch_size, n_batches, n_passes)
    return ClientRows(numbers, numbers, offsets, np.arange(len(sizes)), schedule)


def _by_client(rows, sampled, state, t, rng):
    found = {}
    for members, numbers in rows.schedule.draw(rows, sampled, state, t, rng):
        found |= dict(zip(sampled[members].tolist(), numbers, strict=True))
    return sorted(found.items())


def descend(optimizer, loss, clip=None):
    """One step of an optimizer on a loss, along a gradient that torch clips to (bound, order)."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        parameters = [values for group in optimizer.param_groups for values in group["params"]]
        nn.utils.clip_grad_norm_(parameters, clip[0], norm_type=clip[1])
    optimizer.step()


def gap_of(truth, other):
    """Mean over rows of the divergence from the probabilities `truth` to `other`, from logits."""
    logs = [F.log_softmax(outputs, dim=1) for outputs in (other, truth)]
    return F.kl_div(*logs, reduction="batchmean", log_target=True)


def trained(module, batches, X, y, kind=torch.optim.SGD, criterion=None, clip=None, **options):
    """Copy of a module after plain steps on the cross-entropy of batches of rows."""
    module = copy.deepcopy(module)
    optimizer, criterion = kind(module.parameters(), **options), criterion or nn.CrossEntropyLoss()
    for batch in batches:
        descend(optimizer, criterion(module(X[batch]), y[batch]), clip)
    return module


def weights(module):
    """Parameters of a module as one array."""
    with torch.no_grad():
        return nn.utils.parameters_to_vector(module.parameters()).numpy().copy()


def moved(module, vector):
    """Copy of a module with other parameters."""
    module = copy.deepcopy(module)
    nn.utils.vector_to_parameters(torch.from_numpy(vector), module.parameters())
    return module


def population_weights(model):
    """Parameters of the population's net as one array."""
    return weights(model._population_copy().net_.module_)


def personal_weights(model):
    """Parameters of the clients' nets as an array, clients first."""
    return np.array([weights(model.for_client(i).net_.module_) for i in model.clients_])
