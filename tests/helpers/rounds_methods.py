"""Three published methods on rounds for linear models, each against a plain loop in its test."""

import numpy as np

from pfl_sklearn._rounds.loop import LastPhase, Method, Update
from pfl_sklearn._rounds.rows import Reshuffled


def gradients(weights, X, y):
    """Gradients (g, d) of half the mean squared error, and the errors (g,)."""
    residuals = np.einsum("gbd,gd->gb", X, weights) - y
    return np.einsum("gbd,gb->gd", X, residuals) / X.shape[1], np.mean(residuals**2, axis=1) / 2


def averaged_change(n_expected, step=1.0):
    """Server update: every part moves by the mean of the clients' changes."""

    def server_update(server, total, t):
        return {name: server[name] + step * total[name] / n_expected for name in server}

    return server_update


def fedavg(n_clients, d, step, n_expected, fine_tuning=None):
    """FedAvg (McMahan et al., 2017): a client sends the change of its local steps.

    `fine_tuning` is the number of steps of a last phase.
    """

    def local_steps(weights, batch):
        weights, losses = weights.copy(), np.zeros(len(weights))
        for k in range(batch.X.shape[1]):
            change, losses = gradients(weights, batch.X[:, k], batch.y[:, k])
            weights -= step * change
        return weights, losses

    def client_update(server, t, batch, clients):
        start = np.repeat(server["global"][None], len(batch.X), axis=0)
        weights, losses = local_steps(start, batch)
        return Update({"global": weights - start}, {}, losses)

    def last_update(server, t, batch, clients, own):
        weights, losses = local_steps(own["tuned"], batch)
        return Update({}, {"tuned": weights}, losses)

    def last_start(server, clients):
        return {"tuned": np.repeat(server["global"][None], n_clients, axis=0)}

    last = fine_tuning and LastPhase(last_start, last_update, Reshuffled(4, fine_tuning))
    return Method(
        lambda: ({"global": np.zeros(d)}, {}),
        client_update,
        averaged_change(n_expected),
        {"global": (d,)},
        last,
    )


def apfl(n_clients, d, step, n_expected, mixing_step):
    """APFL (Deng et al., 2020): local models mixed with the global one by a learned weight."""

    def client_update(server, t, batch, clients):
        start = np.repeat(server["global"][None], len(batch.X), axis=0)
        shared, local, mixing = start.copy(), clients["local"], clients["mixing"]
        for k in range(batch.X.shape[1]):
            X, y = batch.X[:, k], batch.y[:, k]
            mixed = mixing[:, None] * local + (1 - mixing[:, None]) * shared
            change, losses = gradients(mixed, X, y)
            slope = np.einsum("gd,gd->g", local - shared, change)
            local = local - step * mixing[:, None] * change
            shared = shared - step * gradients(shared, X, y)[0]
            mixing = np.clip(mixing - mixing_step * slope, 0, 1)
        return Update({"global": shared - start}, {"local": local, "mixing": mixing}, losses)

    return Method(
        lambda: (
            {"global": np.zeros(d)},
            {"local": np.zeros((n_clients, d)), "mixing": np.full(n_clients, 0.5)},
        ),
        client_update,
        averaged_change(n_expected),
        {"global": (d,)},
    )


def distilled(n_clients, d, step, n_expected):
    """AdaPeD's skeleton (Ozkara et al., 2023): personal models near a global one, at a distance
    `spread` that is learned, too. A message has two parts, a vector and a number.
    """

    def client_update(server, t, batch, clients):
        personal, spread = clients["personal"], np.full(len(batch.X), server["spread"])
        shared = np.repeat(server["global"][None], len(batch.X), axis=0)
        for k in range(batch.X.shape[1]):
            change, losses = gradients(personal, batch.X[:, k], batch.y[:, k])
            gap = personal - shared
            personal = personal - step * (change + gap / spread[:, None])
            shared = shared + step * gap / spread[:, None]
            slope = 0.5 / spread - 0.5 * np.einsum("gd,gd->g", gap, gap) / spread**2
            spread = np.maximum(spread - step * slope, 0.5)
        sent = {"global": shared - server["global"], "spread": spread - server["spread"]}
        return Update(sent, {"personal": personal}, losses)

    return Method(
        lambda: (
            {"global": np.zeros(d), "spread": np.array(2.0)},
            {"personal": np.zeros((n_clients, d))},
        ),
        client_update,
        averaged_change(n_expected),
        {"global": (d,), "spread": ()},
    )
