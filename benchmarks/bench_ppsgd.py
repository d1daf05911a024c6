"""A round of PPSGD against autograd, dense rows, fewer clients and one worker.

All times are of one round: those of a long run less those of a short one, over the difference of
their rounds. The peer is in single precision, as is usual with PyTorch; ours is in double.
"""

import os
import warnings

import numpy as np
import torch
from joblib import parallel_config
from scipy.sparse import csr_array
from timing import SHORT, compare, peak_above_input, per_round, seconds

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor

STEP, ALPHA, BATCH, CLIP = 0.01, 0.1, 10, 10.0


def table(n_clients, n_rows, d, classes=None):
    """Rows sorted by client, with real targets or labels."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n_clients * n_rows, d))
    groups = np.repeat(np.arange(n_clients), n_rows)
    y = rng.standard_normal(len(X)) if classes is None else rng.integers(0, classes, len(X))
    return X, y, groups


def rounds(estimator, X, y, groups, **params):
    """Function of a number of rounds that fits an estimator, with noise."""
    params = {
        "alpha": ALPHA,
        "learning_rate": STEP,
        "batch_size": BATCH,
        "fit_intercept": False,
        "noise_multiplier": 1.0,
        "clip_norm": CLIP,
        "random_state": 0,
    } | params
    return lambda n: estimator(n_rounds=n, **params).fit(X, y, groups=groups)


def autograd(X, y, n_clients, n_sampled, n_rounds):
    """Population model (d, c) of the same rounds, one client after another.

    A client's rows are taken in turn, as ours are; targets are (n, c).
    """
    X, y = (torch.tensor(values, dtype=torch.float32) for values in (X, y))
    size, shape = len(X) // n_clients, (X.shape[1], y.shape[1])
    coef = torch.zeros(shape, requires_grad=True)
    local = [torch.zeros(shape, requires_grad=True) for _ in range(n_clients)]
    used, batch = [0] * n_clients, torch.arange(BATCH)
    rng = np.random.default_rng(0)
    for _ in range(n_rounds):
        total = torch.zeros(shape)
        for i in rng.choice(n_clients, n_sampled, replace=False).tolist():
            rows = i * size + (used[i] + batch) % size
            used[i] += BATCH
            loss = 0.5 * ((X[rows] @ (coef + local[i]) - y[rows]) ** 2).sum()
            message, change = torch.autograd.grad(loss, (coef, local[i]))
            with torch.no_grad():
                local[i] -= STEP / BATCH * change
                total += message * torch.clamp(CLIP / (message.norm() + 1e-12), max=1.0)
        with torch.no_grad():
            total += CLIP * torch.randn(shape)
            coef -= ALPHA * STEP / BATCH * total
    return coef.detach()


def against_autograd():
    fixed = {"sampling": "fixed", "client_fraction": 0.01}
    X, y, groups = table(1000, 50, 100)
    compare(
        "PPSGD, a round of 10 of 1,000 clients x 10 rows, d=100; autograd, client by client, CPU",
        (lambda n: autograd(X, y[:, None], 1000, 10, n), 300),
        (rounds(PPSGDRegressor, X, y, groups, **fixed), 4000),
        ">= 15x",
        clock=per_round,
    )
    Z, labels, groups = table(1000, 20, 784, classes=10)
    indicators = np.eye(10)[labels] - 0.1
    squared = rounds(PPSGDClassifier, Z, labels, groups, loss="squared_error", **fixed)
    compare(
        "PPSGD, a round of 10 of 1,000 clients x 10 rows, 784 x 10; autograd, CPU",
        (lambda n: autograd(Z, indicators, 1000, 10, n), 200),
        (squared, 1000),
        ">= 2.5x",
        clock=per_round,
    )


def bags(n_clients, n_rows, d, n_words):
    """Sparse rows of `n_words` features, of those that their client uses, some far more often."""
    rng = np.random.default_rng(0)
    own = d * rng.random((n_clients, 900)) ** 2
    groups = np.repeat(np.arange(n_clients), n_rows)
    words = own[groups[:, None], rng.integers(0, 900, (len(groups), n_words))].astype(int)
    data = np.full(words.size, 1 / np.sqrt(n_words))
    X = csr_array((data, words.ravel(), np.arange(0, words.size + 1, n_words)), (len(groups), d))
    X.sum_duplicates()
    return X, rng.integers(0, 80, len(groups)), groups


def against_dense():
    X, y, groups = bags(250, 60, 5000, 40)
    params = {
        "loss": "squared_error",
        "sampling": "fixed",
        "client_fraction": 10 / 250,
        "learning_rate": 1.0,
        "clip_norm": 0.01,
    }
    ours = rounds(PPSGDClassifier, X, y, groups, **params)
    densified = rounds(PPSGDClassifier, X.toarray(), y, groups, **params)
    name = "PPSGD, 10 of 250 clients x 10 sparse rows, 5,000 x 80"
    stored = ours(SHORT).local_coef_.data.nbytes / 1e6
    dense = densified(SHORT).local_coef_.nbytes / 1e6
    print(f"| {name}: local models, MB | {dense:.0f} | {stored:.0f} | - | <= 150 MB |", flush=True)
    if os.access("/proc/self/clear_refs", os.W_OK):
        peak = peak_above_input(lambda: ours(100))
        print(f"| {name}: peak above input | - | - | {peak:.0f} MB | - |", flush=True)
    compare(
        f"{name}, a round; densified, CPU", (densified, 20), (ours, 150), ">= 4x", clock=per_round
    )


def idle_clients():
    few, many = table(10**3, 5, 20), table(10**5, 5, 20)
    for sampling in ("fixed", "poisson"):
        sides = [
            rounds(PPSGDRegressor, *data, sampling=sampling, client_fraction=fraction)
            for data, fraction in ((many, 1e-4), (few, 1e-2))
        ]
        compare(
            f"PPSGD, a round of 10 of 10^3 clients, {sampling}; of 10^5 clients, CPU",
            *((fit, 12_000) for fit in sides),
            "<= 1.2x",
            clock=per_round,
        )


def workers():
    X, y, groups = table(1000, 10, 784, classes=10)
    params = {"loss": "squared_error", "learning_rate": STEP}
    one, two = (rounds(PPSGDClassifier, X, y, groups, n_jobs=n, **params) for n in (1, 2))

    def threads(n):
        with parallel_config("threading"):
            two(n)

    for name, fit in (("processes", two), ("threads", threads)):
        compare(
            f"PPSGD, a round of all of 1,000 clients x 10 rows, 784 x 10: 2 {name}; 1 worker",
            (one, 5),
            (fit, 5),
            "-",
            pairs=3,
            clock=lambda side: per_round(side, seconds),
        )


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # noise from a seed is announced in every fit
    against_autograd()
    against_dense()
    idle_clients()
    workers()


if __name__ == "__main__":
    main()
