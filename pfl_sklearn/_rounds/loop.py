"""The one loop over communication rounds: sample, update, release, combine.

A :class:`Run` describes the rounds and a :class:`State` says where they are. Three parts of the run
do the work:

- the *method* is a few functions on blocks of clients (:class:`Method`);
- the *rows* (:class:`~pfl_sklearn._rounds.rows.ClientRows`) cut the sampled clients' batches into
  blocks, and put what the blocks sent in the order of the clients;
- the *release* (:class:`~pfl_sklearn._rounds.privacy.JointSum`) turns messages into what the server
  may see.

Server state, client state and messages are dicts of arrays. Nothing of a client reaches the
server's state except through the release. What a method computes for a client must not depend on
the other clients of its block.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pfl_sklearn._parallel import BatchMapper, batch_mapper
from pfl_sklearn._rounds.rows import Arrays, Block, ClientRows
from pfl_sklearn._typing import Integers

if TYPE_CHECKING:
    from pfl_sklearn._rounds.privacy import JointSum

Entropy: TypeAlias = tuple[int, ...] | None

# Where in a round's stream late draws start: far beyond those of the round itself.
_LATE_DRAWS = 1 << 100
_LAST_PHASE_DRAWS = 1 << 101
_JUMP = 0x9E3779B97F4A7C15F39CC0605CEDC835  # between streams: that of PCG64.jumped
_PACKED = ("server", "clients", "schedule", "history")  # what a checkpoint has of a state
_CLIENTS_AT_ONCE = 512  # in the last phase: their rows are gathered together


class DivergenceError(ArithmeticError, ValueError):
    """The losses or the models of a run are no longer finite."""


class Update(NamedTuple):
    """What a block of g clients computed: messages and new arrays, (g, ...) each, losses (g,).

    `failures` are names of the classes of exceptions that did not end a protected run.
    """

    messages: Any
    clients: Arrays
    losses: np.ndarray
    failures: frozenset[str] = frozenset()


class LastPhase(NamedTuple):
    """What every client does on its own rows after the rounds. It sends nothing.

    ``init(server, clients)`` gives the phase's arrays of all clients, clients first;
    ``update(server, t, batch, clients, phase_arrays)`` gives the :class:`Update` of a block after t
    rounds, which has their new values and no messages. Rounds that go on later never see these
    arrays. `schedule` picks the rows, from the state that its ``after_rounds`` gives. Clients
    without rows keep what an earlier last phase left.

    A phase may come `after` another one, whose arrays ``init`` then gets among the clients'.
    """

    init: Callable
    update: Callable
    schedule: Any
    after: "LastPhase | None" = None


class Method(NamedTuple):
    """A method on rounds.

    ``init()`` gives the server's and the clients' arrays, the latter with clients first.
    ``client_update(server, t, batch, clients)`` gives the :class:`Update` of a block; the server's
    arrays are read-only there.
    ``server_update(server, total, t)`` gives the server's new arrays. `messages` maps the name of
    each part of a client's message to its shape. ``record(server)`` gives numbers by name that the
    history is to have of each round. `constants` are further arrays of the clients, which no round
    changes, so that those of earlier rounds do not count. `kinds` maps names of the server's arrays
    to the types that clients read them in, so that they travel as such.
    """

    init: Callable
    client_update: Callable
    server_update: Callable
    messages: dict[str, tuple[int, ...]]
    last_phase: LastPhase | None = None
    record: Callable = lambda server: {}
    constants: Arrays = {}
    kinds: Mapping[str, Any] = {}

    def seen(self, server: Arrays) -> Arrays:
        """The server's arrays as clients read them in a round."""
        narrow = {name: server[name].astype(kind) for name, kind in self.kinds.items()}
        return _views({**server, **narrow})


class Sampling(NamedTuple):
    """Who takes part in a round: each client with probability `rate`, or a fixed number.

    Of these, each is `dropped` with some probability, for reasons that have nothing to do with it.
    """

    rate: float
    n_fixed: int | None = None
    dropped: float = 0.0

    def draw(self, rng: np.random.Generator, n_clients: int) -> Integers:
        """Sorted positions of a round's clients, at the cost of these clients alone."""
        sampled = self._sampled(rng, n_clients)
        if not self.dropped:
            return sampled
        return sampled[rng.random(len(sampled)) >= self.dropped]

    def _sampled(self, rng, n_clients):
        """Sorted positions of those that are asked to take part."""
        if self.n_fixed is not None:
            n_sampled = self.n_fixed
        elif self.rate == 1:
            return np.arange(n_clients)
        else:
            # A binomial number, then that many of all: Poisson sampling without a draw for each.
            n_sampled = rng.binomial(n_clients, self.rate)
        sampled = rng.choice(n_clients, n_sampled, replace=False, shuffle=False)
        sampled.sort()
        return sampled


class Run(NamedTuple):
    """The rounds that the loop runs; nothing of it changes while they run.

    - `method`, `rows`, `release`: see the top of this module. Sparse features have rows and a
      release of their own, which do the same.
    - `sampling`: who takes part in a round.
    - `n_rounds`: number of the last round, at most.
    - `entropy`: seed of every round's draws; None draws from the operating system.
    - `n_jobs`: workers for the blocks of a round.
    - `protected`: whether no client may end the rounds, or show in what they release.
    """

    method: Method
    rows: ClientRows
    release: "JointSum"
    sampling: Sampling
    n_rounds: int
    entropy: Entropy
    n_jobs: int | None = None
    protected: bool = False


def round_generators(entropy: Entropy, first: int = 0) -> Iterator[np.random.Generator]:
    """Generators of the rounds from `first` on: one object, moved to each round's stream."""
    rng = np.random.default_rng()
    if entropy is None:
        while True:
            yield rng
    stream = np.random.PCG64(entropy).jumped(first)
    while True:
        rng.bit_generator.state = stream.state
        yield rng
        stream.advance(_JUMP)  # far faster than a new generator for each round


def late_generator(entropy: Entropy, t: int, offset: int = _LATE_DRAWS) -> np.random.Generator:
    """Generator of draws after the last round `t`, which share nothing with round t."""
    rng = next(round_generators(entropy, t))
    rng.bit_generator.advance(offset)  # type: ignore[attr-defined]  # PCG64 has it
    return rng


@dataclass
class State:
    """Where a run is: what the server knows, what clients keep, and what was observed."""

    server: Arrays
    clients: Arrays
    schedule: Arrays
    bound: float  # norm that messages are clipped to
    phase_arrays: Arrays = field(default_factory=dict)  # arrays that the last phase left
    round: int = 0
    history: dict[str, list] = field(
        default_factory=lambda: {"n_clients": [], "loss": [], "clipped": [], "clip_norm": []}
    )
    memory: dict[str, Any] = field(default_factory=dict)  # of who decides when rounds are over
    diverged: Any = ()  # positions of the clients whose losses ended the rounds
    failures: frozenset[str] = frozenset()  # classes of exceptions that did not end the run

    def packed(self) -> Arrays:
        """Copies of what rounds change, as a flat dict of arrays."""
        arrays = {
            f"{group}.{name}": np.array(values)
            for group in _PACKED
            for name, values in getattr(self, group).items()
        }
        return {**arrays, "bound": np.array(self.bound), "round": np.array(self.round)}

    def restored(self, arrays: Mapping[str, Any]) -> "State":
        """This state with what was packed, among other arrays."""
        parts: dict[str, Any] = {group: {} for group in _PACKED}
        for name, values in arrays.items():
            group, _, key = name.partition(".")
            if group in parts:
                parts[group][key] = np.array(values)
        parts["history"] = {name: seen.tolist() for name, seen in parts["history"].items()}
        bound, rounds = float(arrays["bound"]), int(arrays["round"])
        return replace(self, **parts, bound=bound, round=rounds, memory={})

    def copy(self) -> "State":
        """State to run on while this one stays as it is."""
        return self._mapped(np.copy, {name: list(seen) for name, seen in self.history.items()})

    def view(self) -> "State":
        """The same arrays, which cannot be written through it."""
        return self._mapped(_read_only, self.history)

    def _mapped(self, function, history):
        groups = ("server", "clients", "schedule", "phase_arrays")
        mapped: dict[str, Any] = {
            group: {name: function(values) for name, values in getattr(self, group).items()}
            for group in groups
        }
        return replace(self, **mapped, history=history)


def _read_only(values):
    """View of an array, or of a number, that cannot be written through."""
    seen = np.asarray(values).view()
    seen.flags.writeable = False
    return seen


def _views(arrays):
    """Read-only views of a dict of arrays."""
    return {name: _read_only(values) for name, values in arrays.items()}


def start(method: Method, rows: Any, release: Any, n_clients: int | None = None) -> State:
    """State before the first round of `n_clients` clients, by default those with rows."""
    server, clients = method.init()
    n_clients = rows.n_clients if n_clients is None else n_clients
    clients = {**clients, **method.constants}
    return State(server, clients, rows.schedule.start(rows, n_clients), release.start())


def run_rounds(run: Run, state: State, observe: Callable[[State], Any] | None = None) -> State:
    """Run the rounds from ``state.round`` to ``run.n_rounds``; the state is changed in place.

    ``observe(state)`` is called after every round; true ends the rounds. In a `protected` run a
    client whose loss or arrays are not finite keeps the arrays that it had, instead of ending them.

    The randomness of a round is drawn once, in client order, from a generator of the seed and the
    round: results do not depend on `n_jobs`, on blocks or on interruptions. A round costs what its
    sampled clients cost.
    """
    method, rows, release, protected = run.method, run.rows, run.release, run.protected
    generators = round_generators(run.entropy, state.round)
    n_expected = run.sampling.rate * rows.n_clients
    earlier_arrays, state.phase_arrays, state.failures = state.phase_arrays, {}, frozenset()
    with batch_mapper(run.n_jobs) as mapper:
        workers = BlockRunner(rows, mapper)
        for t in range(state.round, run.n_rounds):
            rng = next(generators)
            sampled = run.sampling.draw(rng, rows.n_clients)  # before all else
            blocks = workers.cut(rows.blocks(sampled, state.schedule, t, rng, workers.n_workers))
            state.server = release.before_update(state.server, blocks, t, rng)
            client_update = partial(method.client_update, method.seen(state.server), t)
            updates = workers(client_update, blocks, state.clients)
            for block, update in zip(blocks, updates, strict=True):
                _store_update(state, state.clients, block, update, protected)
            messages, losses = rows.collect(blocks, updates, method.messages)
            del updates  # it holds another copy of the messages
            n_bytes = _bytes_of(messages)
            loss = float(losses.sum())
            # Under noise the rounds go on: their number would tell what a client's rows did.
            if not (protected or math.isfinite(loss)):  # check_converged finds it in the history
                state.history["loss"].append(loss)
                state.diverged = rows.clients[sampled[~np.isfinite(losses)]]
                return state
            released = release.release(messages, state.bound, n_expected, rng)
            state.server = method.server_update(state.server, released.total, t)
            state.server = release.after_update(state.server, t, rng)
            _record(state, len(sampled), n_bytes, loss, released, method.record(state.server))
            if observe is not None and observe(state):
                break
        rng = late_generator(run.entropy, state.round)
        state.server = release.finish(state.server, state.round, rng)
        if method.last_phase is not None:
            rng = late_generator(run.entropy, state.round, _LAST_PHASE_DRAWS)
            phase = method.last_phase
            state.phase_arrays = _run_phase(
                phase, rows, state, earlier_arrays, workers, protected, rng
            )
    return state


def run_last_phase(
    phase: LastPhase,
    rows: ClientRows,
    state: State,
    entropy: Entropy,
    earlier_arrays: Arrays | None = None,
    n_jobs: int | None = 1,
    protected: bool = False,
) -> Arrays:
    """Arrays that a last phase leaves after the rounds of a state, which stays as it is.

    They are what :func:`run_rounds` would leave if the rounds ended here. Clients without rows keep
    the arrays `earlier_arrays` of an earlier last phase.
    """
    rng = late_generator(entropy, state.round, _LAST_PHASE_DRAWS)
    with batch_mapper(n_jobs) as mapper:
        workers = BlockRunner(rows, mapper)
        return _run_phase(phase, rows, state, earlier_arrays or {}, workers, protected, rng)


def _bytes_of(messages):
    """Bytes of messages: arrays, or lists of views if they are large."""
    if not isinstance(messages, dict):
        return messages.nbytes
    parts = messages.values()
    return sum(
        sum(e.nbytes for e in part) if isinstance(part, list) else part.nbytes for part in parts
    )


def _record(state, n_sampled, n_bytes, loss, released, recorded):
    """Count the round, and add its numbers to the history; a method has some of its own."""
    history = state.history
    for name, value in {**recorded, "bytes_sent": n_bytes}.items():
        # A record that only later rounds have is NaN in the rounds before.
        history.setdefault(name, [np.nan] * state.round).append(value)
    state.round += 1
    history["n_clients"].append(n_sampled)
    history["loss"].append(loss / n_sampled if n_sampled else np.nan)
    history["clipped"].append(released.clipped)
    history["clip_norm"].append(state.bound)
    state.bound = released.bound_next


def _run_phase(phase, rows, state, earlier_arrays, workers, protected, rng):
    """Arrays that a phase and those before it leave; an earlier one left `earlier_arrays`.

    A client whose result is not finite keeps the initial arrays, one without rows the earlier ones.
    """
    before: Arrays = {}
    if phase.after is not None:
        before = _run_phase(phase.after, rows, state, earlier_arrays, workers, protected, rng)
    server, clients = _views(state.server), _views({**state.clients, **before})
    arrays = {name: np.array(values) for name, values in phase.init(server, clients).items()}
    for name in arrays.keys() & earlier_arrays.keys():
        absent = np.delete(np.arange(len(arrays[name])), rows.clients)
        arrays[name][absent] = earlier_arrays[name][absent]
    rows = rows.with_schedule(phase.schedule)
    schedule = phase.schedule.after_rounds(rows, state.schedule)
    client_update = partial(phase.update, server, state.round)
    everyone = np.arange(rows.n_clients)
    for first in range(0, len(everyone), _CLIENTS_AT_ONCE):
        group = everyone[first : first + _CLIENTS_AT_ONCE]
        blocks = workers.cut(rows.blocks(group, schedule, state.round, rng))
        updates = workers(client_update, blocks, state.clients, arrays)
        for block, update in zip(blocks, updates, strict=True):
            _store_update(state, arrays, block, update, protected)
    return {**before, **arrays}


def _store_update(state, arrays, block, update, protected):
    """Put what a block's clients computed into arrays of all clients.

    Under protection a client whose result is not finite keeps what it has.
    """
    finite = block.finite(update.clients, update.losses) if protected else None
    block.keep(arrays, update.clients, finite)
    state.failures |= update.failures


# Workers ------------------------------------------------------------------------------------------


class BlockRunner:
    """Updates of blocks by the workers of a mapper.

    Where these are other processes, they keep the rows, whole or in parts of whole clients. Then a
    block is cut where parts end: what a client computes does not depend on its block.
    """

    def __init__(self, rows: Any, run: BatchMapper):
        self.run, self.n_workers, self.parts = run, run.n_workers, []
        if run.stores and hasattr(rows, "parts"):
            self.bounds, parts = rows.parts(run.n_parts)
            if len(parts) == 1:  # all rows, which stay where they are
                self.parts = [run.store(parts[0])]
            else:  # here no more than one is gathered at a time
                self.parts = [run.store(part, sent=part.gathered()) for part in parts]
        elif run.stores:  # blocks of sparse rows would travel whole, in every round
            self.run, self.n_workers = BatchMapper(1, 1), 1

    def cut(self, blocks: list[Any]) -> list[Any]:
        """The blocks in the order of their clients, such that each has rows of one part."""
        if not self.parts:
            return blocks
        return [piece for block in blocks for piece in block.cut(self.bounds)]

    def __call__(self, update: Any, blocks: list[Any], *arrays: Any) -> list[Any]:
        """Updates of blocks that were cut, from their batches and their part of arrays."""
        states = ([block.states(clients) for clients in arrays] for block in blocks)
        if not self.parts:
            batches = (block.batch for block in blocks)
            return self.run(update, ((b, *s) for b, s in zip(batches, states, strict=True)))
        at = np.searchsorted(self.bounds, [block.chosen.flat[0] for block in blocks], "right") - 1
        tasks = (
            (self.parts[k], *block.numbers(self.bounds[k], self.bounds[k + 1]), *clients_part)
            for k, block, clients_part in zip(at, blocks, states, strict=True)
        )
        costs = [block.chosen.size for block in blocks]
        return self.run(partial(_update_from_rows, update), tasks, costs)


def _update_from_rows(update, rows, chosen, seeds, *states):
    """Update of a block of which a worker has the rows."""
    none = np.zeros(0, dtype=np.intp)
    return update(Block(none, none, rows, chosen, seeds).batch, *states)
