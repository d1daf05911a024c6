"""Before, during and after a run: its description, its callbacks, and the progress it leaves."""

import math
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils import check_random_state

from pfl_sklearn._clients import EncodedClients, match_clients
from pfl_sklearn._rounds.loop import Run, Sampling, State, start
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.rows import Arrays
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
    """Where an estimator's rounds are: what a fit keeps so that they can go on.

    - `state`: that of the loop after the last round.
    - `clients`: their sorted ids; `n_rows` (n_clients,): rows of each of them.
    - `spent`: accounting events of all rounds; None if some had no noise.
    - `attributes`: fitted attributes that further rounds do not change.
    - `stopped`: whether a callback ended rounds, or could have.
    - `layout`: what the family needs to read client arrays.
    - `noise_multiplier`: that of the last call.
    - `seeded`: ranges (first, end) of the rounds whose noise came from a `random_state`.
    """

    state: State
    clients: np.ndarray
    n_rows: Integers
    spent: tuple | None
    attributes: dict[str, Any]
    stopped: bool
    layout: Any
    noise_multiplier: float
    seeded: tuple[tuple[int, int], ...] = ()


# Before the rounds --------------------------------------------------------------------------------


def rounds_run(earlier: Progress | None) -> int:
    """Number of the rounds so far."""
    return earlier.state.round if earlier else 0


def describe_run(
    model: Any,
    clients: EncodedClients,
    earlier: Progress | None,
    n_rounds: int,
    events: Any,
    mechanism: Any,
    random_state: RandomState,
    until_flat: bool = False,
) -> Run:
    """A run of `n_rounds` more rounds of clients with rows now, and of those of earlier rounds.

    The family of the model adds the method, the rows and the release.
    """
    ids, now_at = clients.ids, np.arange(len(clients.ids))
    earlier_at = np.zeros(0, dtype=np.intp)
    if earlier is not None:
        match_clients(pd.Categorical(clients.ids), len(clients.ids), earlier.clients)
        ids = np.union1d(earlier.clients, clients.ids)
        earlier_at, now_at = (
            np.searchsorted(ids, group) for group in (earlier.clients, clients.ids)
        )
    order, entropy = seeds(random_state)
    return Run(
        n_rounds=n_rounds + rounds_run(earlier),
        sampling=sampling_of(model, len(clients.ids)),
        entropy=entropy,
        n_jobs=model.n_jobs,
        protected=is_private(model),
        clients=clients,
        ids=ids,
        earlier=earlier,
        earlier_at=earlier_at,
        now_at=now_at,
        order=order,
        events=events,
        mechanism=mechanism,
        until_flat=until_flat,
        positions=earlier_at,
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


def sampling_of(model: Any, n_clients: int) -> Sampling:
    """How the model's parameters say that clients are sampled.

    Raises ValueError if a fixed number of clients would be less than one.
    """
    fraction = model.client_fraction
    if model.sampling == "poisson":
        return Sampling(fraction, dropped=model.drop_fraction)
    n_fixed = math.floor(fraction * n_clients * (1 + _SHORT_OF_WHOLE))
    if not n_fixed:
        raise ValueError(
            f"client_fraction={fraction!r} of {n_clients} clients is less than one client; "
            "sampling='fixed' needs at least one. Raise it, or use sampling='poisson'."
        )
    return Sampling(n_fixed / n_clients, n_fixed, model.drop_fraction)


def first_state(run: Run, clip_quantile: float | None) -> State:
    """State that rounds start from; what earlier rounds left stays as it is.

    A bound that follows a quantile goes on from where it was. Arrays that the method has no use for
    any more, as its parameters changed, are left behind.
    """
    n_clients = len(run.ids)
    state = start(run.method, run.rows, run.release, n_clients)
    if run.earlier is None:
        return state
    old = run.earlier.state.copy()
    for name in (old.clients.keys() & state.clients.keys()) - run.method.constants.keys():
        state.clients[name][run.positions] = old.clients[name]
    own: Arrays = {}
    for name, values in old.own.items():
        own[name] = np.zeros((n_clients, *values.shape[1:]), dtype=values.dtype)
        own[name][run.earlier_at] = values
    schedule = state.schedule
    if schedule.keys() == old.schedule.keys():  # else another kind, which starts anew
        resume = run.rows.schedule.resume
        schedule = resume(run.rows, n_clients, old.schedule, run.earlier_at)
    # An infinite bound is of rounds that clipped nothing: there is nothing to go on from.
    moving = clip_quantile is not None and math.isfinite(old.bound)
    bound = old.bound if moving else state.bound
    return replace(old, clients=state.clients, schedule=schedule, bound=bound, own=own)


def arrays_of_run(table: CheckedTable, run: Run) -> tuple[Any, ...]:
    """Arrays that a run's result depends on, by which a checkpoint knows it again."""
    entropy = np.array(run.entropy or ())
    # Labels, too: a net with more outputs may train other ones for other labels.
    labels = np.array(repr(table.attributes.get("classes_")))
    rows = (table.features, table.y, labels, *run.clients, entropy)
    if run.earlier is None:
        return rows
    # What earlier rounds left and spent identifies them.
    return (*rows, *run.earlier.state.packed().values(), np.array(repr(run.earlier.spent)))


# During the rounds --------------------------------------------------------------------------------


class RoundCallbacks:
    """Runs scikit-learn's callbacks after every round of a fit, and writes the checkpoint if due.

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
    ended_state : callable or None
        From a state to what it would be if the rounds ended there; None: it would be the same.

    Attributes
    ----------
    ended : bool
        Whether a callback ended the rounds.
    may_end : bool
        Whether a callback has an attribute ``may_end_rounds``: that it let them go on reveals
        something about the rows as well.

    Notes
    -----
    Callbacks see the estimator with these attributes and a report without any guarantee. The arrays
    are views of the state, which the next round changes: a callback that keeps them has to copy
    them. The last phase takes its time, so a callback may say by a method
    ``_looks_after(n_rounds)`` after which rounds it looks.
    """

    def __init__(
        self, estimator, X, y, groups, n_rounds, attributes, checkpoint=None, ended_state=None
    ):
        self._context = estimator._init_callback_context(max_subtasks=n_rounds)
        self._attributes, self._ended_state = attributes, ended_state
        self._checkpoint, self.ended = checkpoint, False
        self._callbacks = getattr(estimator, "_skl_callbacks", [])
        self.may_end = any(getattr(call, "may_end_rounds", False) for call in self._callbacks)
        metadata = None if groups is None else {"groups": groups}
        self._shared = {"estimator": estimator, "X": X, "y": y, "metadata": metadata}
        if self._callbacks:
            self._context.call_on_fit_task_begin(**self._shared)

    def __call__(self, state: State) -> bool:
        if self._callbacks:
            self.ended = bool(self._run_callbacks(state))
        if self._checkpoint is not None:  # also of the last round, whoever ended the run
            self._checkpoint.observe(state)
        return self.ended

    def end(self) -> None:
        """Tell the callbacks that the fit has ended."""
        if self._callbacks:
            self._context.call_on_fit_task_end(**self._shared)

    def _run_callbacks(self, state):
        def visible():
            shown = state.view()
            # A callback that does not say when it looks sees the model of every round.
            looks = (getattr(call, "_looks_after", lambda n: True) for call in self._callbacks)
            if any(look(state.round) for look in looks) and self._ended_state is not None:
                shown = self._ended_state(shown)
            # Rounds that go on may still leak, so nothing is promised yet.
            report = PrivacyReport.unprotected(_UNFINISHED)
            return {"privacy_": report, "n_rounds_": state.round, **self._attributes(shown)}

        task = self._context.subcontext(task_name="round")
        task.call_on_fit_task_begin(**self._shared)
        return task.call_on_fit_task_end(**self._shared, reconstruction_attributes=visible)


# After the rounds ---------------------------------------------------------------------------------


def progress_after(run: Run, state: State, seeded: bool, may_end: bool) -> Progress:
    """Progress of the estimator when a run has led to a state.

    The noise can be drawn again if it is `seeded`, now or in the earlier rounds. A callback that
    `may_end` the rounds counts as one that did.
    """
    earlier, events = run.earlier, run.events
    n_rows = np.zeros(len(run.ids), dtype=np.int64)
    n_rows[run.now_at] = np.bincount(run.clients.codes)
    noise = 0.0 if run.mechanism is None else run.mechanism.noise_multiplier
    spent, stopped, first = events, may_end or state.round < run.n_rounds, rounds_run(earlier)
    ranges: Any = ()
    if earlier is not None:
        n_rows[run.earlier_at] += earlier.n_rows
        # Once without noise, no later noise protects: the rounds together spend what is infinite.
        spent = None
        if events is not None and earlier.spent is not None:
            spent = (*earlier.spent, *events)
        stopped, ranges = stopped or earlier.stopped, earlier.seeded
        if run.n_rounds == first:  # no round was missing, so the noise is that of those before
            noise = noise or earlier.noise_multiplier
    if events and seeded:
        if ranges and ranges[-1][1] == first:  # the last range goes on
            *ranges, (first, _) = ranges
        ranges = (*ranges, (first, state.round))
    return Progress(
        state, run.ids, n_rows, spent, run.attributes, stopped, run.layout, noise, ranges
    )
