"""One run of rounds: what it is made of, where it starts, who watches it, and where it leads."""

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils import check_random_state

from pfl_sklearn._clients import EncodedClients, match_clients
from pfl_sklearn._rounds.loop import (
    Method,
    Plan,
    Sampling,
    State,
    run_last_phase,
    run_rounds,
    start,
)
from pfl_sklearn._rounds.rows import Arrays
from pfl_sklearn._rounds.stopping import FlatRule, run_until_flat
from pfl_sklearn._typing import Integers, RandomState
from pfl_sklearn.privacy import PrivacyReport

_SHORT_OF_WHOLE = 1e-12  # relative: 0.29 of 100 clients, which is 28.999..., counts as 29
_UNFINISHED = "The fit has not ended."


class CheckedTable(NamedTuple):
    """Checked rows: features, targets or labels, and the fitted attributes that follow from them.

    `n_outputs` is the number of outputs that a model of these targets has.
    """

    features: Any
    y: Any
    attributes: dict[str, Any]
    n_outputs: int = 1


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


class RoundsAhead(NamedTuple):
    """The rounds to come: whose they are, what they go on from, how far, and with what noise.

    - `clients`: those with rows now, and the code of every row.
    - `earlier`: the rounds before, or None.
    - `ids`: sorted ids of all clients, of then and now.
    - `earlier_at`, `now_at`: positions among them of the earlier clients and of those with rows.
    - `last`: number of the last round, at most.
    - `until_flat`: whether the data say when the rounds are over.
    - `events`: what the rounds spend, for the accountant; None without noise.
    - `mechanism`: that of a round; None if nothing is clipped or noised.
    - `order`: entropy of what is drawn before the rounds, such as the order of the rows.
    - `entropy`: that of the rounds. Both are None if the operating system's is to be drawn.
    - `n_population`: clients of the fit whose population model stays as it is; None: it moves.
    """

    clients: EncodedClients
    earlier: Progress | None
    ids: np.ndarray
    earlier_at: Integers
    now_at: Integers
    last: int
    until_flat: bool
    events: tuple | None
    mechanism: Any
    order: tuple[int, ...] | None
    entropy: tuple[int, ...] | None
    n_population: int | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the population model stays as it is."""
        return self.n_population is not None

    @property
    def n_sampled_from(self) -> int:
        """Clients among whom a round samples, or did in the fit whose model stays."""
        return len(self.clients.ids) if self.n_population is None else self.n_population


class Run(NamedTuple):
    """What rounds need besides a state.

    - `release`: that of a round.
    - `positions`: where the arrays of the earlier rounds' clients are in the new ones.
    - `settled`: fitted attributes that the first rounds settled.
    - `layout`: what the family needs to read client arrays.
    - `advice`: the sentence to give if the rounds diverge.
    - `final_loss`: what tells whether they did and stayed finite, as
      :func:`~pfl_sklearn._rounds.stopping.check_final_loss` takes it; None if noise protects the
      rows, whose loss would reveal something about them.
    - `rule`: when the rounds end, if the data decide.
    - `rows_after`: rows of the last phase, if the rounds had some of them held out.
    - `constants_after`: client arrays that take the place of the method's constants then.
    """

    method: Method
    rows: Any
    sampling: Sampling
    release: Any
    positions: Integers
    settled: dict[str, Any]
    layout: Any = None
    advice: str = ""
    final_loss: Callable | None = None
    rule: FlatRule | None = None
    rows_after: Any = None
    constants_after: Arrays = {}


# Before the rounds --------------------------------------------------------------------------------


def rounds_run(earlier: Progress | None) -> int:
    """Number of the rounds so far."""
    return earlier.state.round if earlier else 0


def rounds_ahead(
    clients: EncodedClients,
    earlier: Progress | None,
    n_rounds: int,
    events: Any,
    mechanism: Any,
    random_state: RandomState,
    until_flat: bool = False,
) -> RoundsAhead:
    """The `n_rounds` rounds to come of clients with rows now, and of those of earlier rounds."""
    ids, now = clients.ids, np.arange(len(clients.ids))
    before = np.zeros(0, dtype=np.intp)
    if earlier is not None:
        match_clients(pd.Categorical(clients.ids), len(clients.ids), earlier.clients)
        ids = np.union1d(earlier.clients, clients.ids)
        before, now = (np.searchsorted(ids, group) for group in (earlier.clients, clients.ids))
    last, drawn = n_rounds + rounds_run(earlier), seeds(random_state)
    return RoundsAhead(
        clients, earlier, ids, before, now, last, until_flat, events, mechanism, *drawn
    )


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


def sampling_of(
    kind: str, client_fraction: float, n_clients: int, dropped: float = 0.0
) -> Sampling:
    """How clients are sampled, and what share of them is dropped.

    Raises
    ------
    ValueError
        If a fixed number of clients would be less than one.
    """
    if kind == "poisson":
        return Sampling(client_fraction, dropped=dropped)
    n_fixed = math.floor(client_fraction * n_clients * (1 + _SHORT_OF_WHOLE))
    if not n_fixed:
        raise ValueError(
            f"client_fraction={client_fraction!r} of {n_clients} clients is less than one client; "
            "sampling='fixed' needs at least one. Raise it, or use sampling='poisson'."
        )
    return Sampling(n_fixed / n_clients, n_fixed, dropped)


def first_state(run: Run, ahead: RoundsAhead, clip_quantile: float | None) -> State:
    """State that rounds start from; what earlier rounds left stays as it is.

    A bound that follows a quantile goes on from where it was. Arrays that the method has no use for
    any more, as its parameters changed, are left behind.
    """
    n_clients = len(ahead.ids)
    state = start(run.method, run.rows, run.release, n_clients)
    if ahead.earlier is None:
        return state
    old = ahead.earlier.state.copy()
    for name in (old.clients.keys() & state.clients.keys()) - run.method.constants.keys():
        state.clients[name][run.positions] = old.clients[name]
    own: Arrays = {}
    for name, values in old.own.items():
        own[name] = np.zeros((n_clients, *values.shape[1:]), dtype=values.dtype)
        own[name][ahead.earlier_at] = values
    schedule = state.schedule
    if schedule.keys() == old.schedule.keys():  # else another kind, which starts anew
        resume = run.rows.schedule.resume
        schedule = resume(run.rows, n_clients, old.schedule, ahead.earlier_at)
    # An infinite bound is of rounds that clipped nothing: there is nothing to go on from.
    moving = clip_quantile is not None and math.isfinite(old.bound)
    bound = old.bound if moving else state.bound
    return replace(old, clients=state.clients, schedule=schedule, bound=bound, own=own)


def depends_on(table: CheckedTable, ahead: RoundsAhead) -> tuple[Any, ...]:
    """Arrays that a run's result depends on, by which a checkpoint knows it again."""
    entropy = np.array(ahead.entropy or ())
    # Labels, too: a net with more outputs may train other ones for other labels.
    labels = np.array(repr(table.attributes.get("classes_")))
    rows = (table.features, table.y, labels, *ahead.clients, entropy)
    if ahead.earlier is None:
        return rows
    # Earlier rounds are told from others by what they left and what they spent.
    return (*rows, *ahead.earlier.state.packed().values(), np.array(repr(ahead.earlier.spent)))


# During the rounds --------------------------------------------------------------------------------


class Watch:
    """Observer of a fit's rounds: runs scikit-learn's callbacks, and writes the checkpoint if due.

    Parameters
    ----------
    estimator : estimator
        With scikit-learn's callback support, inside its ``fit``.
    X, y, groups
        As given to ``fit``, for the callbacks.
    n_rounds : int
        Rounds to come.
    attributes : callable
        From a state to the fitted attributes that make the estimator ready to predict.
    checkpoint : Checkpoint or None
    ended : callable or None
        From a state to what it would be if the rounds ended there: see :func:`as_if_ended`. None:
        it would be the same.

    Attributes
    ----------
    ended : bool
        Whether a callback ended the rounds.
    may_end : bool
        Whether a callback says that it ends rounds, by an attribute ``may_end_rounds``: that it
        did not end them tells of the rows as well.

    Notes
    -----
    Callbacks see the estimator with these attributes and a report that promises nothing. The
    arrays are views of the state, which the next round changes: a callback that keeps what it sees
    has to copy it. What clients do after the rounds takes its time, so a callback may say by a
    method ``_looks_after(n_rounds)`` in which rounds it looks.
    """

    def __init__(self, estimator, X, y, groups, n_rounds, attributes, checkpoint=None, ended=None):
        self._context = estimator._init_callback_context(max_subtasks=n_rounds)
        self._attributes, self._ended_here = attributes, ended
        self._checkpoint, self.ended = checkpoint, False
        callbacks = getattr(estimator, "_skl_callbacks", [])
        self._callbacks, self._has_callbacks = callbacks, bool(callbacks)
        self.may_end = any(getattr(each, "may_end_rounds", False) for each in callbacks)
        metadata = None if groups is None else {"groups": groups}
        self._shared = {"estimator": estimator, "X": X, "y": y, "metadata": metadata}
        if self._has_callbacks:
            self._context.call_on_fit_task_begin(**self._shared)

    def __call__(self, state: State) -> bool:
        if self._has_callbacks:
            self.ended = bool(self._run_callbacks(state))
        if self._checkpoint is not None:  # also of the last round, whoever ended the run
            self._checkpoint.observe(state)
        return self.ended

    def end(self) -> None:
        """Tell the callbacks that the fit has ended."""
        if self._has_callbacks:
            self._context.call_on_fit_task_end(**self._shared)

    def _run_callbacks(self, state):
        def visible():
            # Rounds that go on may still leak, so nothing is promised yet.
            unfinished = PrivacyReport.unprotected(_UNFINISHED)
            seen, shown = {"privacy_": unfinished, "n_rounds_": state.round}, state.view()
            if any(_looks_after(each, state.round) for each in self._callbacks):
                shown = shown if self._ended_here is None else self._ended_here(shown)
            return {**seen, **self._attributes(shown)}

        task = self._context.subcontext(task_name="round")
        task.call_on_fit_task_begin(**self._shared)
        return task.call_on_fit_task_end(**self._shared, reconstruction_attributes=visible)


def _looks_after(callback, n_rounds):
    """Whether a callback is to see models after so many rounds; true if it does not say."""
    return getattr(callback, "_looks_after", lambda n_rounds: True)(n_rounds)


def as_if_ended(run: Run, state: State, plan: Plan, left: Arrays, protected: bool) -> State:
    """The state after what clients do when the rounds are over, if they ended here.

    An earlier call `left` what clients without rows keep; `protected` is as
    :func:`~pfl_sklearn._rounds.loop.run_rounds` takes it.
    """
    phase = run.method.last_phase
    if phase is None:
        return state
    rows = run.rows if run.rows_after is None else run.rows_after
    state = replace(state, clients={**state.clients, **run.constants_after})
    return replace(state, own=run_last_phase(phase, rows, state, plan, left, protected))


def run_to_end(
    run: Run, state: State, plan: Plan, watch: Watch, protected: bool
) -> tuple[State, bool]:
    """State after the last round of the plan or an earlier end, and whether it ended as it should.

    `protected` is as :func:`~pfl_sklearn._rounds.loop.run_rounds` takes it.
    """
    if run.rule is None:
        run_rounds(run.method, run.rows, state, plan, run.release, watch, protected)
        return state, True
    alone = run.method._replace(last_phase=None)

    def run_on(state, until):
        there = plan._replace(n_rounds=until)
        run_rounds(alone, run.rows, state, there, run.release, watch)
        return watch.ended

    state, flat = run_until_flat(run_on, state, plan.n_rounds - state.round, run.rule)
    return as_if_ended(run, state, plan, {}, False), flat


# After the rounds ---------------------------------------------------------------------------------


def progress_after(
    run: Run, ahead: RoundsAhead, state: State, seeded: bool, may_end: bool
) -> Progress:
    """Progress of the estimator when the rounds have led to a state.

    The noise can be drawn again if it is `seeded`, now or in the earlier rounds. A callback that
    `may_end` them counts as one that did.
    """
    earlier, events = ahead.earlier, ahead.events
    n_rows = np.zeros(len(ahead.ids), dtype=np.int64)
    n_rows[ahead.now_at] = np.bincount(ahead.clients.codes)
    noise = 0.0 if ahead.mechanism is None else ahead.mechanism.noise_multiplier
    spent, stopped, first = events, may_end or state.round < ahead.last, rounds_run(earlier)
    ranges: Any = ()
    if earlier is not None:
        n_rows[ahead.earlier_at] += earlier.n_rows
        # Once without noise, no later noise protects: the rounds together spend what is infinite.
        spent = None
        if events is not None and earlier.spent is not None:
            spent = (*earlier.spent, *events)
        stopped, ranges = stopped or earlier.stopped, earlier.seeded
        if ahead.last == first:  # no round was missing, so the noise is that of the rounds before
            noise = noise or earlier.noise_multiplier
    if events and seeded:
        if ranges and ranges[-1][1] == first:  # the last range goes on
            *ranges, (first, _) = ranges
        ranges = (*ranges, (first, state.round))
    return Progress(
        state, ahead.ids, n_rows, spent, run.settled, stopped, run.layout, noise, ranges
    )
