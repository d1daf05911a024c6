"""What rounds of an estimator are about: rows, clients, earlier rounds, and where they lead."""

import math
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_random_state

from pfl_sklearn._clients import EncodedClients, match_clients
from pfl_sklearn._rounds.loop import Method, Sampling, State, start
from pfl_sklearn._rounds.stopping import FlatRule


class CheckedTable(NamedTuple):
    """Checked rows: features, targets or labels, and the fitted attributes that follow from them.

    `details` is what else the family read off them.
    """

    features: Any
    y: np.ndarray
    attributes: dict[str, Any]
    details: Any = None


class Roster(NamedTuple):
    """Ids of all clients, positions of the earlier ones and of those with rows now, last round."""

    ids: np.ndarray
    earlier: np.ndarray
    now: np.ndarray
    last: int


class AllRows(NamedTuple):
    """Rows of the last phase where rounds had some of them held out, and what clients know then.

    `clients` are arrays that take the place of constants of the rounds.
    """

    rows: Any
    clients: dict[str, np.ndarray]


class Run(NamedTuple):
    """What rounds need besides a state.

    `release` is that of a round. `positions` are those of the earlier rounds' client arrays in the
    new ones. `found` are fitted attributes that the first
    rounds settled, `layout` is what the family needs to read client arrays, and `advice` is the
    sentence to give if the rounds diverge. With a `rule` they end when it says so.
    `constants` are client arrays that no round changes: those of earlier rounds do not count.
    With `all_rows` the last phase has rows that the rounds have not.
    """

    method: Method
    rows: Any
    sampling: Sampling
    release: Any
    positions: np.ndarray
    found: dict[str, Any]
    layout: Any = None
    advice: str = ""
    rule: FlatRule | None = None
    constants: tuple[str, ...] = ()
    all_rows: AllRows | None = None


class Progress(NamedTuple):
    """Where an estimator's rounds are, so that they can go on.

    `seeded` are the ranges (first, end) of the rounds whose noise came from a `random_state`.
    """

    state: State
    clients: np.ndarray
    n_rows: np.ndarray
    spent: tuple | None
    found: dict[str, Any]
    stopped: bool
    layout: Any
    noise_multiplier: float
    seeded: tuple[tuple[int, int], ...] = ()


class Task(NamedTuple):
    """Data, earlier rounds (or None), and the run on them; `entropy` is that of its rounds."""

    table: CheckedTable
    clients: EncodedClients
    earlier: Progress | None
    roster: Roster
    run: Run
    entropy: tuple[int, ...] | None


def seeds(random_state):
    """Entropy of what is drawn before the rounds, and of the rounds; None twice without a seed."""
    if random_state is None:
        return None, None
    if isinstance(random_state, Integral):
        words = (int(random_state),)
    else:
        words = tuple(check_random_state(random_state).randint(0, 2**31 - 1, size=4).tolist())
    return (*words, 0), (*words, 1)


def sampling_of(kind, client_fraction, n_clients):
    """How clients are sampled.

    Raises
    ------
    ValueError
        If a fixed number of clients would be less than one.
    """
    if kind == "poisson":
        return Sampling(client_fraction)
    n_fixed = math.floor(client_fraction * n_clients * (1 + 1e-12))
    if not n_fixed:
        raise ValueError(
            f"client_fraction={client_fraction!r} of {n_clients} clients is less than one client; "
            "sampling='fixed' needs at least one. Raise it, or use sampling='poisson'."
        )
    return Sampling(n_fixed / n_clients, n_fixed)


def roster_of(earlier, ids, last):
    """Clients of earlier rounds and of those that are to go on to the round `last`."""
    if earlier is None:
        return Roster(ids, np.zeros(0, dtype=np.intp), np.arange(len(ids)), last)
    match_clients(ids, len(ids), earlier.clients)
    both_ids = np.union1d(earlier.clients, ids)
    positions = (np.searchsorted(both_ids, some) for some in (earlier.clients, ids))
    return Roster(both_ids, *positions, last)


def rounds_before(earlier):
    """Arrays that tell earlier rounds from others, by what they left and what they spent."""
    if earlier is None:
        return ()
    return (*earlier.state.packed().values(), np.array(repr(earlier.spent)))


def first_state(task, clip_quantile):
    """State that rounds start from; what earlier rounds left stays as it is.

    A bound that follows a quantile goes on from where it was. Arrays that the method has no use for
    any more, as its parameters changed, are left behind.
    """
    run, n_clients = task.run, len(task.roster.ids)
    state = start(run.method, run.rows, run.release, n_clients)
    if task.earlier is None:
        return state
    old = task.earlier.state.copy()
    for name in (old.clients.keys() & state.clients.keys()) - set(run.constants):
        state.clients[name][run.positions] = old.clients[name]
    own = {}
    for name, values in old.own.items():
        own[name] = np.zeros((n_clients, *values.shape[1:]), dtype=values.dtype)
        own[name][task.roster.earlier] = values
    schedule = state.schedule
    if schedule.keys() == old.schedule.keys():  # else another kind, which starts anew
        resume = run.rows.schedule.resume
        schedule = resume(run.rows, n_clients, old.schedule, task.roster.earlier)
    moving = clip_quantile is not None and math.isfinite(old.bound)
    bound = old.bound if moving else state.bound
    return replace(old, clients=state.clients, schedule=schedule, bound=bound, own=own)


def progress_after(task, state, events, last, noise_multiplier, seeded):
    """Progress of rounds that were to go on to `last`, spending events with so much noise.

    The noise can be drawn again if it is `seeded`, now or in the earlier rounds.
    """
    earlier, roster = task.earlier, task.roster
    n_rows = np.zeros(len(roster.ids), dtype=np.int64)
    spent, stopped, ranges, before = (), state.round < last, (), 0
    if earlier is not None:
        n_rows[roster.earlier] = earlier.n_rows
        spent, stopped = earlier.spent, stopped or earlier.stopped
        ranges, before = earlier.seeded, earlier.state.round
    n_rows[roster.now] += np.bincount(task.clients.codes)
    spent = None if events is None or spent is None else (*spent, *events)
    noise = earlier.noise_multiplier if earlier is not None and last == earlier.state.round else 0.0
    if noise_multiplier:
        noise = noise_multiplier
    if events and seeded:
        ranges = _with_range(ranges, before, state.round)
    run = task.run
    return Progress(state, roster.ids, n_rows, spent, run.found, stopped, run.layout, noise, ranges)


def _with_range(ranges, first, end):
    """Ranges of rounds with another one, which goes on from the last if nothing is between them."""
    if ranges and ranges[-1][1] == first:
        return (*ranges[:-1], (ranges[-1][0], end))
    return (*ranges, (first, end))
