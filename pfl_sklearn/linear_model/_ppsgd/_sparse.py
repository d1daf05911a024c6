"""PPSGD on sparse rows: local models on each client's own features, noise drawn late.

Pairs are those of a client and a feature that occurs in its rows, in client order; local models are
values (n_pairs, c) on them. A round touches the pairs in the batches of the sampled clients.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn._rounds.rows import ClientRows, count_within
from pfl_sklearn.linear_model._ppsgd._updates import paced
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum, SparseMessages


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


class SparseBatch(NamedTuple):
    """Next rows of a block: X (CSR) has a column for every pair that occurs in them.

    `features` and `owner` (n,) are those of the pairs, `sizes` (k,) the rows of every client.
    """

    X: csr_array
    y: np.ndarray
    features: np.ndarray
    owner: np.ndarray
    sizes: np.ndarray

    @property
    def size(self):
        """Numbers in X, which is what a batch costs."""
        return self.X.size


class SparseBlock(NamedTuple):
    """Sampled clients: the pairs (n,) that occur in their next rows, and the rows."""

    pairs: np.ndarray
    batch: SparseBatch

    def states(self, clients):
        """These clients' part of arrays with all pairs first."""
        return {name: values.take(self.pairs, axis=0) for name, values in clients.items()}

    def finite(self, new, losses):
        """Which clients (k,) have a finite loss and finite new values."""
        fine = np.isfinite(losses)
        for values in new.values():
            fine[self.batch.owner[~np.isfinite(values).all(axis=1)]] = False
        return fine

    def keep(self, clients, new, fine=None):
        """Store new values of all clients of the block, or of those that are `fine` (k,)."""
        chosen = slice(None) if fine is None else fine[self.batch.owner]
        for name, values in new.items():
            clients[name][self.pairs[chosen]] = values[chosen]


class SparseRows(NamedTuple):
    """Rows in client order (CSR) whose column indices are features, and the pairs of their entries.

    `rows` has the offsets, clients and schedule; `where` (nnz,) the pair of every entry.
    """

    rows: ClientRows
    pairs: Pairs
    where: np.ndarray

    @property
    def n_clients(self):
        """Clients with rows."""
        return self.rows.n_clients

    @property
    def clients(self):
        """Positions of these clients among all."""
        return self.rows.clients

    @property
    def schedule(self):
        """Which rows a round uses."""
        return self.rows.schedule

    def with_schedule(self, schedule):
        """The same rows under another schedule, which has to give ragged draws."""
        return self._replace(rows=self.rows.with_schedule(schedule))

    def blocks(self, sampled, state, t, rng, workers=1):
        """Blocks of the sampled clients, in their order, with their next rows."""
        step = max(-(-len(sampled) // workers), 1)
        parts = [sampled[start : start + step] for start in range(0, len(sampled), step)]
        return [self._block(part, state) for part in parts]

    def _block(self, sampled, state):
        X, y = self.rows.X, self.rows.y
        rows, sizes = self.rows.schedule.draw_ragged(self.rows, sampled, state)
        start = X.indptr.take(rows)
        lengths = X.indptr.take(rows + 1) - start
        entries = np.repeat(start, lengths) + count_within(lengths)
        pairs, columns = np.unique(self.where.take(entries), return_inverse=True)
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        chosen = csr_array((X.data.take(entries), columns, indptr), shape=(len(rows), len(pairs)))
        owner, features = np.divmod(self.pairs.keys.take(pairs), self.pairs.n_features)
        owner = np.searchsorted(self.rows.clients.take(sampled), owner)
        return SparseBlock(pairs, SparseBatch(chosen, y.take(rows, axis=0), features, owner, sizes))

    def collect(self, blocks, done, shapes):
        """Messages and losses (k,) in the order of the sampled clients."""
        if not done:
            none, n_outputs = np.zeros(0, dtype=np.intp), shapes["coef"][1]
            return SparseMessages(np.zeros((0, n_outputs)), none, none, 0), np.zeros(0)
        if len(done) == 1:
            return done[0].messages, done[0].losses
        first = np.cumsum([0, *(len(block.batch.sizes) for block in blocks)])
        owners = [block.batch.owner + n for block, n in zip(blocks, first, strict=False)]
        messages = SparseMessages(
            np.concatenate([update.messages.values for update in done]),
            np.concatenate([block.batch.features for block in blocks]),
            np.concatenate(owners),
            int(first[-1]),
        )
        return messages, np.concatenate([update.losses for update in done])


def steps_of_roster(own, rows, roster):
    """Local steps of all clients, or of all pairs, from those (m,) of the clients with rows.

    Clients without rows take none; those of earlier rounds keep what they had.
    """
    found = np.zeros(len(roster.ids))
    found[roster.now] = own
    if not isinstance(rows, SparseRows):
        return found
    return found[rows.pairs.keys // rows.pairs.n_features]


class LateNoise(NamedTuple):
    """Release of sparse messages, whose noise is drawn when somebody is about to see it.

    Parameters
    ----------
    mechanism : SparseClippedSum
    step : float
        What the population model moves by, for each unit of the sum.
    lazy : bool
        Whether noise may wait from round to round. Otherwise all of it is drawn in every round.
    """

    mechanism: SparseClippedSum
    step: float
    lazy: bool

    def start(self):
        """Clipping bound of the first round."""
        return self.mechanism.start()

    def before_update(self, server, blocks, t, rng):
        """Draw the noise that is due in what the clients of `blocks` are about to see."""
        if not self.lazy or not blocks:
            return server
        features = np.unique(np.concatenate([block.batch.features for block in blocks]))
        return self._settled(server, features, t, rng)

    def release(self, messages, bound, n_expected, rng):
        """Exact sparse sum of a round, and the variance of the noise that is due on it."""
        return self.mechanism.release(messages, bound, n_expected, rng)

    def after_update(self, server, t, rng):
        """Draw all noise of the round, unless it may wait."""
        return server if self.lazy else self._settled(server, None, t + 1, rng)

    def finish(self, server, n_rounds, plan):
        """Draw the noise that still waits."""
        if not self.lazy:
            return server
        return self._settled(server, None, n_rounds, plan.late_generator(n_rounds))

    def _settled(self, server, features, t, rng):
        """Server's state with the noise that is due in some features, or with None in all."""
        variance = float(server["variance"][0])
        if not self.mechanism.noisy or variance == 0 or self.step == 0:
            return server
        coef = server["coef"]
        features = np.arange(len(coef)) if features is None else features
        noise = self.mechanism.settle(server["settled"], variance, features, coef.shape[1], rng)
        change = -self.step * noise
        coef[features] = self.mechanism.rounded(coef[features] + change, self.step)
        if "moment" in server:
            server["moment"][features] += t * change
        return server


def sparse_ppsgd(pairs, shape, loss, steps, divisor, mean_batch, average):
    """The method on pairs, for coefficients of a `shape` (d, c).

    The parameters are those of :func:`~pfl_sklearn.linear_model._ppsgd._updates.ppsgd`.
    """
    names = ("local", "local_moment") if average else ("local",)
    population = ("coef", "moment") if average else ("coef",)

    def init():
        server = {name: np.zeros(shape) for name in population}
        server["settled"], server["variance"] = np.zeros(shape[0]), np.zeros(1)
        values = (len(pairs.keys), shape[1])
        return server, {name: np.zeros(values) for name in names}

    return Method(
        init,
        partial(sparse_update, loss=loss.function, step=steps.local, mean_batch=mean_batch),
        partial(sparse_server_update, step=steps.population / divisor),
        {"coef": shape},
    )


def sparse_update(server, t, batch, clients, *, loss, step, mean_batch):
    """Messages, new local values (n_pairs, c) and losses of the clients of a batch."""
    X, y, features, owner, sizes = batch
    local, moment, own = clients["local"], clients.get("local_moment"), clients.get("step")
    with np.errstate(over="ignore", invalid="ignore"):
        predictors = X @ (server["coef"].take(features, axis=0) + local)
        residuals, losses = loss(predictors[None], y[None])
        residuals = residuals[0]
        if mean_batch is None:
            residuals = residuals / np.repeat(sizes, sizes)[:, None]
        gradients = X.T @ residuals
        if step:
            rate = step if own is None else own[:, None] * server["pace"]
            change = (-rate / (mean_batch or 1.0)) * gradients
            local = local + change
            moment = None if moment is None else moment + (t + 1) * change
    new = {"local": local} if moment is None else {"local": local, "local_moment": moment}
    client = np.repeat(np.arange(len(sizes)), sizes)
    losses = np.bincount(client, losses[0], len(sizes)) / sizes
    return Update(SparseMessages(gradients, features, owner, len(sizes)), new, losses)


def sparse_server_update(server, total, t, *, step):
    """Population model after a round, in place; its noise is still to come."""
    change = -paced(step, server) * total.values
    server["coef"][total.rows] += change
    if "moment" in server:
        server["moment"][total.rows] += (t + 1) * change
    server["variance"] += total.pending_variance
    return server
