"""Equal parts of the rows of every client, of every class, and of every class within a client.

Clients and classes are the nodes of a bipartite graph, rows its edges and parts colours. De Werra
("Equitable colorations of graphs", 1971) showed that a colouring always exists in which the
numbers of two colours differ by at most one, at every node, among parallel edges and overall.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn._typing import Bools, Floats, Integers

_SHARE_BITS = 12  # of a share that is rounded; the last is drawn, so that no row is favoured


def stratified_folds(
    clients: Integers, labels: Integers, n_splits: int, rng: np.random.Generator
) -> Integers:
    """Fold (n,) of every row, given codes (n,) of its client and class."""
    # Two folds differ by one row at most: in all, of every client, of every class, and of every
    # class within a client.
    rows = _rows_by_cell(clients, labels, rng)
    folds = rows.position % n_splits
    # Full rounds give every fold one row of a client and class; the remaining rows are divided.
    remaining = rows.position >= (rows.size // n_splits) * n_splits
    folds[remaining] = _divide(rows.client[remaining], rows.label[remaining], n_splits, rng)
    # A random order of folds, so that no row has a preferred fold.
    return rng.permutation(n_splits)[folds][np.argsort(rows.order)]


def stratified_test_rows(
    clients: Integers, labels: Integers, expected: Floats, rng: np.random.Generator
) -> Bools:
    """Which rows (n,) are tested, given codes (n,) of clients and classes.

    A client's number of test rows is `expected` (m,) rounded up or down, and so are its classes'
    in proportion, and the sums over clients. All rows of a client have the same chance.
    """
    rows = _rows_by_cell(clients, labels, rng)
    before, n_rows = _runs(rows.client)  # rows of the client before this one, and in all
    first = np.flatnonzero(rows.position == 0)  # of every client and class
    client, label, size = rows.client[first], rows.label[first], rows.size[first]
    total = np.floor(expected * 2.0**_SHARE_BITS + rng.random(len(expected)))[rows.code_of[client]]

    def share_of(count):
        """Share of the client's first rows, so that its classes' shares add up to the total."""
        return np.floor(total * (count / n_rows[first]) + draw).astype(np.int64)

    draw = rng.random(len(expected))[client]
    shares = share_of(before[first] + size) - share_of(before[first])
    n_test = _round_evenly(shares, client, label, rng)
    return (rows.position < np.repeat(n_test, size))[np.argsort(rows.order)]


class _CellRows(NamedTuple):
    """Rows in order of clients and of classes within them, otherwise at random."""

    order: Integers  # their places in the table
    code_of: Integers  # of the clients in their new order
    client: Integers
    label: Integers
    position: Integers  # among the rows of the same client and class
    size: Integers  # how many these are


def _rows_by_cell(clients, labels, rng):
    """_CellRows in random order of clients and of rows within a cell."""
    order = rng.permutation(len(clients))
    order = order[rows_by_client(labels[order], labels.max() + 1)[0]]
    # Clients in random order as well, because neighbours in the table may be alike.
    code_of = rng.permutation(clients.max() + 1)
    places = np.argsort(code_of)[clients]
    order = order[rows_by_client(places[order], len(code_of))[0]]
    client, label = places[order], labels[order]
    return _CellRows(order, code_of, client, label, *_runs(client * (label.max() + 1) + label))


def _runs(keys):
    """Position (n,) in its run of equal keys, and length (n,) of the run."""
    starts = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=starts[1:])
    first = starts.nonzero()[0]
    sizes = np.append(first[1:], len(keys))[: len(first)] - first
    return np.arange(len(keys)) - first.repeat(sizes), sizes.repeat(sizes)


def _divide(client, label, n_splits, rng):
    """Fold (n,) of rows in order of clients and classes, fewer of each class than folds."""
    # Consecutive rows in consecutive folds, which is balanced within clients only.
    position, _ = _runs(client)
    folds = (position + rng.integers(n_splits, size=client.max(initial=0) + 1)[client]) % n_splits
    n_labels = label.max(initial=0) + 1
    members = [np.flatnonzero(folds == k) for k in range(n_splits)]
    counts = np.array([_counts(label[rows], n_labels) for rows in members])
    # The sum of squared counts decreases with every step, so this ends.
    while np.max(spread := np.ptp(counts, axis=0)) > 1:
        worst = counts[:, np.argmax(spread)]
        pair = [int(np.argmax(worst)), int(np.argmin(worst))]
        rows = np.sort(np.concatenate([members[k] for k in pair]))
        half = balanced_halves(client[rows], label[rows])
        for k, part in zip(pair, (half, ~half), strict=True):
            members[k] = rows[part]
            counts[k] = _counts(label[members[k]], n_labels)
    for k, rows in enumerate(members):
        folds[rows] = k
    return folds


def _counts(label, n_labels):
    """Numbers of rows of every class, and of all rows."""
    return np.append(np.bincount(label, minlength=n_labels), len(label))


def _round_evenly(digits, client, label, rng):
    """Round binary fractions (k,) so that sums by client and by label are rounded as well.

    From the last digit on, digits of 1 are rounded up in one half of the places and down in the
    other (Doerr, "Generating randomized roundings with cardinality constraints and
    derandomizations", 2006). A coin chooses the half, so that means are preserved.
    """
    for bit in range(_SHARE_BITS):
        odd = np.flatnonzero(digits >> bit & 1)
        up = _halves_of_clients(client[odd], label[odd]) ^ (rng.random() < 0.5)
        digits[odd] += np.where(up, 1, -1) << bit
    return digits >> _SHARE_BITS


def balanced_halves(client: Integers, label: Integers) -> Bools:
    """One half (n,) of rows in order of clients, and of labels within them."""
    # The halves differ by at most one row: overall, by client, by label and by both.
    position, size = _runs(client * (label.max(initial=0) + 1) + label)
    half = position % 2 == 0  # splits pairs of the same client and label
    single = (half & (position == size - 1)).nonzero()[0]
    half[single] = _halves_of_clients(client[single], label[single])
    return half


def _halves_of_clients(client, label):
    """As :func:`balanced_halves`, if no client has a label twice."""
    # A client's rows are paired. A pair is an edge between two labels, whose ends go to different
    # halves; the last of an odd number is an edge to an extra node.
    position, size = _runs(client)
    first = (position % 2 == 0).nonzero()[0]
    is_pair = position[first] < size[first] - 1
    second = first[is_pair] + 1
    end = np.full(len(first), label.max(initial=0) + 1)
    end[is_pair] = label[second]
    half = np.empty(len(client), dtype=bool)
    half[first] = _balanced_directions(label[first], end)
    half[second] = ~half[second - 1]
    return half


def _balanced_directions(start, end):
    """Whether edges (e,) from lower to higher nodes keep that direction."""
    # At every node, the numbers of edges that leave and arrive differ by at most one.
    keys = start * (end.max(initial=0) + 1) + end
    order = np.argsort(keys, kind="stable")
    position, size = _runs(keys[order])
    # Parallel edges alternate; one of an odd number remains.
    keeps = np.empty(len(keys), dtype=bool)
    keeps[order] = position % 2 == 0
    single = order[(position == size - 1) & (size % 2 == 1)]
    keeps[single] = _directions_of_walks(start[single].tolist(), end[single].tolist())
    return keeps


def _directions_of_walks(starts, ends):
    """As :func:`_balanced_directions` for edges without parallel ones, along walks."""
    neighbours: dict[int, list[tuple[int, int]]] = {node: [] for node in (*starts, *ends)}
    for edge, (start, end) in enumerate(zip(starts, ends, strict=True)):
        neighbours[start].append((edge, end))
        neighbours[end].append((edge, start))
    degrees = {node: len(edges) for node, edges in neighbours.items()}
    keeps = [None] * len(starts)

    def walk(node):
        while neighbours[node]:
            edge, other = neighbours[node].pop()
            if keeps[edge] is None:  # not yet walked from its other end
                keeps[edge] = node == starts[edge]
                degrees[node] -= 1
                degrees[other] -= 1
                node = other

    # A walk ends at another node of odd degree, or where it began.
    for node in neighbours:
        if degrees[node] % 2:
            walk(node)
    for node in neighbours:
        walk(node)
    return keeps
