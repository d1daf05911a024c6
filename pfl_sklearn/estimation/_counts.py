"""Tables of counts: distinct (successes, trials) pairs, and which client has which."""

from typing import NamedTuple

import numpy as np


class CountTable(NamedTuple):
    """Distinct pairs of m clients."""

    successes: np.ndarray  # (u,)
    trials: np.ndarray  # (u,)
    counts: np.ndarray  # (u,), clients that have the pair
    pair: np.ndarray  # (m,), position of every client's pair

    @property
    def n_clients(self):
        return len(self.pair)

    @property
    def common_trials(self):
        """The number of trials that all clients share, or None."""
        return int(self.trials[0]) if np.all(self.trials == self.trials[0]) else None

    def per_client(self, values):
        """Values (u, ...) of the pairs, given to the clients (m, ...)."""
        return values[self.pair]


def count_table(successes, trials):
    """Compress whole-number `successes` and `trials` (m,) of the clients."""
    base = int(trials.max()) + 1
    if base < 2**31:
        key = trials * base + successes
        if base * base <= 4 * len(key) + 1024:
            seen = np.bincount(key, minlength=1)
            distinct = np.flatnonzero(seen)
            position = np.zeros(len(seen), dtype=np.intp)
            position[distinct] = np.arange(len(distinct))
            return CountTable(distinct % base, distinct // base, seen[distinct], position[key])
        distinct, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
        return CountTable(distinct % base, distinct // base, counts, pair)
    pairs, pair, counts = np.unique(
        np.column_stack([successes, trials]), axis=0, return_inverse=True, return_counts=True
    )
    return CountTable(pairs[:, 0], pairs[:, 1], counts, pair.ravel())
