"""Which rows of a sampled client a round uses, and clients of one shape stacked into blocks.

A schedule says which rows come next. Its state, a dict of arrays, is part of the state of a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from scipy.sparse import issparse

from pfl_sklearn._rounds.out_of_core import StoredRows
from pfl_sklearn._typing import Bools, Floats, Integers

NUMBERS_OF_A_BLOCK = 1 << 17  # in its rows: they should stay in the processor's cache
_MOST_GATHERED = 1 << 26  # numbers in the rows of a block of so many clients: half a gigabyte
_NOT_GATHERED = (
    1 << 14
)  # numbers in a part of a message from which on a copy costs more than the sum

Arrays: TypeAlias = dict[str, np.ndarray]
# scipy's own narrows to an abstract class, which type checkers find to have no methods.
is_sparse: Callable[[Any], bool] = issparse


class Batch(NamedTuple):
    """Rows of a block of clients, clients first: X (g, ..., b, *features) and y (g, ..., b, *).

    `seeds` (g,) are for what a client draws itself in the round, if it draws anything.
    """

    X: np.ndarray
    y: np.ndarray
    seeds: Integers | None = None

    @property
    def size(self) -> int:
        """Numbers in X, which is what a batch costs."""
        return self.X.size


class Block(NamedTuple):
    """Clients whose rows stack: positions among those sampled and among all, and the rows.

    `chosen` (g, ..., b) are the numbers of their rows in `rows`. They are gathered when asked for,
    so that a round does not hold the batches of all its clients.
    """

    members: Integers
    clients: Integers
    rows: "ClientRows"
    chosen: Integers
    seeds: Integers | None

    @property
    def batch(self) -> Batch:
        """The rows themselves, anew each time."""
        X, y = self.rows.X, self.rows.y.take(self.chosen, axis=0)
        at = self.chosen if self.rows.order is None else self.rows.order.take(self.chosen)
        if is_sparse(X):
            values = X[at.ravel()].toarray().reshape(*at.shape, X.shape[1])
        elif isinstance(X, StoredRows) or not X.flags.c_contiguous:
            values = X[at]  # `take` would copy all of an array of another order in memory first
        else:
            values = X.take(at, axis=0)
        if self.rows.kind is not None:
            values = values.astype(self.rows.kind, copy=False)
        return Batch(values, y, self.seeds)

    def cut(self, bounds: Integers) -> "list[Block]":
        """Blocks of these clients, each with rows between two of the bounds, ends of clients."""
        first = self.chosen.reshape(len(self.members), -1)[:, 0]
        ends = np.flatnonzero(np.diff(np.searchsorted(bounds, first, "right"))) + 1
        seeds = [None] * (len(ends) + 1) if self.seeds is None else np.split(self.seeds, ends)
        parts = (np.split(values, ends) for values in (self.members, self.clients, self.chosen))
        return [Block(m, c, self.rows, r, s) for m, c, r, s in zip(*parts, seeds, strict=True)]

    def numbers(self, first: int, end: int) -> tuple[Integers, Integers | None]:
        """The chosen rows, counted from the first of a part and as small numbers; seeds."""
        return (self.chosen - first).astype(np.min_scalar_type(end - first)), self.seeds

    def states(self, clients: Arrays) -> Arrays:
        """These clients' part of a dict of arrays with all clients first."""
        return {name: values.take(self.clients, axis=0) for name, values in clients.items()}

    def finite(self, new: Arrays, losses: Floats) -> Bools:
        """Which clients (g,) have a finite loss and finite new arrays."""
        return np.isfinite(losses) & finite_clients(new.values())

    def keep(self, clients: Arrays, new: Arrays, fine: Bools | None = None) -> None:
        """Store new arrays of all clients of the block, or of those that are `fine` (g,)."""
        where = self.clients if fine is None else self.clients[fine]
        for name, values in new.items():
            clients[name][where] = values if fine is None else values[fine]


def finite_clients(arrays: Any) -> Any:
    """Which clients (g,) have only finite numbers in arrays (g, ...); True without any."""
    flat = (values.reshape(len(values), -1) for values in arrays)
    return np.logical_and.reduce([np.isfinite(values).all(axis=1) for values in flat], axis=0)


@dataclass(frozen=True)
class InTurn:
    """One batch a round: each client's next rows, cyclically.

    `batch_sizes` (m,) are at most the numbers of rows. The state counts the rows that each client
    has used, ``used`` (n_clients,).
    """

    batch_sizes: Integers

    def start(self, rows: "ClientRows", n_clients: int) -> Arrays:
        """State before the first round of `n_clients` clients, of which `rows` has some."""
        return {"used": np.zeros(n_clients, dtype=np.intp)}

    def resume(self, rows: "ClientRows", n_clients: int, earlier: Arrays, where: Any) -> Arrays:
        """State that goes on from an earlier one, whose clients are now at positions `where`."""
        state = self.start(rows, n_clients)
        state["used"][where] = earlier["used"]
        return state

    def draw(self, rows, sampled, state, t, rng):
        """Next rows: a list of members (g,) of the sample and the numbers (g, b) of their rows."""
        sizes, clients = self.batch_sizes.take(sampled), rows.clients.take(sampled)
        first, used, groups = rows.offsets.take(sampled), state["used"].take(clients), []
        length = rows.offsets.take(sampled + 1) - first
        for size in _distinct(sizes):
            (members,) = (sizes == size).nonzero()
            turn = used.take(members)[:, None] + np.arange(size)
            turn %= length.take(members)[:, None]
            groups.append((members, first.take(members)[:, None] + turn))
        state["used"][clients] += sizes
        return groups

    def draw_ragged(self, rows, sampled, state):
        """Numbers of the next rows, client by client, and how many each client has (k,)."""
        sizes, clients = self.batch_sizes.take(sampled), rows.clients.take(sampled)
        first = np.repeat(rows.offsets.take(sampled), sizes)
        length = np.repeat(rows.offsets.take(sampled + 1), sizes) - first
        turn = np.repeat(state["used"].take(clients), sizes) + count_within(sizes)
        state["used"][clients] += sizes
        return first + turn % length, sizes


@dataclass(frozen=True)
class Reshuffled:
    """Several batches a round, from rows that are put into a new random order for every pass.

    A batch has `batch_size` rows, or all rows of a client that has fewer; None: all rows. A round
    has `n_batches` of them, and as many more as `n_passes` over the client's rows take. A batch may
    hold the end of one pass and the start of the next. The state has ``order`` (n_rows,), the
    present order of each client's rows, and for each client its ``position`` in that order, the
    number of its rows in ``sizes``, and its index among all clients in ``clients``, (m,) each. A
    round costs what its batches cost, and once a pass all rows of the client.
    """

    batch_size: int | None
    n_batches: int
    n_passes: int = 0

    def batches_of(self, n_rows: Any) -> Any:
        """Batches of a round, for clients with so many rows."""
        size = n_rows if self.batch_size is None else np.minimum(self.batch_size, n_rows)
        return self.n_batches + -(-self.n_passes * n_rows // size)

    def start(self, rows: "ClientRows", n_clients: int) -> Arrays:
        """State before the first round: every client is at the end of a pass."""
        sizes = np.diff(rows.offsets)
        return {
            "order": np.arange(len(rows.y)),
            "position": sizes.copy(),
            "sizes": sizes,
            "clients": rows.clients.copy(),
        }

    def after_rounds(self, rows: "ClientRows", earlier: Arrays) -> Arrays:
        """State of a phase after rounds, whose own was `earlier`: every client starts anew."""
        return self.start(rows, rows.n_clients)

    def resume(self, rows: "ClientRows", n_clients: int, earlier: Arrays, where: Any) -> Arrays:
        """State in which clients with as many rows as before go on with their pass."""
        state = self.start(rows, n_clients)
        _, now, then = np.intersect1d(rows.clients, where[earlier["clients"]], return_indices=True)
        # With other numbers of rows they are other rows, and a pass over them starts anew.
        same = state["sizes"][now] == earlier["sizes"][then]
        now, then = now[same], then[same]
        sizes, first = state["sizes"][now], rows.offsets[now]
        before = (np.cumsum(earlier["sizes"]) - earlier["sizes"])[then]
        slots = np.repeat(before, sizes) + count_within(sizes)
        row_numbers = earlier["order"][slots] + np.repeat(first - before, sizes)
        state["order"][np.repeat(first, sizes) + count_within(sizes)] = row_numbers
        state["position"][now] = earlier["position"][then]
        return state

    def draw(self, rows, sampled, state, t, rng):
        """Next rows: a list of members (g,) and the numbers (g, s, b) of those of their s batches.

        Members have equally many rows, so equally many batches.
        """
        first = rows.offsets.take(sampled)
        lengths = rows.offsets.take(sampled + 1) - first
        groups = []
        for length in _distinct(lengths):
            (members,) = (lengths == length).nonzero()
            size = length if self.batch_size is None else min(self.batch_size, length)
            n_batches = int(self.batches_of(length)) if self.n_passes else self.n_batches
            taken = np.empty((len(members), n_batches * size), dtype=np.intp)
            position, steps = state["position"].take(sampled.take(members)), taken.shape[1]
            # Only who comes to the end of a pass pays for a new order of all its rows.
            short = position + steps > length
            for group, advance in ((~short, take_next_rows), (short, take_reshuffled_rows)):
                if group.any():
                    clients = sampled.take(members[group])
                    taken[group] = advance(state, clients, first.take(members[group]), steps, rng)
            groups.append((members, taken.reshape(len(members), n_batches, size)))
        return groups


@dataclass(frozen=True)
class CatchingUp:
    """Batches of the rounds that a client missed, and after them those of the round itself.

    Those of each round are as in `plain`. A client missed the rounds since the last one that it
    took part in, or since round `joined`, if it is new now. At most `most` of them count, the
    latest. They do not count for a client whose last round came before `since`. After the rounds
    there is no round of its own (`now` False). The state is that of `plain`, and the round after
    the last one of each client, ``following`` (n_clients,).
    """

    plain: Reshuffled
    most: int
    joined: int = 0
    since: int = -1
    now: bool = True

    def start(self, rows: "ClientRows", n_clients: int) -> Arrays:
        """State before the first round of clients that are new."""
        plain = self.plain.start(rows, n_clients)
        return {**plain, "following": np.full(n_clients, self.joined)}

    def after_rounds(self, rows: "ClientRows", earlier: Arrays) -> Arrays:
        """State of a phase after rounds, in which clients go on where the rounds left them.

        Those who have other rows than in the rounds, some of which were held out, start anew.
        """
        if np.array_equal(earlier["sizes"], np.diff(rows.offsets)):
            return {name: np.copy(values) for name, values in earlier.items()}
        return {**self.start(rows, rows.n_clients), "following": earlier["following"].copy()}

    def resume(self, rows: "ClientRows", n_clients: int, earlier: Arrays, where: Any) -> Arrays:
        """State in which clients go on, also those without rows."""
        following = np.full(n_clients, self.joined)
        following[where] = earlier["following"]
        plain = self.plain.resume(rows, n_clients, earlier, where)
        return {**plain, "following": following}

    def draw(self, rows, sampled, state, t, rng):
        """Next rows: a list of members (g,) and the numbers (g, n_batches, b) of their rows.

        Members have missed equally many rounds; those who have nothing to do are left out.
        """
        clients, groups = rows.clients.take(sampled), []
        following = state["following"].take(clients)
        rounds = np.where(following > self.since, np.minimum(t - following, self.most), 0)
        rounds += self.now
        for count in _distinct(rounds[rounds > 0]):
            (members,) = (rounds == count).nonzero()
            steps = replace(self.plain, n_batches=count * self.plain.n_batches)
            drawn = steps.draw(rows, sampled.take(members), state, t, rng)
            groups += [(members.take(part), numbers) for part, numbers in drawn]
        state["following"][clients] = t + 1
        return groups


def take_next_rows(state, clients, first, steps, rng):
    """Next rows (g, steps) of clients whose pass has that many left; theirs start at `first`."""
    position = state["position"].take(clients)
    state["position"][clients] += steps
    return state["order"][(first + position)[:, None] + np.arange(steps)]


def take_reshuffled_rows(state, clients, first, steps, rng):
    """Next rows (g, steps) of clients with equally many, whose pass ends among them."""
    position, length = state["position"].take(clients), int(state["sizes"][clients[0]])
    at, end = first[:, None] + np.arange(length), position + steps
    # The rest of this pass, then as many new orders as the steps may reach into.
    orders = [state["order"][at]]
    orders += [rng.permuted(at, axis=1) for _ in range(-(-steps // length))]
    stream = np.concatenate(orders, axis=1)
    taken = np.take_along_axis(stream, position[:, None] + np.arange(steps), axis=1)
    # The order to keep is that of the last row taken, even if the pass ended with it.
    done = (end - 1) // length
    last = done[:, None] * length + np.arange(length)
    state["order"][at] = np.take_along_axis(stream, last, axis=1)
    state["position"][clients] = end - done * length
    return taken


class ClientRows(NamedTuple):
    """Rows in client order: client i of m, ``clients[i]`` of the state, has those from
    ``offsets[i]`` to ``offsets[i + 1]``.

    X is an array (n_rows, ...) of any number of dimensions, StoredRows, or a CSR matrix, whose
    batches are dense. Batches have its type, or the type `kind`. With `order` (n_rows,) the rows of
    X are not in client order: its row ``order[i]`` is the one that belongs with ``y[i]``. A block
    has `at_once` clients at most, or as many as their rows allow. With `seeded` every client gets a
    seed in each round.
    """

    X: Any
    y: np.ndarray
    offsets: Integers
    clients: Integers
    schedule: InTurn | Reshuffled | CatchingUp
    at_once: int | None = None
    seeded: bool = False
    order: Integers | None = None
    kind: Any = None

    @property
    def n_clients(self) -> int:
        """Clients with rows."""
        return len(self.clients)

    def with_schedule(self, schedule: InTurn | Reshuffled | CatchingUp) -> "ClientRows":
        """The same rows under another schedule."""
        return self._replace(schedule=schedule)

    def only(self, chosen: Integers) -> "ClientRows":
        """The chosen rows, in client order, and the clients that have any of them."""
        codes = np.repeat(np.arange(self.n_clients), np.diff(self.offsets))
        counts = np.bincount(codes[chosen], minlength=self.n_clients)
        present = counts > 0
        return self._replace(
            # X stays whole: it may be a file, and numbers of rows cost less memory than rows.
            order=chosen if self.order is None else self.order[chosen],
            y=self.y[chosen],
            offsets=np.concatenate([[0], np.cumsum(counts[present])]),
            clients=self.clients[present],
        )

    def parts(self, n_parts: int) -> "tuple[Integers, list[ClientRows]]":
        """First rows (k + 1,) of up to so many parts of whole clients, and their rows to gather."""
        whole: Any = self
        plain = whole._replace(schedule=None, offsets=None, clients=None)
        if n_parts == 1:
            return self.offsets[[0, -1]], [plain]
        shares = np.linspace(0, len(self.y), n_parts + 1)
        bounds = np.unique(self.offsets[np.searchsorted(self.offsets, shares)])
        order = np.arange(len(self.y)) if self.order is None else self.order
        parts = map(slice, bounds[:-1], bounds[1:])
        return bounds, [plain._replace(y=self.y[part], order=order[part]) for part in parts]

    def gathered(self) -> "ClientRows":
        """The same rows with an X of their own, which has no others."""
        return self if self.order is None else self._replace(X=self.X[self.order], order=None)

    def blocks(self, sampled, state, t, rng, workers=1):
        """Blocks of the sampled clients with their next rows; the schedule's state moves on."""
        blocks, drawn = [], self.schedule.draw(self, sampled, state, t, rng)
        # For all clients at once, so that a client's does not depend on how blocks are cut.
        seeds = rng.integers(1 << 63, size=len(sampled)) if self.seeded else None
        for members, rows in drawn:
            step = min(self._clients_of_a_block(rows), -(-len(members) // workers))
            for start in range(0, len(members), step):
                part, chosen = members[start : start + step], rows[start : start + step]
                block_seeds = None if seeds is None else seeds[part]
                clients = self.clients.take(sampled.take(part))
                blocks.append(Block(part, clients, self, chosen, block_seeds))
        return blocks

    def _clients_of_a_block(self, rows):
        """How many clients whose rows (k, ...) stack come into one block, at most."""
        width = max(math.prod(self.X.shape[1:]), 1)
        n_values = math.prod(rows.shape[1:]) * width
        if self.at_once is not None:
            # All rows of a pass over large clients are gathered together.
            return max(min(self.at_once, _MOST_GATHERED // n_values), 1)
        return max(NUMBERS_OF_A_BLOCK // n_values, 1)

    def collect(self, blocks, done, shapes):
        """Messages and losses (k,) in the order of the sampled clients.

        Each part of the messages is an array (k, ...) or, if it is large, a list of k views.
        """
        losses = np.empty(sum(len(block.members) for block in blocks))
        for block, update in zip(blocks, done, strict=True):
            losses[block.members] = update.losses
        sent = [update.messages for update in done]
        gathered = {
            name: _gathered(blocks, [messages[name] for messages in sent], shape, len(losses))
            for name, shape in shapes.items()
        }
        return gathered, losses


def _gathered(blocks, parts, shape, n_sampled):
    """What the clients of blocks sent, (g, ...) from each block, in the order of the clients.

    An array (k, ...), or a list of k views if it is large: a copy would take longer than a sum.
    """
    if math.prod(shape) >= _NOT_GATHERED:
        views: list[Any] = [None] * n_sampled
        for block, values in zip(blocks, parts, strict=True):
            for member, message in zip(block.members, values, strict=True):
                views[member] = message
        return views
    if len(parts) == 1:
        return parts[0]
    gathered = np.empty((n_sampled, *shape), dtype=parts[0].dtype if parts else float)
    for block, values in zip(blocks, parts, strict=True):
        gathered[block.members] = values
    return gathered


def count_within(lengths: Integers) -> Integers:
    """0, 1, ... anew for each of the lengths."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _distinct(sizes):
    """Distinct sizes, in order."""
    return sorted(set(sizes.tolist()))
