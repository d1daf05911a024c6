"""The one loop over communication rounds.

A method is three functions on blocks of clients: `init` makes the server's and the clients' state,
`client_update` turns a block of clients and their rows into messages and new client states, and
`server_update` takes what was released of the messages. Nothing else of a client reaches the
server. What is computed for a client must not depend on the others of its block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._parallel import batch_mapper

_BLOCK = 1 << 17  # numbers in the rows of a block, which is to stay in the cache
_LATE = 1 << 100  # within a stream: noise after the last round is none of the next round's
_JUMP = 0x9E3779B97F4A7C15F39CC0605CEDC835  # between streams: that of PCG64.jumped


class DivergenceError(ArithmeticError, ValueError):
    """Rounds whose losses or models stopped being finite."""


class Method(NamedTuple):
    """A method on rounds.

    ``init()`` gives the server's state (dict of arrays) and the clients' (dict of arrays with
    clients first). ``client_update(server, t, X, y, *clients)`` gives messages, the clients' new
    arrays and their losses. ``server_update(server, total, t)`` gives the new server state.
    If noise is added late, ``broadcast(server, blocks, t, mechanism, rng)`` makes the server's
    state after t rounds what the clients of `blocks`, or with None anybody, may see; `lazy` says
    that noise may wait until then.
    """

    init: Callable
    client_update: Callable
    server_update: Callable
    broadcast: Callable | None = None
    lazy: bool = False


class Sampling(NamedTuple):
    """Which clients take part in a round: each with probability `rate`, or a fixed number."""

    rate: float
    n_fixed: int | None = None

    def draw(self, rng, n_clients):
        """Sorted positions of the clients of a round; the cost is that of the sampled ones."""
        if self.n_fixed is not None:
            n_sampled = self.n_fixed
        elif self.rate == 1:
            return np.arange(n_clients)
        else:
            n_sampled = rng.binomial(n_clients, self.rate)
        sampled = rng.choice(n_clients, n_sampled, replace=False, shuffle=False)
        sampled.sort()
        return sampled


class Plan(NamedTuple):
    """How rounds are run; `entropy` None draws anew from the operating system."""

    n_rounds: int
    sampling: Sampling
    entropy: tuple[int, ...] | None
    n_jobs: int | None = None

    def generators(self, first):
        """Generators of the rounds from `first` on: each the same object, at its round's stream."""
        rng = np.random.default_rng()
        if self.entropy is None:
            while True:
                yield rng
        stream = np.random.PCG64(self.entropy).jumped(first)
        while True:
            rng.bit_generator.state = stream.state
            yield rng
            stream.advance(_JUMP)


class Block(NamedTuple):
    """Clients with equally many rows: positions among the sampled ones and among all, and rows."""

    members: np.ndarray
    clients: np.ndarray
    X: np.ndarray
    y: np.ndarray

    def arguments(self, clients):
        """What `client_update` takes besides the server's state and the round."""
        kept = (values.take(self.clients, axis=0) for values in clients.values())
        return self.X, self.y, *kept

    def finite(self, kept, losses):
        """Clients (g,) whose losses and new arrays are finite."""
        fine = np.isfinite(losses)
        for values in kept:
            fine &= np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        return fine

    def keep(self, clients, kept, fine=None):
        """Store the new arrays, of all clients or of those that are `fine` (g,)."""
        where = self.clients if fine is None else self.clients[fine]
        for values, new in zip(clients.values(), kept, strict=True):
            values[where] = new if fine is None else new[fine]


class ClientRows(NamedTuple):
    """Rows in client order: the i-th client, `clients[i]` of the state, has those from
    ``offsets[i]`` to ``offsets[i + 1]``.
    """

    X: np.ndarray
    y: np.ndarray
    offsets: np.ndarray
    batch_sizes: np.ndarray
    clients: np.ndarray

    @property
    def n_clients(self):
        return len(self.clients)

    def next_rows(self, sampled, used, size):
        """Rows (g, size) that come next for clients of at least `size` rows, in turn."""
        first = self.offsets.take(sampled)
        position = used.take(self.clients.take(sampled))[:, None] + np.arange(size)
        return first[:, None] + position % (self.offsets.take(sampled + 1) - first)[:, None]

    def blocks(self, sampled, used, workers=1):
        """Blocks of the sampled clients with their next rows."""
        sizes = self.batch_sizes.take(sampled)
        found = []
        for size in _distinct(sizes):
            (members,) = (sizes == size).nonzero()
            rows = self.next_rows(sampled.take(members), used, size)
            step = max(_BLOCK // (size * self.X.shape[1]), 1)
            step = min(step, -(-len(members) // workers))
            for start in range(0, len(members), step):
                part, block = members[start : start + step], rows[start : start + step]
                X, y = self.X.take(block, axis=0), self.y.take(block, axis=0)
                found.append(Block(part, self.clients.take(sampled.take(part)), X, y))
        return found

    def collect(self, blocks, done, shape):
        """Messages (k, ...) and losses (k,) in the order of the sampled clients."""
        if len(done) == 1:
            return done[0][0], done[0][2]
        if not done:
            return np.zeros((0, *shape)), np.zeros(0)
        back = np.argsort(np.concatenate([block.members for block in blocks]))
        messages = np.concatenate([messages for messages, _, _ in done])[back]
        return messages, np.concatenate([losses for _, _, losses in done])[back]


def _distinct(sizes):
    """Distinct sizes, in order."""
    return sorted(set(sizes.tolist()))


@dataclass
class State:
    """Where a run is: what the server knows, what clients keep, and what was observed."""

    server: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    used: np.ndarray  # rows that every client has used
    bound: float  # norm that messages are clipped to
    round: int = 0
    history: dict[str, list] = field(
        default_factory=lambda: {"n_clients": [], "loss": [], "clipped": [], "clip_norm": []}
    )

    def copy(self):
        """State to run on while this one stays as it is."""
        return replace(
            self,
            server={name: values.copy() for name, values in self.server.items()},
            clients={name: values.copy() for name, values in self.clients.items()},
            used=self.used.copy(),
            history={name: list(values) for name, values in self.history.items()},
        )


def start(method, n_clients, mechanism):
    """State before the first round."""
    server, clients = method.init()
    return State(server, clients, np.zeros(n_clients, dtype=np.intp), mechanism.start())


def run_rounds(method, rows, state, plan, mechanism, observe=None, protected=False):
    """Run the rounds from ``state.round`` to ``plan.n_rounds``; the state is changed in place.

    Parameters
    ----------
    method : Method
    rows : ClientRows
    state : State
    plan : Plan
    mechanism : ClippedSum
        The release: from messages to their noisy sum.
    observe : callable, default=None
        Called with the state after every round; true ends the run.
    protected : bool, default=False
        Whether no client may end the run. A client whose loss or arrays are not finite keeps the
        arrays that it had, instead of ending it.

    Returns
    -------
    State

    Notes
    -----
    The randomness of a round is drawn once, in client order, from a generator of the seed and the
    round: results do not depend on `n_jobs`, on blocks or on interruptions. A round costs what its
    sampled clients cost.
    """
    generators, n_expected = plan.generators(state.round), plan.sampling.rate * rows.n_clients
    with batch_mapper(plan.n_jobs) as (run, workers):
        for t in range(state.round, plan.n_rounds):
            rng = next(generators)
            sampled = plan.sampling.draw(rng, rows.n_clients)
            blocks = rows.blocks(sampled, state.used, workers)
            if method.lazy:
                state.server = method.broadcast(state.server, blocks, t, mechanism, rng)
            update = partial(method.client_update, state.server, t)
            done = run(update, [block.arguments(state.clients) for block in blocks])
            for block, (_, kept, losses) in zip(blocks, done, strict=True):
                fine = block.finite(kept, losses) if protected else None
                block.keep(state.clients, kept, fine)
            state.used[rows.clients.take(sampled)] += rows.batch_sizes.take(sampled)
            shape = state.server["coef"].shape
            messages, losses = rows.collect(blocks, done, shape)
            loss = float(losses.sum())
            if not (protected or math.isfinite(loss)):  # whoever reads the history will see
                state.history["loss"].append(loss)
                break
            released = mechanism.release(messages, state.bound, n_expected, rng)
            state.server = method.server_update(state.server, released.total, t)
            if method.broadcast is not None and not method.lazy:
                state.server = method.broadcast(state.server, None, t + 1, mechanism, rng)
            _record(state, len(sampled), loss, released)
            if observe is not None and observe(state):
                break
        if method.lazy:
            rng = next(generators)
            rng.bit_generator.advance(_LATE)
            state.server = method.broadcast(state.server, None, state.round, mechanism, rng)
    return state


def _record(state, n_sampled, loss, released):
    """Count the round, and keep what was seen in it."""
    state.round += 1
    history = state.history
    history["n_clients"].append(n_sampled)
    history["loss"].append(loss / n_sampled if n_sampled else np.nan)
    history["clipped"].append(released.clipped)
    history["clip_norm"].append(state.bound)
    state.bound = released.bound_next


def observer(estimator, X, y, groups, n_rounds, attributes):
    """Function for `run_rounds` that runs an estimator's callbacks; None if it has none.

    Parameters
    ----------
    estimator : estimator
        With scikit-learn's callback support, inside its ``fit``.
    X, y, groups
        As given to ``fit``, for the callbacks.
    n_rounds : int
        How many rounds are to come.
    attributes : callable
        From a state to the fitted attributes that make the estimator ready to predict.
    """
    context = estimator._init_callback_context(max_subtasks=n_rounds)
    if not getattr(estimator, "_skl_callbacks", []):
        return None
    metadata = None if groups is None else {"groups": groups}
    shared: dict[str, Any] = {"estimator": estimator, "X": X, "y": y, "metadata": metadata}
    context.call_on_fit_task_begin(**shared)
    if not n_rounds:
        context.call_on_fit_task_end(**shared)
    left = iter(range(n_rounds - 1, -1, -1))

    def observe(state):
        task = context.subcontext(task_name="round")
        task.call_on_fit_task_begin(**shared)
        stop = task.call_on_fit_task_end(
            **shared, reconstruction_attributes=lambda: attributes(state)
        )
        if stop or not next(left):
            context.call_on_fit_task_end(**shared)
        return stop

    return observe


def both(first, second):
    """Observer that is two, of which the first may be None; any of them ends the run."""
    if first is None:
        return second

    def observe(state):
        stop = first(state)
        return second(state) or stop

    return observe
