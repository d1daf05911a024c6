"""How rounds end: after their number, when the loss of held-out rows is flat, or by diverging.

Rounds end by their loss only where nothing is private: their number and their steps follow the
data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn._rounds.loop import DivergenceError, Run, State, run_last_phase, run_rounds
from pfl_sklearn._rounds.rows import Arrays, count_within, finite_clients
from pfl_sklearn._typing import Bools, Integers
from pfl_sklearn._warnings import warn_caller

# From a state to the mean loss of training rows under the models that clients predict with, and to
# that of the best constant; None if these are not known.
FinalLoss: TypeAlias = Callable[[State], tuple[float, float] | None]

_CHECKS_PER_DOUBLING = 4  # a check is due whenever the rounds have grown by a quarter
_RISEN = 1.1  # times the training loss before: less is the noise of batches
_DIVERGING = 2.0  # times the training loss at the start, or of the best constant
_HOPELESS = 1e3  # times the same: rounds that diverge are soon beyond it, usable models far below
_ROUNDING_OF_ROWS = 1e-9  # rows short of a whole number that are rounding


@dataclass(frozen=True)
class FlatRule:
    """When rounds are over.

    - ``losses(state)``: training loss and loss on held-out rows.
    - `tol`: share of `unit` that is to be gained while the rounds double.
    - `unit`: loss of the best constant predictions, against which other losses are judged.
    - `at_least`: rounds before which no loss counts as flat.
    - `paced`: whether the server's ``pace`` scales all steps, so that they can be made smaller.
    - `advice`: the sentence to give if the rounds diverge.
    - `all_rows`: rows of the last phase, the held-out ones included; None: those of the rounds.
    - `all_constants`: client arrays that replace the method's constants in the last phase.
    """

    losses: Callable
    tol: float
    unit: float
    at_least: float
    paced: bool
    advice: str
    all_rows: Any = None
    all_constants: Arrays = field(default_factory=dict)

    def gains(self, loss: float, memory: dict[str, Any]) -> bool:
        """Whether a loss is clearly less than the one that counted last."""
        return loss < float(memory["reference"]) - self._least(memory)

    def rises(self, loss: float, memory: dict[str, Any]) -> bool:
        """Whether a training loss has risen, or risen so far that fixed steps diverge.

        It has if it is NaN.
        """
        if self.paced:
            return not loss <= _RISEN * float(memory["trained"]) + self._least(memory)
        return not loss <= _DIVERGING * max(float(memory["first"]), self.unit)

    def _least(self, memory):
        """Difference that counts; the loss at the start takes part where a constant is perfect."""
        return self.tol * (self.unit + self.tol * float(memory["first"]))


def run_to_end(run: Run, state: State, observe: Any, rule: FlatRule | None) -> tuple[State, bool]:
    """State after the last round of a run or an earlier end, and whether it ended as it should.

    `observe` is the :class:`~pfl_sklearn._rounds.run.RoundCallbacks` of the fit.
    """
    if rule is None:
        return run_rounds(run, state, observe), True
    alone = run._replace(method=run.method._replace(last_phase=None), protected=False)

    def run_on(state, until):
        run_rounds(alone._replace(n_rounds=until), state, observe)
        return observe.ended

    state, flat = _run_until_flat(run_on, state, run.n_rounds - state.round, rule)
    return with_last_phase(run, state, {}, rule), flat


def with_last_phase(run: Run, state: State, earlier_arrays: Arrays, rule: FlatRule | None) -> State:
    """The state after what clients do when the rounds are over, if they ended here.

    `earlier_arrays` are those that an earlier last phase left to clients without rows.
    """
    phase, rows = run.method.last_phase, run.rows
    if phase is None:
        return state
    if rule is not None:  # held-out rows are trained on, too
        rows = rule.all_rows or rows
        state = replace(state, clients={**state.clients, **rule.all_constants})
    arrays = run_last_phase(
        phase, rows, state, run.entropy, earlier_arrays, run.n_jobs, run.protected
    )
    return replace(state, phase_arrays=arrays)


def _run_until_flat(run, state, n_rounds, rule) -> tuple[State, bool]:
    """State of the lowest held-out loss, of at most `n_rounds` rounds, and whether it is flat.

    ``run(state, until)`` runs rounds in place, and is true if somebody else ended them. What was
    seen so far is in the state's memory, so that a checkpoint has it.
    """
    if not state.memory:
        start_memory(state, n_rounds, rule)
    while True:
        if run(state, int(state.memory["until"])):
            state.memory = {}
            return state, True
        state, flat = check_flat(state, rule)
        if flat or int(state.memory["until"]) == state.round:  # none are left
            return state.restored(state.memory), flat


def start_memory(state, n_rounds, rule):
    trained, held_out = rule.losses(state)
    state.memory = {
        "first": trained,
        "reference": held_out,
        "gained": state.round,
        **best_models(state, trained, held_out),
        **next_check(state.round, trained, n_rounds),
    }


def check_flat(state, rule):
    """Judge the rounds since the last check: the state to go on from, and whether it is flat."""
    memory, remaining = state.memory, int(state.memory["left"])
    finite = len(state.history["loss"]) == state.round
    trained, held_out = rule.losses(state) if finite else (math.inf, math.inf)
    if rule.rises(trained, memory):
        if not rule.paced:
            raise DivergenceError(f"The rounds diverged: {rule.advice}")
        # Back to the best models, from which smaller steps go on.
        pace = state.server["pace"] / 2
        state = state.restored(memory)
        state.server["pace"] = pace
        state.memory = {**memory, **next_check(state.round, memory["best_trained"], remaining)}
        return state, False
    if held_out < memory["best"]:
        memory |= best_models(state, trained, held_out)
    if rule.gains(held_out, memory):
        memory |= {"reference": held_out, "gained": state.round}
    memory |= next_check(state.round, trained, remaining)
    return state, state.round >= max(2 * int(memory["gained"]), rule.at_least)


def next_check(t, trained, remaining):
    """What is known before the rounds up to the next check, with so many rounds left."""
    step = min(
        max(t // _CHECKS_PER_DOUBLING, 1), remaining
    )  # checks cost a share of the rounds, however many
    return {"trained": trained, "until": t + step, "left": remaining - step}


def best_models(state, trained, held_out):
    """The models of a state as the best ones so far, and their losses."""
    return {"best": held_out, "best_trained": trained, **state.packed()}


def check_converged(state: State, ids: np.ndarray, advice: str, protected: bool) -> None:
    """Raise DivergenceError if the rounds diverged; under protection, by what is released alone.

    Otherwise the message names the round, counted from 0, and the ids of clients.
    """
    finite = _all_finite(state.server)
    if not protected:
        finite &= _all_finite(state.clients) and _all_finite(state.phase_arrays)
        finite &= len(state.history["loss"]) == state.round
    if not finite:
        where = "" if protected else _where_diverged(state, ids)
        raise DivergenceError(f"The rounds diverged{where}: {advice}")


def _where_diverged(state, ids):
    """Round and clients at which rounds diverged, for the message, as far as they are known."""
    diverged = state.diverged
    when = f" in round {state.round} (counted from 0)"
    if not len(diverged):  # the losses were finite, and the steps after them were not
        when = f" after {state.round} round{'' if state.round == 1 else 's'}"
        diverged = np.flatnonzero(~finite_clients((state.clients | state.phase_arrays).values()))
    if not len(diverged):  # the server's arrays alone
        return when
    clients = f"client {ids[diverged[0]]}"
    if len(diverged) > 1:
        clients = f"{len(diverged)} clients, the first of them {ids[diverged[0]]}"
    return f"{when}, at {clients}"


def _all_finite(arrays):
    """Whether all numbers are finite; no array of the size of the clients' models is made."""
    ends = [f(initial=0) for values in arrays.values() for f in (values.min, values.max)]
    return bool(np.isfinite(ends).all())


def check_final_loss(
    final_loss: FinalLoss | None,
    state: State,
    start: Callable[[], State],
    advice: str,
    where: str = "",
) -> None:
    """Raise or warn if rounds led to a training loss far above that of the best constant.

    Rounds that diverge may end before anything overflows. A loss of the same rows that was as high
    before the first round of this call is no sign of that.

    ``start()`` gives the state before the first round of this call; `where` names the client, if it
    is known, for the message. Raises DivergenceError if the models are of no use.
    """
    if final_loss is None:
        return
    with np.errstate(over="ignore", invalid="ignore"):  # a loss that overflows is one to report
        losses = final_loss(state)
    if losses is None:
        return
    loss, unit = losses
    if loss <= _DIVERGING * unit:
        return
    # Of all clients, like the loss: those of a round may have rows of another size.
    at_start = final_loss(replace(start(), phase_arrays={}))
    reference = max(unit, at_start[0])  # type: ignore[index]  # known here, as after the rounds
    comparison = f"{loss:.3g}{where}, where the best constant has {unit:.3g}: {advice}"
    # It may be NaN.
    if not loss <= _HOPELESS * reference:
        raise DivergenceError(f"The rounds diverged to a training loss of {comparison}")
    if loss > _DIVERGING * reference:
        warn_caller(
            f"The rounds ended with a training loss of {comparison}",
            ConvergenceWarning,
        )


def warn_of_failures(model: Any, kinds: frozenset[str]) -> None:
    """Warn of exceptions that did not end a fit with noise, by their classes alone.

    Their clients, number and round, or the text of an exception, would reveal more.
    """
    if kinds:
        warn_caller(
            f"In this {type(model).__name__} with noise, training failed on rows of some client "
            f"({', '.join(sorted(kinds))}). Such a client counts as 0 and keeps the model that "
            "it had. To see the error, fit rows that you may look at without noise. The noise "
            "does not cover this warning: do not publish it.",
            RuntimeWarning,
        )


def split_rows(codes, n_clients, fraction=0.0, rng=None) -> tuple[Integers, Integers]:
    """Positions of rows to train on and of rows held out, both in client order.

    A generator puts each client's rows in random order first, so that any of them may be held out.
    """
    by_client, _ = rows_by_client(codes, n_clients)
    if rng is not None:
        by_client = by_client[np.lexsort((rng.random(len(by_client)), codes[by_client]))]
    held = rows_held_out(np.bincount(codes), fraction)
    return by_client[~held], by_client[held]


def rows_held_out(sizes: Integers, fraction: float) -> Bools:
    """Which rows in client order are held out: of each client its last, but never all.

    A client of few rows has some of them held out as often as makes up the fraction of all rows.
    """
    due = np.floor(np.cumsum(sizes) * fraction + _ROUNDING_OF_ROWS).astype(np.intp)
    counts = np.minimum(np.diff(due, prepend=0), sizes - 1)
    return count_within(sizes) >= np.repeat(sizes - counts, sizes)
