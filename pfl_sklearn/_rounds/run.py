"""A fit on rounds: its plan before them, its callbacks during them, its progress after them."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils import check_random_state

from pfl_sklearn._clients import EncodedClients, match_clients
from pfl_sklearn._compat import P, R
from pfl_sklearn._rounds.loop import Entropy, Method, Run, Sampling, State, start
from pfl_sklearn._rounds.privacy import JointSum, is_private
from pfl_sklearn._rounds.rows import Arrays, ClientRows
from pfl_sklearn._rounds.stopping import FinalLoss, FlatRule
from pfl_sklearn._typing import Integers, RandomState
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum

_SHORT_OF_WHOLE = 1e-12  # relative: 0.29 of 100 clients, which is 28.999..., counts as 29
_UNFINISHED = "The fit has not ended."
# Of the clients that a round of the fit averages: with fewer, its mean has twice the variance.
_FEW_CLIENTS = 0.5


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


class FitClients(NamedTuple):
    """Clients with rows in this fit, and those of the rounds that it continues.

    - `ids`: sorted ids of all of them.
    - `codes` (n_rows,): every row's client, counted among those with rows.
    - `now_at`, `earlier_at`: positions in `ids` of those with rows, and of the earlier ones.
    """

    ids: np.ndarray
    codes: Integers
    now_at: Integers
    earlier_at: Integers

    @property
    def now_ids(self) -> np.ndarray:
        """Ids of the clients with rows."""
        return self.ids[self.now_at]


class FitPlan(NamedTuple):
    """A fit before its rounds: what follows from parameters, client ids and earlier rounds.

    - `clients`: whose rounds they are.
    - `earlier`: the :class:`Progress` to go on from, or None.
    - `n_population`: clients of the fit whose population model stays as it is; None: it moves.
    - `n_rounds`: number of the last round, at most; `until_flat`: whether the data end them.
    - `sampling`: who takes part in a round.
    - `setup_seed`: seed of draws before the rounds, such as the order of the rows.
    - `entropy`: seed of the rounds.
    - `events`: what the rounds spend, for the accountant; None without noise.
    - `mechanism`: that of a round; None if nothing is clipped or noised.
    """

    clients: FitClients
    earlier: Progress | None
    n_rounds: int
    sampling: Sampling
    setup_seed: Entropy
    entropy: Entropy
    events: tuple | None = None
    mechanism: ClippedSum | None = None
    until_flat: bool = False
    n_population: int | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the population model stays as it is."""
        return self.n_population is not None

    @property
    def n_expected(self) -> float:
        """Clients expected in a round, or in one of the fit whose population model stays."""
        n_clients = len(self.clients.now_at) if self.n_population is None else self.n_population
        return self.sampling.rate * n_clients


class ModelRounds(NamedTuple):
    """The rounds of a family of models, made from a plan and a table.

    - `method`, `rows`, `release`: what the loop runs.
    - `positions`: where the arrays of the earlier clients are in the new ones.
    - `attributes`: fitted attributes that the rounds do not change.
    - `layout`: what the family needs to read client arrays.
    - `advice`: the sentence to give if the rounds diverge.
    - `final_loss`: as :func:`~pfl_sklearn._rounds.stopping.check_final_loss` takes it; None if
      noise protects the rows, whose loss would reveal something about them.
    - `rule`: when the rounds are over, if the data say so.
    """

    method: Method
    rows: ClientRows
    release: JointSum
    positions: Integers
    attributes: dict[str, Any]
    layout: Any
    advice: str
    final_loss: FinalLoss | None = None
    rule: FlatRule | None = None

    def make_run(self, plan: FitPlan, n_jobs: int | None = None, protected: bool = False) -> Run:
        """The :class:`Run` of these rounds under the plan that they were made from."""
        parts = self.method, self.rows, self.release
        return Run(*parts, plan.sampling, plan.n_rounds, plan.entropy, n_jobs, protected)


# Before the rounds --------------------------------------------------------------------------------


def without_weights(method: Callable[P, R]) -> Callable[P, R]:
    """Method that refuses ``sample_weight`` by the name of the estimator's class."""

    @wraps(method)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> R:
        if "sample_weight" in kwargs:
            raise TypeError(
                f"{type(args[0]).__name__}.{method.__name__} takes no sample_weight: rows of a "
                "client count equally."
            )
        return method(*args, **kwargs)

    return refusing


def rounds_run(earlier: Progress | None) -> int:
    """Number of the rounds so far."""
    return earlier.state.round if earlier else 0


def plan_fit(
    model: Any,
    clients: EncodedClients,
    earlier: Progress | None,
    n_rounds: int,
    events: tuple | None,
    mechanism: ClippedSum | None,
    random_state: RandomState,
    until_flat: bool = False,
) -> FitPlan:
    """Plan of `n_rounds` more rounds, for clients with rows now and those of earlier rounds."""
    setup_seed, entropy = seeds(random_state)
    return FitPlan(
        clients=_join_clients(clients, earlier),
        earlier=earlier,
        n_rounds=n_rounds + rounds_run(earlier),
        sampling=sampling_of(model, len(clients.ids)),
        setup_seed=setup_seed,
        entropy=entropy,
        events=events,
        mechanism=mechanism,
        until_flat=until_flat,
    )


def _join_clients(clients, earlier):
    """Clients with rows now, and those of the earlier rounds if there are any."""
    ids, codes = clients
    if earlier is None:
        return FitClients(ids, codes, np.arange(len(ids)), np.zeros(0, dtype=np.intp))
    match_clients(pd.Categorical(ids), len(ids), earlier.clients)
    joined = np.union1d(earlier.clients, ids)
    positions = (np.searchsorted(joined, group) for group in (ids, earlier.clients))
    return FitClients(joined, codes, *positions)


def seeds(random_state: RandomState) -> tuple[Entropy, Entropy]:
    """Entropy of what is drawn before the rounds, and of the rounds; None twice without a seed."""
    if random_state is None:
        return None, None
    if isinstance(random_state, Integral):
        entropy = (int(random_state),)
    else:
        numbers = check_random_state(random_state).randint(0, 2**31 - 1, size=4)
        entropy = tuple(numbers.tolist())
    # Apart, so that rounds draw the same whether or not rows were shuffled before.
    return (*entropy, 0), (*entropy, 1)


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


def first_state(plan: FitPlan, rounds: ModelRounds, clip_quantile: float | None = None) -> State:
    """State that rounds start from; what earlier rounds left stays as it is.

    A bound that follows a quantile goes on from where it was. Arrays that the method has no use for
    any more, as its parameters changed, are dropped.
    """
    n_clients, earlier_at = len(plan.clients.ids), plan.clients.earlier_at
    state = start(rounds.method, rounds.rows, rounds.release, n_clients)
    if plan.earlier is None:
        return state
    old = plan.earlier.state.copy()
    for name in (old.clients.keys() & state.clients.keys()) - rounds.method.constants.keys():
        state.clients[name][rounds.positions] = old.clients[name]
    phase_arrays: Arrays = {}
    for name, values in old.phase_arrays.items():
        phase_arrays[name] = np.zeros((n_clients, *values.shape[1:]), dtype=values.dtype)
        phase_arrays[name][earlier_at] = values
    schedule = state.schedule
    if schedule.keys() == old.schedule.keys():  # else another kind, which starts anew
        resume = rounds.rows.schedule.resume
        schedule = resume(rounds.rows, n_clients, old.schedule, earlier_at)
    # An infinite bound is of rounds that clipped nothing: there is nothing to go on from.
    follows_quantile = clip_quantile is not None and math.isfinite(old.bound)
    bound = old.bound if follows_quantile else state.bound
    return replace(
        old, clients=state.clients, schedule=schedule, bound=bound, phase_arrays=phase_arrays
    )


def warn_of_few_clients(model: Any, plan: FitPlan) -> None:
    """Warn if rounds of few clients are about to move the models of many."""
    # With noise the number of clients may be a secret, and a warning would reveal it.
    if plan.earlier is None or is_private(model) or not model._communicates:
        return
    n_now, n_before = len(plan.clients.now_at), len(plan.earlier.clients)
    if n_now < _FEW_CLIENTS * model.client_fraction * n_before:
        warn_caller(
            f"partial_fit got rows of {n_now} clients after a fit of {n_before}, and its "
            "rounds move the population model, and so everybody's, towards these alone. To "
            "give clients their own part and leave all others as they are, use personalize.",
            UserWarning,
        )


def arrays_of_fit(table: CheckedTable, plan: FitPlan) -> tuple[Any, ...]:
    """Arrays that a fit's result depends on, by which a checkpoint knows it again."""
    entropy = np.array(plan.entropy or ())
    # Labels, too: a network with more outputs may train other ones for other labels.
    labels = np.array(repr(table.attributes.get("classes_")))
    ids, codes = plan.clients.now_ids, plan.clients.codes
    arrays = (table.features, table.y, labels, ids, codes, entropy)
    if plan.earlier is None:
        return arrays
    # What earlier rounds left and spent identifies them.
    return (*arrays, *plan.earlier.state.packed().values(), np.array(repr(plan.earlier.spent)))


# During the rounds --------------------------------------------------------------------------------


class RoundCallbacks:
    """Runs scikit-learn's callbacks after every round of a fit, and writes the checkpoint if due.

    Callbacks get X, y and groups as given to ``fit``, and the estimator with the attributes that
    ``attributes(state)`` gives and a report without any guarantee. The arrays are views, which the
    next round changes: a callback that keeps them has to copy them. `n_rounds` are still to come.
    ``ended_state(state)`` is the state if the rounds ended there; None: the same state. The last
    phase takes time, so a callback may say by a method ``_looks_after(n_rounds)`` when it looks.

    Attributes
    ----------
    ended : bool
        Whether a callback ended the rounds.
    may_end : bool
        Whether a callback has an attribute ``may_end_rounds``: that it let them go on reveals
        something about the rows as well.
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
        if self._checkpoint is not None:  # also of the last round, however the run ended
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


def progress_after(
    plan: FitPlan, rounds: ModelRounds, state: State, seeded: bool, may_end: bool
) -> Progress:
    """Progress of the estimator when its rounds have led to a state.

    The noise can be drawn again if it is `seeded`, now or in the earlier rounds. A callback that
    `may_end` the rounds counts as one that did.
    """
    earlier, spent, ids = plan.earlier, plan.events, plan.clients.ids
    n_rows = np.zeros(len(ids), dtype=np.int64)
    n_rows[plan.clients.now_at] = np.bincount(plan.clients.codes)
    noise = 0.0 if plan.mechanism is None else plan.mechanism.noise_multiplier
    stopped, first = may_end or state.round < plan.n_rounds, rounds_run(earlier)
    ranges: Any = ()
    if earlier is not None:
        n_rows[plan.clients.earlier_at] += earlier.n_rows
        # Once without noise, no later noise protects: the rounds together spend what is infinite.
        if spent is not None:
            spent = None if earlier.spent is None else (*earlier.spent, *spent)
        stopped, ranges = stopped or earlier.stopped, earlier.seeded
        if plan.n_rounds == first:  # no round was missing, so the noise is that of those before
            noise = noise or earlier.noise_multiplier
    if plan.events and seeded:
        if ranges and ranges[-1][1] == first:  # the last range goes on
            *ranges, (first, _) = ranges
        ranges = (*ranges, (first, state.round))
    attributes, layout = rounds.attributes, rounds.layout
    return Progress(state, ids, n_rows, spent, attributes, stopped, layout, noise, ranges)
