"""What compare_nets.py compares: clients, nets and methods, and what the paper found.

A method is one entry of ``METHODS`` or ``FIELD`` (with noise ``PRIVATE`` or ``PRIVATE_FIELD``), a
kind of clients one of ``REGIMES``.
"""

import copy
import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from skorch.callbacks import LRScheduler
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from pfl_sklearn import AdaPeDClassifier, FedAvgClassifier, LocalNetClassifier
from pfl_sklearn.datasets import (
    fetch_cifar10,
    fetch_femnist,
    fetch_mnist,
    make_dirichlet_clients,
    make_label_skew_clients,
)
from pfl_sklearn.neural_network import (
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
)
from pfl_sklearn.priors import DirichletPrior
from pfl_sklearn.privacy import rdp_to_dp

MOST_TEST_ROWS, TEST_SHARE = 100, 0.3  # of a client
LOCAL_STEPS, WEIGHT_DECAY, DECAY = 10, 1e-4, 0.99  # the decay is that of an epoch
DELTA = 1e-5
CLIP_NORMS = (0.3, 1.0, 3.0)


# The net ------------------------------------------------------------------------------------------


class LeNet(nn.Module):
    """Two convolutions 5 x 5 of 6 and 16 filters, and layers of 120 and 84 units.

    Pixels in [0, 1] are brought to standard units of MNIST or, with colors, CIFAR-10 by constants.
    """

    def __init__(self, n_channels, side, n_classes):
        super().__init__()
        self.center, self.scale = (0.13, 0.31) if n_channels == 1 else (0.47, 0.25)
        left = ((side - 4) // 2 - 4) // 2
        self.layers = nn.Sequential(
            *(nn.Conv2d(n_channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * left**2, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, n_classes)),
        )

    def forward(self, X):
        """Logits (n, n_classes) of images (n, n_channels, side, side)."""
        return self.layers((X - self.center) / self.scale)


class Perceptron(nn.Sequential):
    """One hidden layer of 100 rectified units, for pixels as they are."""

    def __init__(self, n_channels, side, n_classes):
        super().__init__(
            nn.Flatten(),
            nn.Linear(n_channels * side**2, 100),
            nn.ReLU(),
            nn.Linear(100, n_classes),
        )


def recipe(X, y, regime):
    """Net for images X and labels y, with the paper's decay of weights and learning rate."""
    decay = DECAY ** (regime.local_steps / regime.steps_of_epoch)
    return NeuralNetClassifier(
        regime.net,
        module__n_channels=X.shape[1],
        module__side=X.shape[2],
        module__n_classes=len(np.unique(y)),
        criterion=nn.CrossEntropyLoss,
        lr=regime.learning_rate,
        batch_size=regime.batch_size,
        optimizer__weight_decay=WEIGHT_DECAY,
        callbacks=[LRScheduler(ExponentialLR, gamma=decay)],
    )


# Clients ------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Images (n, channels, side, side), labels (n,) and clients (n,)."""

    X: np.ndarray
    y: np.ndarray
    groups: np.ndarray

    def take(self, rows):
        """Some of the rows."""
        return Rows(*(values[rows] for values in self))


class Regime(NamedTuple):
    """Clients, and how they are trained.

    Their title; ``clients(n_rows, seed)`` with so many rows each, or all there are for None; how
    many of them are training rows, None for all but the test rows; rounds; the share of clients in
    a round, their steps, the rows of a step, and the first learning rate, which falls by a
    hundredth in every epoch of so many steps. Where this is a setting of the paper: the accuracies
    in percent that it reports, with their standard deviations, and how its setting differs. With an
    epsilon as the paper would print it, methods get the noise for it. Some have the whole field of
    methods.

    With `settings` by method nothing is tuned: these methods, with these parameters, are scored
    after each of `n_looks` equal parts of the rounds. Those that are not named in `one_seed` have
    several seeds.
    """

    title: str
    clients: Any
    n_train: int | None
    n_rounds: int
    client_fraction: float = 0.1
    local_steps: int = LOCAL_STEPS
    batch_size: int = 10
    learning_rate: float = 0.1
    steps_of_epoch: float = 60
    net: type = LeNet
    paper: dict[str, tuple[float, float]] | None = None
    differs: str = ""
    printed_epsilon: float | None = None
    whole_field: bool = False
    settings: dict[str, dict] | None = None
    one_seed: tuple[str, ...] = ()
    n_looks: int = 1

    @property
    def steps(self):
        """Mean gradient steps of a client in all rounds."""
        return self.n_rounds * self.client_fraction * self.local_steps

    @property
    def methods(self):
        """Methods by name."""
        few, others = (METHODS, FIELD) if self.printed_epsilon is None else (PRIVATE, PRIVATE_FIELD)
        if self.settings is None:
            return few | others if self.whole_field else few
        return {name: (few | others)[name] for name in self.settings}

    def rows(self, seed):
        """Training and test rows."""
        n_rows = None if self.n_train is None else self.n_train + MOST_TEST_ROWS
        found = self.clients(n_rows, seed)
        train, test = divided(found.groups, self.n_train, seed)
        return found.take(train), found.take(test)


def divided(groups, n_train, seed):
    """Training and test rows of every client, at random."""
    rng, train, test = np.random.default_rng([seed, 1]), [], []
    for client in np.unique(groups):
        own = rng.permutation(np.flatnonzero(groups == client))
        n_test = int(TEST_SHARE * len(own)) if n_train is None else len(own) - n_train
        n_test = min(n_test, MOST_TEST_ROWS)
        test.append(own[:n_test])
        train.append(own[n_test:][:n_train])
    return np.concatenate(train), np.concatenate(test)


@lru_cache(maxsize=1)
def table(fetch):
    """Images and labels of a source, read once."""
    return fetch(return_X_y=True)


def digits(return_X_y):
    """Digits of scikit-learn, which need no file, enlarged to the size of MNIST's."""
    X, y = load_digits(return_X_y=return_X_y)
    large = np.kron(X.reshape(-1, 1, 8, 8) / 16, np.ones((3, 3)))
    return np.pad(large, ((0, 0), (0, 0), (2, 2), (2, 2))).astype(np.float32), y


def some_classes(fetch, n_clients, n_classes, n_rows, seed):
    """Clients with some of the classes, equally often."""
    return Rows(*_dealt(make_label_skew_clients, fetch, n_clients, n_classes, n_rows, seed))


def unequal_classes(fetch, n_clients, concentration, n_rows, seed):
    """Clients with class shares from a Dirichlet."""
    return Rows(*_dealt(make_dirichlet_clients, fetch, n_clients, concentration, n_rows, seed))


def _dealt(deal, fetch, n_clients, skew, n_rows, seed):
    found = deal(*table(fetch), n_clients, skew, n_samples=n_rows, random_state=seed)
    return found.data, found.target, found.groups


def centred_pixels(n_rows, seed):
    """Clients with few classes of MNIST, and pixels from -1 to 1."""
    found = unequal_classes(fetch_mnist, 20, 0.1, n_rows, seed)
    return found._replace(X=2 * found.X - 1)


def distorted(n_rows, seed):
    """Clients with all digits of MNIST, each of whom turns, fades or inverts the images."""
    found = some_classes(fetch_mnist, 50, 10, n_rows, seed)
    rng, X = np.random.default_rng([seed, 2]), np.empty_like(found.X)
    for client in np.unique(found.groups):
        own = np.flatnonzero(found.groups == client)
        images = np.rot90(found.X[own], rng.integers(4), axes=(2, 3)) * rng.uniform(0.3, 1)
        X[own] = 1 - images if rng.random() < 0.5 else images
    return found._replace(X=X)


def groups_of_meaning(n_rows, seed):
    """Clients with all digits of MNIST, half of whom name them in reverse order."""
    found = some_classes(fetch_mnist, 50, 10, n_rows, seed)
    return found._replace(y=np.where(found.groups % 2 == 0, found.y, 9 - found.y))


def writers(together, n_rows, seed, digits_alone=False):
    """Clients with all rows of so many of the 198 FEMNIST writers who have most."""
    X, y, writer = table(fetch_femnist)
    if digits_alone:
        X, y, writer = (values[y < 10] for values in (X, y, writer))
    most = np.argsort(-np.bincount(writer), kind="stable")[:198]
    client = np.full(writer.max() + 1, -1)
    # The last client may have a few writers more.
    shares = np.minimum(np.arange(198) // together, 198 // together - 1)
    client[np.random.default_rng([seed, 3]).permutation(most)] = shares
    rows = Rows(X, y, client[writer])
    return rows.take(np.flatnonzero(rows.groups >= 0))


def _regimes(title, clients, sizes, n_rounds, **settings):
    """Regimes that differ in training rows only."""
    for size in sizes:
        each = "all rows" if size is None else f"{size} rows"
        # Where clients have all rows a step has 20, as in the paper.
        batch = 20 if size is None else 10
        yield Regime(f"{title}, {each} each", clients, size, n_rounds, batch_size=batch, **settings)


def _named(name, regimes):
    return {f"{name}-{each.n_train or 'all'}": each for each in regimes}


_THREE, _FOUR = (
    partial(some_classes, fetch_mnist, 50, 3),
    partial(some_classes, fetch_cifar10, 30, 4),
)
_SKEWED = partial(unequal_classes, fetch_mnist, 50, 0.3)
_SIZES, _FEWER = (20, 60, None), (20, None)
REGIMES = {
    **_named("mnist", _regimes("MNIST, 50 clients with 3 classes", _THREE, _SIZES, 150)),
    **_named("cifar", _regimes("CIFAR-10, 30 clients with 4 classes", _FOUR, (60, None), 150)),
    **_named(
        "femnist",
        _regimes("FEMNIST, 66 clients of 3 writers", partial(writers, 3), _FEWER, 150),
    ),
    **_named(
        "distorted",
        _regimes("MNIST, 50 clients with images of their own", distorted, (20,), 150),
    ),
    **_named(
        "groups",
        _regimes(
            "MNIST, 50 clients, half of whom reverse the digits", groups_of_meaning, (20,), 150
        ),
    ),
    **_named(
        "dirichlet", _regimes("MNIST, 50 clients with Dirichlet(0.3) labels", _SKEWED, _FEWER, 150)
    ),
}
_PAPER = {
    "mnist-all": (
        {
            "FedAvg": (92.93, 0.09),
            "FedAvg, fine-tuned": (95.42, 0.25),
            "AdaPeD, as printed": (98.53, 0.11),
            "pFedMe": (97.83, 0.04),
            "Per-FedAvg": (95.88, 0.27),
            "QuPeD": (98.14, 0.39),
            "FML": (97.93, 0.33),
        },
        "300 rounds rather than 150",
    ),
    "cifar-all": (
        {
            "FedAvg": (53.92, 0.94),
            "FedAvg, fine-tuned": (67.44, 1.11),
            "AdaPeD, as printed": (73.86, 0.39),
            "pFedMe": (71.97, 0.09),
            "Per-FedAvg": (64.09, 0.46),
            "QuPeD": (73.21, 0.44),
            "FML": (72.53, 0.36),
        },
        "all 60,000 images rather than 10,000, a fifth of the clients in a round, and 1,000 rounds "
        "or more",
    ),
    "femnist-all": (
        {
            "FedAvg": (92.18, 0.13),
            "FedAvg, fine-tuned": (94.12, 0.26),
            "AdaPeD, as printed": (96.55, 0.32),
            "pFedMe": (94.95, 0.55),
            "Per-FedAvg": (93.51, 0.31),
            "QuPeD": (95.99, 0.08),
            "FML": (95.12, 0.18),
        },
        "10 outputs rather than 62 classes, 203 to 336 training rows a client, 15 % of the clients "
        "in a round, and 480 rounds",
    ),
}
for _name, (_figures, _differs) in _PAPER.items():
    REGIMES[_name] = REGIMES[_name]._replace(paper=_figures, differs=_differs)
_COMMON = {
    "Local": {},
    "FedAvg": {},
    "FedAvg, fine-tuned": {"fine_tune_steps": 60},
    "AdaPeD, as printed": {"psi_init": 4.0, "psi_min": 0.5, "psi_learning_rate": 0.03},
    "pFedMe": {"proximal": 0.5, "local_learning_rate": 0.2},
    "Per-FedAvg": {"estimator__lr": 1e-3, "meta_learning_rate": 0.075},
    "QuPeD": {"distillation": 0.25},
    "FML": {"personal_loss": 0.25, "global_loss": 0.25},
    "AdaPeD, global start": {"psi_min": None},
    "FedAvg, sparse labels": {},
    "FedAvg, heads, sparse labels": {"head": "bayes"},
    "AdaPeD, global start, sparse labels": {"psi_min": None},
}
_FURTHER = {
    "FedProx": {"proximal": 0.1},
    "FedAvg, heads": {"head": "bayes"},
    "FedAvg, Dirichlet labels": {},
    "FedAvg, fine-tuned, sparse labels": {"fine_tune_steps": 60},
    "Ditto": {"proximal": 1.0},
    "FedEM": {"estimator__lr": 0.2},
    "AdaMix": {"proximal": 1.0},
    "PPSGD": {},
    "FedRep": {},
    "FedPer": {},
    "APFL": {"mixing": 0.5},
}
# The paper's settings for few clients, all of whom or a fifth take part for an epoch or two.
_FEW_CLIENTS = {
    **_COMMON,
    "FedAvg, fine-tuned": {"fine_tune_steps": 40},
    "pFedMe": {"proximal": 0.1, "local_learning_rate": 0.1},
    "Per-FedAvg": {"estimator__lr": 1e-4, "meta_learning_rate": 0.1},
}
_DIGITS = "10 digits of 55 rows a client on average, of which 39 are trained on, 10 in a step"


def _published(fedavg, tuned, adaped, pfedme, perfedavg, quped, fml):
    """Accuracies in percent and their standard deviations, in the order of the paper's tables."""
    names = "FedAvg", "FedAvg, fine-tuned", "AdaPeD, as printed", "pFedMe", "Per-FedAvg", "QuPeD"
    return dict(
        zip((*names, "FML"), (fedavg, tuned, adaped, pfedme, perfedavg, quped, fml), strict=True)
    )


def _digits_of_writers(together):
    return partial(writers, together, digits_alone=True)


# As in AdaPeD's paper, with its numbers of steps.
REGIMES |= {
    "paper-mnist": Regime(
        "MNIST, 50 clients with 3 classes",
        _THREE,
        None,
        300,
        batch_size=20,
        paper=_published(
            (92.93, 0.09),
            (95.42, 0.25),
            (98.53, 0.11),
            (97.83, 0.04),
            (95.88, 0.27),
            (98.14, 0.39),
            (97.93, 0.33),
        ),
        differs="the same numbers of clients, rounds and steps",
        whole_field=True,
        settings=_COMMON | _FURTHER,
        one_seed=tuple(_FURTHER),
        n_looks=6,
    ),
    "paper-femnist-66": Regime(
        "FEMNIST, digits, 66 clients of 3 writers",
        _digits_of_writers(3),
        None,
        480,
        client_fraction=0.15,
        paper=_published(
            (92.18, 0.13),
            (94.12, 0.26),
            (96.55, 0.32),
            (94.95, 0.55),
            (93.51, 0.31),
            (95.99, 0.08),
            (95.12, 0.18),
        ),
        differs=f"more rows: 203 to 336 training rows a client; here these are {_DIGITS}",
        whole_field=True,
        settings=_COMMON,
        one_seed=tuple(_COMMON),
        n_looks=6,
    ),
    "paper-femnist-30": Regime(
        "FEMNIST, digits, 30 clients of 6 writers or more, everybody in every round",
        _digits_of_writers(6),
        None,
        30,
        client_fraction=1.0,
        local_steps=40,
        steps_of_epoch=40,
        paper=_published(
            (95.91, 0.78),
            (96.22, 0.57),
            (98.10, 0.09),
            (96.03, 0.50),
            (96.71, 0.14),
            (97.72, 0.16),
            (96.80, 0.13),
        ),
        differs="more rows, and does not say whether an epoch of 40 steps is one round, as here",
        whole_field=True,
        settings=_FEW_CLIENTS
        | {
            "AdaPeD, as printed": {"psi_init": 3.0, "psi_min": 1.0, "psi_learning_rate": 0.03},
        },
        one_seed=tuple(_COMMON),
        n_looks=6,
    ),
    "paper-cifar": Regime(
        "CIFAR-10, 30 clients with 4 classes",
        _FOUR,
        None,
        125,
        client_fraction=0.2,
        local_steps=80,
        learning_rate=0.075,
        steps_of_epoch=40,
        paper=_published(
            (53.92, 0.94),
            (67.44, 1.11),
            (73.86, 0.39),
            (71.97, 0.09),
            (64.09, 0.46),
            (73.21, 0.44),
            (72.53, 0.36),
        ),
        differs="all 60,000 images rather than 10,000, so six times as many rows in a step",
        whole_field=True,
        settings=_FEW_CLIENTS
        | {
            "AdaPeD, as printed": {"psi_init": 4.0, "psi_min": 1.0, "psi_learning_rate": 0.03},
        },
        one_seed=tuple(_COMMON),
        n_looks=5,
    ),
}
REGIMES["paper-femnist-66-third"] = REGIMES["paper-femnist-66"]._replace(
    title="FEMNIST, digits, 66 clients of 3 writers, a third of them in every round",
    n_rounds=240,
    client_fraction=1 / 3,
    paper=_published(
        (93.14, 0.15),
        (93.81, 0.30),
        (96.88, 0.29),
        (94.03, 0.61),
        (93.28, 0.41),
        (96.11, 0.13),
        (94.83, 0.59),
    ),
)
# A plain net at a constant learning rate, where all clients take part in every round. Settings are
# the defaults of AdaPeD, FML and Ditto; others are as good as any that were tried.
_LEVEL = {name: _COMMON[name] for name in _COMMON if "sparse" not in name} | {
    "FedAvg, fine-tuned": {"fine_tune_steps": 20},
    "Per-FedAvg": {"estimator__lr": 0.01, "meta_learning_rate": 0.05, "adapt_steps": 20},
    "FML": {"personal_loss": 0.75, "global_loss": 0.75},
    "Ditto": {"proximal": 0.2},
}
for _n_rounds in (30, 100):
    REGIMES[f"dirichlet-{20 * _n_rounds}"] = Regime(
        "MNIST, 20 clients with Dirichlet(0.1) labels, 200 rows each",
        centred_pixels,
        200,
        _n_rounds,
        client_fraction=1.0,
        local_steps=20,
        learning_rate=0.05,
        steps_of_epoch=math.inf,
        net=Perceptron,
        whole_field=True,
        settings=_LEVEL,
        n_looks=5,
    )
for _epsilon, _fedavg, _adaped in (
    (3.35, (11.73, 0.85), (93.32, 1.18)),
    (13.16, (29.91, 1.28), (98.51, 0.90)),
    (27.3, (55.79, 0.29), (99.01, 0.65)),
):
    REGIMES[f"private-{_epsilon}"] = Regime(
        "MNIST, 50 clients with 3 classes, all rows each, "
        f"noise for the paper's epsilon of {_epsilon}",
        _THREE,
        None,
        20,
        client_fraction=1.0,
        batch_size=20,
        paper={"DP-FedAvg": _fedavg, "DP-AdaPeD": _adaped},
        differs="300 rounds, noise in every local step, and delta not stated",
        printed_epsilon=_epsilon,
    )
_WHOLE_FIELD = (
    "mnist-20",
    "groups-20",
    "mnist-60",
    "mnist-all",
    "distorted-20",
    "private-13.16",
    "femnist-all",
    "cifar-all",
)
for _name in _WHOLE_FIELD:
    REGIMES[_name] = REGIMES[_name]._replace(whole_field=True)


# Methods ------------------------------------------------------------------------------------------


class PersonalOrLocal(BaseEstimator):
    """A personal or a local net for every client, whichever has more of its validation rows right.

    Parameters
    ----------
    personal, local : estimators
    validation : float
        Share of a client's rows that are kept for the choice.
    random_state : int
    """

    def __init__(self, personal, local, validation=0.25, random_state=0):
        self.personal = personal
        self.local = local
        self.validation = validation
        self.random_state = random_state

    def fit(self, X, y, groups):
        """Fit both to the remaining rows, let the clients choose."""
        rng = np.random.default_rng([self.random_state, 4])
        held = rng.random(len(y)) < self.validation
        held[np.unique(groups, return_index=True)[1]] = False  # every client has to train on a row
        self.fitted_ = [copy.deepcopy(each) for each in (self.personal, self.local)]
        right = []
        for model in self.fitted_:
            model.fit(X[~held], y[~held], groups=groups[~held])
            right.append(model.predict(X[held], groups=groups[held]) == y[held])
        self.classes_, self.clients_ = self.fitted_[0].classes_, np.unique(groups)
        self.privacy_ = self.fitted_[0].privacy_
        lead = (right[1].astype(int) - right[0])[:, None] * (groups[held][:, None] == self.clients_)
        self.alone_ = lead.sum(axis=0) > 0
        return self

    def predict_proba(self, X, groups):
        """Probabilities of the classes by the nets that the clients chose."""
        alone = self.alone_[np.searchsorted(self.clients_, groups)][:, None]
        personal, local = (model.predict_proba(X, groups=groups) for model in self.fitted_)
        return np.where(alone, local, personal)


def _adaped_or_local(net, random_state, **common):
    models = (
        kind(net, random_state=random_state, **common)
        for kind in (AdaPeDClassifier, LocalNetClassifier)
    )
    return PersonalOrLocal(*models, random_state=random_state)


_RATES = {"estimator__lr": (0.05, 0.1, 0.2)}
_TUNED = {"estimator__lr": (0.05, 0.1), "fine_tune_steps": (20, 60)}
_HEADS = {"estimator__lr": (0.05, 0.1), "head": (1.0, 100.0, 1e4)}
_ADAPED = {"estimator__lr": (0.05, 0.1)}
_PRINTED = {"global_loss": 0.0, "personal_start": "own", "psi_min": 0.5}
_FROM_GLOBAL = {"global_loss": 1.0, "personal_start": "global", "psi_min": 0.5}
_SPARSE = {"label_prior": "client"}


def _reading(after=(), grid=_RATES, cost=0.1, **fixed):
    """A method that starts where the rounds of FedAvg end, which fits may therefore share."""
    common = {"estimator": FedAvgClassifier, "fixed": fixed, "grid": grid, "cost": cost}
    return {**common, "rounds": "FedAvg", "after": after}


# The estimator, parameters that are the same in all fits, the grid of those that are tuned, and how
# many fits of FedAvg one fit is worth, for the estimate of the time. "tuned_as" names the method
# whose setting one without a grid takes. Methods with the same "rounds" differ only by what comes
# after them: their fixed parameters, and those of the grid in "after".
METHODS = {
    "Local": {
        "estimator": LocalNetClassifier,
        "fixed": {},
        "grid": _RATES,
        "cost": 1.0,
    },
    "FedAvg": _reading(cost=1.0),
    "FedProx": {
        "estimator": FedAvgClassifier,
        "fixed": {},
        "grid": {"estimator__lr": (0.05, 0.1), "proximal": (0.1, 1.0)},
        "cost": 1.1,
    },
    "FedAvg, fine-tuned": _reading(("fine_tune_steps",), _TUNED, cost=0.4),
    "FedAvg, heads": _reading(("head",), _HEADS, cost=0.3),
    "AdaPeD, as printed": {
        "estimator": AdaPeDClassifier,
        "fixed": _PRINTED,
        "grid": {**_ADAPED, "psi_init": (1.0, 4.0)},
        "cost": 2.3,
    },
    "AdaPeD, global start": {
        "estimator": AdaPeDClassifier,
        "fixed": _FROM_GLOBAL,
        "grid": _ADAPED,
        "cost": 2.3,
    },
    "FedAvg, Dirichlet labels": _reading(label_prior=DirichletPrior()),
    "FedAvg, sparse labels": _reading(**_SPARSE),
    "FedAvg, fine-tuned, sparse labels": _reading(
        ("fine_tune_steps",), _TUNED, cost=0.4, **_SPARSE
    ),
    "FedAvg, heads, sparse labels": _reading(("head",), _HEADS, cost=0.3, **_SPARSE),
    "AdaPeD, global start, sparse labels": {
        "estimator": AdaPeDClassifier,
        "fixed": {**_FROM_GLOBAL, **_SPARSE},
        "tuned_as": "AdaPeD, global start",
        "cost": 2.3,
    },
}


def _method(estimator, grid, cost, **fixed):
    return {"estimator": estimator, "fixed": fixed, "grid": grid, "cost": cost}


_PULLS = [
    {"proximal": (0.5,), "local_learning_rate": (0.2,)},  # the settings of AdaPeD's paper
    {
        "proximal": (15.0,),
        "local_learning_rate": (0.005,),
        "estimator__lr": (0.05,),
    },  # the authors'
]
FIELD = {
    "Ditto": _method(DittoClassifier, {"proximal": (0.1, 1.0)}, 2.0),
    "pFedMe": _method(PFedMeClassifier, _PULLS, 3.5, personal_steps=3),
    "Per-FedAvg": _method(PerFedAvgClassifier, {"estimator__lr": (1e-4, 0.01)}, 2.0),
    "QuPeD": _method(QuPeDClassifier, _ADAPED, 2.3),
    "FML": _method(FedMutualClassifier, _ADAPED, 2.3, personal_loss=0.25, global_loss=0.25),
    "FedEM": _method(FedEMClassifier, {"estimator__lr": (0.1, 0.2)}, 2.7),
    "AdaMix": _method(AdaMixNetClassifier, {"proximal": (0.1, 1.0)}, 1.1),
    "PPSGD": _method(PPSGDNetClassifier, _ADAPED, 1.1),
    "FedRep": _method(FedRepClassifier, _ADAPED, 2.0),
    "FedPer": _method(FedPerClassifier, _ADAPED, 1.1),
    "APFL": _method(APFLClassifier, {"mixing": (0.5, "adaptive")}, 2.5),
}

# "noise" names the parameter that takes the noise multiplier; "prefix" stands before the names of
# parameters that are set.
PRIVATE = {
    "Local": {
        "estimator": LocalNetClassifier,
        "fixed": {},
        "grid": {"estimator__lr": (0.1, 0.2)},
        "cost": 1.0,
    },
    "DP-FedAvg": {
        "estimator": FedAvgClassifier,
        "fixed": {},
        "grid": {"estimator__lr": (0.05, 0.1), "clip_norm": CLIP_NORMS},
        "noise": "noise_multiplier",
        "cost": 1.0,
    },
    "DP-AdaPeD": {
        "estimator": AdaPeDClassifier,
        "fixed": {"psi_min": 0.5},
        "grid": {"clip_norm": CLIP_NORMS},
        "noise": "noise_multiplier",
        "cost": 2.7,
    },
    "DP-AdaPeD or local": {
        "estimator": _adaped_or_local,
        "prefix": "personal__",
        "fixed": {"psi_min": 0.5},
        "tuned_as": "DP-AdaPeD",
        "noise": "noise_multiplier",
        "cost": 3.7,
    },
}
_CLIPS = {"estimator__lr": (0.1,), "clip_norm": CLIP_NORMS}
PRIVATE_FIELD = {
    f"DP-{name}": {**_method(estimator, _CLIPS, cost), "noise": "noise_multiplier"}
    for name, estimator, cost in (
        ("Ditto", DittoClassifier, 2.0),
        ("FedEM", FedEMClassifier, 2.7),
        ("PPSGD", PPSGDNetClassifier, 1.1),
        ("FedPer", FedPerClassifier, 1.1),
    )
}


# Privacy as printed -------------------------------------------------------------------------------

_ORDERS = 1 + np.geomspace(1e-2, 1e3, 5000)


def printed_epsilon(noise_multiplier, n_rounds, rate=1.0, delta=DELTA):
    r"""Epsilon that the paper's Theorem 5 (ICLR) would state for noise on a sum of clipped changes.

    Noise of :math:`\sigma` in every local step of K clients, with gradients clipped to
    :math:`C_1 = C_2`, is that of a multiplier
    :math:`\sqrt{K \tau} \sigma / (\tau C_1)` on the sum of their changes. The theorem has
    :math:`(\alpha, \rho \alpha)` Rényi privacy with
    :math:`\rho = (K/m)^2 \, 6 (T/\tau) \, 2 C_1^2 / (K \sigma^2)`, which does not hold. Epsilon is
    :math:`\rho + 2 \sqrt{\rho \log(1 / \delta)}`.
    """
    rho = _printed_rho(noise_multiplier, n_rounds, rate)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def lemma_epsilon(noise_multiplier, n_rounds, rate=1.0, delta=DELTA):
    """As :func:`printed_epsilon`, by the conversion of the paper's Lemma 1 (ICLR)."""
    rho = _printed_rho(noise_multiplier, n_rounds, rate)
    return rdp_to_dp(_ORDERS, rho * _ORDERS, delta)


def _printed_rho(noise_multiplier, n_rounds, rate):
    """Rényi divergence that the paper's Theorem 5 (ICLR) would state, over its order."""
    return 12 * rate**2 * n_rounds / (LOCAL_STEPS * noise_multiplier**2)


def noise_for(epsilon, n_rounds, rate=1.0, delta=DELTA):
    """Noise multiplier at which :func:`printed_epsilon` is `epsilon`."""
    log = math.log(1 / delta)
    rho = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
    return math.sqrt(12 * rate**2 * n_rounds / (LOCAL_STEPS * rho))
