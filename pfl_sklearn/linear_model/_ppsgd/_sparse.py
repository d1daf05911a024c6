"""PPSGD on sparse rows: local models on the features of each client's rows, and late noise.

Pairs are those of a client and a feature that occurs in its rows, in client order; local models are
values (n_pairs, c) on them. A round touches the pairs in the batches of the sampled clients.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from pfl_sklearn._rounds.rows import count_within
from pfl_sklearn._typing import Bools, Floats, Integers
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum, SparseMessages


class FeaturePairs(NamedTuple):
    """Sorted keys ``client * n_features + feature`` of the pairs."""

    keys: Integers
    n_features: int

    @property
    def owners(self) -> Integers:
        """Clients (n_pairs,)."""
        return self.keys // self.n_features

    @property
    def features(self) -> Integers:
        """Features (n_pairs,)."""
        return self.keys % self.n_features

    def find(self, keys: Integers) -> Integers:
        """Positions of keys among the pairs; -1 where there is none."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        # A key beyond the last pair has no position.
        where = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[where] == keys, where, -1)

    def among(self, clients: Integers) -> "FeaturePairs":
        """These pairs after client i has become number `clients[i]`; the order stays."""
        keys = clients[self.owners] * self.n_features + self.features
        return FeaturePairs(keys, self.n_features)


def pair_keys(X: csr_array, owners: Integers) -> Integers:
    """Keys (nnz,) of the entries of rows X (CSR) of `owners` (n_rows,)."""
    # Clients times features soon exceed 32 bits, in which scipy holds indices.
    return np.repeat(owners, np.diff(X.indptr)).astype(np.int64) * X.shape[1] + X.indices


class LocalModels(NamedTuple):
    """Local models: values (n_pairs, c) on pairs of `n_clients` clients."""

    pairs: FeaturePairs
    values: Floats
    n_clients: int

    def of_clients(self, positions: Integers) -> "LocalModels":
        """Models of the clients at positions alone."""
        number = np.full(self.n_clients, -1)
        number[positions] = np.arange(len(positions))
        keys = self.pairs.among(number).keys  # below 0 for clients that are not chosen
        chosen = np.flatnonzero(keys >= 0)
        # The positions may be in any order, and pairs are sorted.
        chosen = chosen[np.argsort(keys[chosen])]
        pairs = FeaturePairs(keys[chosen], self.pairs.n_features)
        return LocalModels(pairs, self.values[chosen], len(positions))

    @staticmethod
    def stacked(parts: "list[LocalModels]") -> "LocalModels":
        """Models of the clients of all parts, one part after the other."""
        first = np.cumsum([0, *(part.n_clients for part in parts)])
        n_features = parts[0].pairs.n_features
        keys = [part.pairs.keys + at * n_features for part, at in zip(parts, first, strict=False)]
        pairs = FeaturePairs(np.concatenate(keys), n_features)
        values = np.concatenate([part.values for part in parts])
        return LocalModels(pairs, values, int(first[-1]))

    def predictors(self, X: csr_array, codes: Integers) -> Floats:
        """Predictors (n, c) of rows X (CSR) of known clients `codes` (n,)."""
        where = self.pairs.find(pair_keys(X, codes))
        # A feature that the client's rows did not have counts as 0, at whichever pair: the first
        # one, or a row of zeros if there are no pairs at all.
        data = np.where(where >= 0, X.data, 0.0)
        values = self.values if len(self.values) else np.zeros((1, self.values.shape[1]))
        entries = (data, np.maximum(where, 0), X.indptr)
        return csr_array(entries, shape=(X.shape[0], len(values))) @ values

    def matrix(self) -> csr_array:
        """Models as a sparse matrix (n_clients * c, n_features), a client's outputs in turn."""
        c = self.values.shape[1]
        rows = self.pairs.owners[:, None] * c + np.arange(c)
        columns = np.broadcast_to(self.pairs.features[:, None], rows.shape)
        shape = (self.n_clients * c, self.pairs.n_features)
        return csr_array((self.values.ravel(), (rows.ravel(), columns.ravel())), shape=shape)

    def dense(self) -> Floats:
        """Models as an array (n_clients, n_features, c)."""
        c = self.values.shape[1]
        models = np.zeros((self.n_clients * self.pairs.n_features, c))
        models[self.pairs.keys] = self.values
        return models.reshape(self.n_clients, self.pairs.n_features, c)


class SparseBatch(NamedTuple):
    """Next rows of a block: X (CSR) has a column for every pair that occurs in them.

    `features` and `owner` (n,) are those of the pairs, `sizes` (k,) the rows of every client.
    """

    X: csr_array
    y: np.ndarray
    features: Integers
    owner: Integers
    sizes: Integers

    @property
    def size(self) -> int:
        """Numbers in X, which is what a batch costs."""
        return self.X.size


class SparseBlock(NamedTuple):
    """Sampled clients: the pairs (n,) that occur in their next rows, and the rows."""

    pairs: Integers
    batch: SparseBatch

    def states(self, clients: dict[str, Floats]) -> dict[str, Floats]:
        """These clients' part of arrays with all pairs first."""
        return {name: values.take(self.pairs, axis=0) for name, values in clients.items()}

    def finite(self, new: dict[str, Floats], losses: Floats) -> Bools:
        """Which clients (k,) have a finite loss and finite new values."""
        fine = np.isfinite(losses)
        for values in new.values():
            fine[self.batch.owner[~np.isfinite(values).all(axis=1)]] = False
        return fine

    def keep(self, clients, new, fine=None) -> None:
        """Store new values of all clients of the block, or of those that are `fine` (k,)."""
        chosen: Any = slice(None) if fine is None else fine[self.batch.owner]
        for name, values in new.items():
            clients[name][self.pairs[chosen]] = values[chosen]


class SparseRows(NamedTuple):
    """Rows in client order, as ClientRows, whose features are those of pairs.

    X is CSR. `where` (nnz,) is the pair of every entry; `earlier` are the pairs of earlier rounds.
    """

    X: csr_array
    y: np.ndarray
    offsets: Integers
    clients: Integers
    schedule: Any
    pairs: FeaturePairs
    where: Integers
    earlier: Integers

    @property
    def n_clients(self) -> int:
        """Clients with rows."""
        return len(self.clients)

    def blocks(self, sampled, state, t, rng, workers=1) -> list[SparseBlock]:
        """Blocks of the sampled clients, in their order, with their next rows."""
        step = max(-(-len(sampled) // workers), 1)  # one block each: ragged rows need no stacking
        parts = [sampled[start : start + step] for start in range(0, len(sampled), step)]
        return [self._block(part, state) for part in parts]

    def _block(self, sampled, state):
        """Next rows of the sampled clients, with a column for each of their pairs."""
        rows, sizes = self.schedule.draw_ragged(self, sampled, state)
        X, y = self.X, self.y.take(rows, axis=0)
        start = X.indptr.take(rows)
        lengths = X.indptr.take(rows + 1) - start
        entries = np.repeat(start, lengths) + count_within(lengths)
        # Columns of the batch alone, so that a round costs its batches and not all features.
        pairs, columns = np.unique(self.where.take(entries), return_inverse=True)
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        chosen = csr_array((X.data.take(entries), columns, indptr), shape=(len(rows), len(pairs)))
        owner, features = np.divmod(self.pairs.keys.take(pairs), self.pairs.n_features)
        owner = np.searchsorted(self.clients.take(sampled), owner)
        return SparseBlock(pairs, SparseBatch(chosen, y, features, owner, sizes))

    def collect(self, blocks, done, shapes) -> tuple[SparseMessages, Floats]:
        """Messages and losses (k,) in the order of the sampled clients."""
        if not done:  # Poisson sampling may draw no client
            none, n_outputs = np.zeros(0, dtype=np.intp), shapes["coef"][1]
            return SparseMessages(np.zeros((0, n_outputs)), none, none, 0), np.zeros(0)
        sent = [update.messages for update in done]
        first = np.cumsum([0, *(part.k for part in sent)])
        messages = SparseMessages(
            np.concatenate([part.values for part in sent]),
            np.concatenate([part.rows for part in sent]),
            np.concatenate([part.owner + n for part, n in zip(sent, first, strict=False)]),
            int(first[-1]),
        )
        return messages, np.concatenate([update.losses for update in done])


@dataclass(frozen=True)
class LateNoise(SparseClippedSum):
    """Release of sparse messages whose noise is drawn only before somebody sees it.

    The noise is that of the ClippedSum `dense`.
    """

    step: float  # change of the population model per unit of the sum
    lazy: bool  # whether noise may wait for later rounds, or is drawn in every round

    def before_update(self, server, blocks, t, rng) -> dict:
        """Draw the noise that is due on the features that the clients of `blocks` are to see."""
        if not self.lazy or not blocks:
            return server
        features = np.unique(np.concatenate([block.batch.features for block in blocks]))
        return self._draw_pending(server, features, t, rng)

    def after_update(self, server: dict, t: int, rng: np.random.Generator) -> dict:
        """Draw all noise of the round, unless it may wait."""
        return server if self.lazy else self._draw_pending(server, None, t + 1, rng)

    def finish(self, server: dict, n_rounds: int, rng: np.random.Generator) -> dict:
        """Draw all noise that is still due, before anybody sees the model."""
        return self._draw_pending(server, None, n_rounds, rng)

    def _draw_pending(self, server, features, t, rng):
        """Server's state with all noise that is due on `features`; None: on all of them."""
        # Sums of Gaussians are Gaussian, so one draw stands for those of all rounds in which nobody
        # saw a feature. This is the variance of all rounds so far.
        variance = float(server["variance"][0])
        if not self.noisy or variance == 0 or self.step == 0:
            return server
        coef = server["coef"]
        features = np.arange(len(coef)) if features is None else features
        noise = self.due_noise(server["settled"], variance, features, coef.shape[1], rng)
        change = -self.step * noise
        # On the mechanism's grid: the low bits of floats could tell the sum from its noise.
        coef[features] = self.rounded(coef[features] + change, self.step)
        if "moment" in server:  # averages need all noise in every round, so none was late
            server["moment"][features] += t * change
        return server
