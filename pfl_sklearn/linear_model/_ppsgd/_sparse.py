"""PPSGD on sparse rows: local models on each client's own features, noise drawn late.

Pairs are those of a client and a feature that occurs in its rows, in client order; local models are
values (n_pairs, c) on them. A round touches the pairs in the batches of the sampled clients.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from pfl_sklearn._rounds.loop import ClientRows, Method
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseMessages


class Pairs(NamedTuple):
    """Sorted keys ``client * n_features + feature`` of the pairs."""

    keys: np.ndarray
    n_features: int

    @property
    def features(self):
        """Features (n_pairs,)."""
        return self.keys % self.n_features

    def find(self, keys):
        """Positions of keys among the pairs; -1 where there is none."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        where = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[where] == keys, where, -1)

    def among(self, clients):
        """These pairs when the i-th client becomes number `clients[i]`."""
        owner, features = np.divmod(self.keys, self.n_features)
        return Pairs(clients[owner] * self.n_features + features, self.n_features)

    def union(self, other):
        """Pairs of both."""
        return Pairs(np.union1d(self.keys, other.keys), self.n_features)


def keys_of(X, owners):
    """Keys (nnz,) of the entries of rows X (CSR) of `owners` (n_rows,)."""
    return np.repeat(owners, np.diff(X.indptr)).astype(np.int64) * X.shape[1] + X.indices


def pairs_of(X, owners):
    """Pairs that occur in rows X (CSR) of `owners` (n_rows,)."""
    return Pairs(np.unique(keys_of(X, owners)), X.shape[1])


class LocalModels(NamedTuple):
    """Local models: values (n_pairs, c) on pairs of `n_clients` clients."""

    pairs: Pairs
    values: np.ndarray
    n_clients: int

    def of_clients(self, positions):
        """Models of some clients alone."""
        owner, features = np.divmod(self.pairs.keys, self.pairs.n_features)
        number = np.full(self.n_clients, -1)
        number[positions] = np.arange(len(positions))
        kept = number[owner] >= 0
        keys = number[owner[kept]] * self.pairs.n_features + features[kept]
        order = np.argsort(keys)
        pairs = Pairs(keys[order], self.pairs.n_features)
        return LocalModels(pairs, self.values[kept][order], len(positions))

    def predictors(self, X, codes):
        """Predictors (n, c) of rows X (CSR) of known clients `codes` (n,)."""
        where = self.pairs.find(keys_of(X, codes))
        data = np.where(where >= 0, X.data, 0.0)
        shape = (X.shape[0], max(len(self.values), 1))
        found = csr_array((data, np.maximum(where, 0), X.indptr), shape=shape)
        values = self.values if len(self.values) else np.zeros((1, self.values.shape[1]))
        return found @ values

    def matrix(self):
        """Models as a sparse matrix (n_clients * c, n_features), a client's outputs in turn."""
        owner, features = np.divmod(self.pairs.keys, self.pairs.n_features)
        c = self.values.shape[1]
        rows = owner[:, None] * c + np.arange(c)
        columns = np.broadcast_to(features[:, None], rows.shape)
        shape = (self.n_clients * c, self.pairs.n_features)
        return csr_array((self.values.ravel(), (rows.ravel(), columns.ravel())), shape=shape)

    def dense(self):
        """Models as an array (n_clients, n_features, c)."""
        c = self.values.shape[1]
        found = np.zeros((self.n_clients * self.pairs.n_features, c))
        found[self.pairs.keys] = self.values
        return found.reshape(self.n_clients, self.pairs.n_features, c)


class SparseBlock(NamedTuple):
    """Sampled clients with their next rows: X (CSR) has a column for every pair that occurs."""

    pairs: np.ndarray
    features: np.ndarray
    owner: np.ndarray
    X: csr_array
    y: np.ndarray
    sizes: np.ndarray

    def arguments(self, clients):
        """What `client_update` takes besides the server's state and the round."""
        kept = (values.take(self.pairs, axis=0) for values in clients.values())
        return self.X, self.y, self.features, self.owner, self.sizes, *kept

    def finite(self, kept, losses):
        """Clients (k,) whose losses and new values are finite."""
        fine = np.isfinite(losses)
        for values in kept:
            fine[self.owner[~np.isfinite(values).all(axis=1)]] = False
        return fine

    def keep(self, clients, kept, fine=None):
        """Store the new values, of all clients or of those that are `fine` (k,)."""
        chosen = slice(None) if fine is None else fine[self.owner]
        for values, new in zip(clients.values(), kept, strict=True):
            values[self.pairs[chosen]] = new[chosen]


class SparseRows(NamedTuple):
    """Rows in client order (CSR) whose column indices are features, and the pairs of their entries.

    `rows` has the offsets, batch sizes and clients; `where` (nnz,) the pair of every entry.
    """

    rows: ClientRows
    pairs: Pairs
    where: np.ndarray

    @property
    def n_clients(self):
        return self.rows.n_clients

    @property
    def clients(self):
        return self.rows.clients

    @property
    def batch_sizes(self):
        return self.rows.batch_sizes

    @property
    def offsets(self):
        return self.rows.offsets

    @property
    def X(self):
        return self.rows.X

    def blocks(self, sampled, used, workers=1):
        """Blocks of the sampled clients, in their order, with their next rows."""
        step = max(-(-len(sampled) // workers), 1)
        parts = [sampled[start : start + step] for start in range(0, len(sampled), step)]
        return [self._block(part, used) for part in parts]

    def _block(self, sampled, used):
        sizes = self.rows.batch_sizes.take(sampled)
        first = np.repeat(self.rows.offsets.take(sampled), sizes)
        length = np.repeat(self.rows.offsets.take(sampled + 1), sizes) - first
        turn = np.repeat(used.take(self.rows.clients.take(sampled)), sizes) + _count(sizes)
        rows = first + turn % length
        start = self.rows.X.indptr.take(rows)
        lengths = self.rows.X.indptr.take(rows + 1) - start
        entries = np.repeat(start, lengths) + _count(lengths)
        pairs, columns = np.unique(self.where.take(entries), return_inverse=True)
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        data = self.rows.X.data.take(entries)
        X = csr_array((data, columns, indptr), shape=(len(rows), len(pairs)))
        owner, features = np.divmod(self.pairs.keys.take(pairs), self.pairs.n_features)
        owner = np.searchsorted(self.rows.clients.take(sampled), owner)
        return SparseBlock(pairs, features, owner, X, self.rows.y.take(rows, axis=0), sizes)

    def collect(self, blocks, done, shape):
        """Messages and losses (k,) in the order of the sampled clients."""
        if not done:
            none = np.zeros(0, dtype=np.intp)
            return SparseMessages(np.zeros((0, shape[1])), none, none, 0), np.zeros(0)
        if len(done) == 1:
            return done[0][0], done[0][2]
        first = np.cumsum([0, *(len(block.sizes) for block in blocks)])
        messages = SparseMessages(
            np.concatenate([messages.values for messages, _, _ in done]),
            np.concatenate([block.features for block in blocks]),
            np.concatenate([block.owner + n for block, n in zip(blocks, first, strict=False)]),
            int(first[-1]),
        )
        return messages, np.concatenate([losses for _, _, losses in done])


def _count(lengths):
    """0, 1, ... anew for every one of the lengths."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def sparse_ppsgd(pairs, shape, loss, steps, divisor, mean_batch, average, lazy):
    """The method on pairs, for coefficients of a `shape` (d, c).

    `lazy` lets noise wait until somebody is to see it; the other parameters are those of
    :func:`~pfl_sklearn.linear_model._ppsgd._updates.ppsgd`.
    """
    names = ("local", "local_moment") if average else ("local",)
    population = ("coef", "moment") if average else ("coef",)
    step = steps.population / divisor

    def init():
        server = {name: np.zeros(shape) for name in population}
        server["settled"], server["variance"] = np.zeros(shape[0]), np.zeros(1)
        values = (len(pairs.keys), shape[1])
        return server, {name: np.zeros(values) for name in names}

    return Method(
        init,
        partial(client_update, loss=loss.function, step=steps.local, mean_batch=mean_batch),
        partial(server_update, step=step),
        partial(broadcast, step=step),
        lazy,
    )


def client_update(
    server, t, X, y, features, owner, sizes, local, moment=None, *, loss, step, mean_batch
):
    """Messages, new local values (n_pairs, c) and losses of clients with `sizes` (k,) rows each."""
    with np.errstate(over="ignore", invalid="ignore"):
        predictors = X @ (server["coef"].take(features, axis=0) + local)
        residuals, losses = loss(predictors[None], y[None])
        residuals = residuals[0]
        if mean_batch is None:
            residuals = residuals / np.repeat(sizes, sizes)[:, None]
        gradients = X.T @ residuals
        if step:
            change = (-step / (mean_batch or 1.0)) * gradients
            local = local + change
            moment = None if moment is None else moment + (t + 1) * change
    kept = (local,) if moment is None else (local, moment)
    client = np.repeat(np.arange(len(sizes)), sizes)
    losses = np.bincount(client, losses[0], len(sizes)) / sizes
    return SparseMessages(gradients, features, owner, len(sizes)), kept, losses


def server_update(server, total, t, *, step):
    """Population model after a round, in place; its noise is to come."""
    change = -step * total.values
    server["coef"][total.rows] += change
    if "moment" in server:
        server["moment"][total.rows] += (t + 1) * change
    server["variance"] += total.pending_variance
    return server


def broadcast(server, blocks, t, mechanism, rng, *, step):
    """Add the noise that is due to what the clients of `blocks` see; None: to everything."""
    variance = float(server["variance"][0])
    if not mechanism.noisy or variance == 0 or step == 0 or (blocks is not None and not blocks):
        return server
    if blocks is None:
        features = np.arange(len(server["coef"]))
    else:
        features = np.unique(np.concatenate([block.features for block in blocks]))
    coef = server["coef"]
    change = -step * mechanism.settle(server["settled"], variance, features, coef.shape[1], rng)
    coef[features] = mechanism.rounded(coef[features] + change, step)
    if "moment" in server:
        server["moment"][features] += t * change
    return server
