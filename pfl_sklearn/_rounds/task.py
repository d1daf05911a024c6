"""What rounds of an estimator are about: rows, clients, earlier rounds, and where they lead."""

import math
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_random_state

from pfl_sklearn._clients import EncodedClients, match_clients
from pfl_sklearn._rounds.loop import Method, Sampling, State, start
from pfl_sklearn._rounds.rows import Arrays
from pfl_sklearn._rounds.stopping import FlatRule
from pfl_sklearn._typing import Integers, RandomState

_SHORT_OF_WHOLE = 1e-12  # relative: 0.29 of 100 clients, which is 28.999..., counts as 29


class CheckedTable(NamedTuple):
    """Checked rows: features, targets or labels, and the fitted attributes that follow from them.

    `details` is what else the family read off them.
    """

    features: Any
    y: Any
    attributes: dict[str, Any]
    details: Any = None


class Roster(NamedTuple):
    """Ids of all clients, positions of the earlier ones and of those with rows now, last round."""

    ids: np.ndarray
    earlier: Integers
    now: Integers
    last: int


class AllRows(NamedTuple):
    """Rows of the last phase where rounds had some of them held out, and what clients know then.

    `clients` are arrays that take the place of constants of the rounds.
    """

    rows: Any
    clients: Arrays


class Run(NamedTuple):
    """What rounds need besides a state.

    - `release`: that of a round.
    - `positions`: where the arrays of the earlier rounds' clients are in the new ones.
    - `settled`: fitted attributes that the first rounds settled.
    - `layout`: what the family needs to read client arrays.
    - `advice`: the sentence to give if the rounds diverge.
    - `rule`: when the rounds end, if the data decide.
    - `constants`: client arrays that no round changes, so those of earlier rounds do not count.
    - `all_rows`: those of the last phase, if the rounds have only some of them.
    """

    method: Method
    rows: Any
    sampling: Sampling
    release: Any
    positions: Integers
    settled: dict[str, Any]
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
    n_rows: Integers
    spent: tuple | None
    settled: dict[str, Any]
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


def seeds(random_state: RandomState) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Entropy of what is drawn before the rounds, and of the rounds; None twice without a seed."""
    if random_state is None:
        return None, None
    if isinstance(random_state, Integral):
        words = (int(random_state),)
    else:
        words = tuple(check_random_state(random_state).randint(0, 2**31 - 1, size=4).tolist())
    # Apart, so that rounds draw the same whether or not rows were shuffled before.
    return (*words, 0), (*words, 1)


def sampling_of(kind: str, client_fraction: float, n_clients: int) -> Sampling:
    """How clients are sampled.

    Raises
    ------
    ValueError
        If a fixed number of clients would be less than one.
    """
    if kind == "poisson":
        return Sampling(client_fraction)
    n_fixed = math.floor(client_fraction * n_clients * (1 + _SHORT_OF_WHOLE))
    if not n_fixed:
        raise ValueError(
            f"client_fraction={client_fraction!r} of {n_clients} clients is less than one client; "
            "sampling='fixed' needs at least one. Raise it, or use sampling='poisson'."
        )
    return Sampling(n_fixed / n_clients, n_fixed)


def roster_of(earlier: Progress | None, ids: np.ndarray, last: int) -> Roster:
    """Clients of earlier rounds and of those that are to go on to the round `last`."""
    if earlier is None:
        return Roster(ids, np.zeros(0, dtype=np.intp), np.arange(len(ids)), last)
    match_clients(ids, len(ids), earlier.clients)
    everyone = np.union1d(earlier.clients, ids)
    before, now = (np.searchsorted(everyone, group) for group in (earlier.clients, ids))
    return Roster(everyone, before, now, last)


def rounds_before(earlier: Progress | None) -> tuple[np.ndarray, ...]:
    """Arrays that tell earlier rounds from others, by what they left and what they spent."""
    if earlier is None:
        return ()
    return (*earlier.state.packed().values(), np.array(repr(earlier.spent)))


def first_state(task: Task, clip_quantile: float | None) -> State:
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
    own: Arrays = {}
    for name, values in old.own.items():
        own[name] = np.zeros((n_clients, *values.shape[1:]), dtype=values.dtype)
        own[name][task.roster.earlier] = values
    schedule = state.schedule
    if schedule.keys() == old.schedule.keys():  # else another kind, which starts anew
        resume = run.rows.schedule.resume
        schedule = resume(run.rows, n_clients, old.schedule, task.roster.earlier)
    # An infinite bound is of rounds that clipped nothing: there is nothing to go on from.
    moving = clip_quantile is not None and math.isfinite(old.bound)
    bound = old.bound if moving else state.bound
    return replace(old, clients=state.clients, schedule=schedule, bound=bound, own=own)


def progress_after(task, state, events, last, noise_multiplier, seeded):
    """Progress of rounds that were to go on to `last`, spending events with so much noise.

    The noise can be drawn again if it is `seeded`, now or in the earlier rounds.
    """
    earlier, roster = task.earlier, task.roster
    n_rows = np.zeros(len(roster.ids), dtype=np.int64)
    n_rows[roster.now] = np.bincount(task.clients.codes)
    spent, stopped, first, noise = events, state.round < last, 0, noise_multiplier
    ranges: Any = ()
    if earlier is not None:
        n_rows[roster.earlier] += earlier.n_rows
        # Once without noise, no later noise protects: the rounds together spend what is infinite.
        spent = None if None in (events, earlier.spent) else (*earlier.spent, *events)
        stopped, ranges, first = stopped or earlier.stopped, earlier.seeded, earlier.state.round
        if last == first:  # no round was missing, so the noise is that of the rounds before
            noise = noise_multiplier or earlier.noise_multiplier
    if events and seeded:
        if ranges and ranges[-1][1] == first:  # the last range goes on
            *ranges, (first, _) = ranges
        ranges = (*ranges, (first, state.round))
    run = task.run
    return Progress(
        state, roster.ids, n_rows, spent, run.settled, stopped, run.layout, noise, ranges
    )
