"""Rounds that end by themselves, when the loss of rows that were held out is flat.

Only where nothing is private: the number of rounds and the steps follow the data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn._rounds.loop import DivergenceError, State
from pfl_sklearn._rounds.rows import count_within
from pfl_sklearn._typing import Bools, Integers
from pfl_sklearn._warnings import warn_caller

_FINER = 4  # a check is due whenever the rounds have grown by a quarter
_RISEN = 1.1  # times the training loss before: less is the noise of batches
_FAR_RISEN = 2.0  # times the training loss at the start, or of the best constant
_LOST = 1e3  # times the same: rounds that diverge are soon beyond it, usable models far below
_ROUNDING_OF_ROWS = 1e-9  # rows short of a whole number that are rounding


@dataclass(frozen=True)
class FlatRule:
    """When rounds are over.

    Parameters
    ----------
    losses : callable
        From a state to its training loss and its loss on rows held out.
    tol : float
        Share of `unit` that is to be gained while the rounds double.
    unit : float
        Loss of the best constant predictions, on which the other losses are seen.
    at_least : float
        Rounds before which no loss counts as flat.
    paced : bool
        Whether the server's ``pace`` scales all steps, so that they can be made smaller.
    advice : str
        Sentence to give if the rounds diverge.
    """

    losses: Callable
    tol: float
    unit: float
    at_least: float
    paced: bool
    advice: str

    def gains(self, loss: float, memory: dict[str, Any]) -> bool:
        """Whether a loss is clearly less than the one that counted last."""
        return loss < float(memory["reference"]) - self._least(memory)

    def rises(self, loss: float, memory: dict[str, Any]) -> bool:
        """Whether a training loss has risen, or risen so far that fixed steps diverge.

        It has if it is NaN.
        """
        if self.paced:
            return not loss <= _RISEN * float(memory["trained"]) + self._least(memory)
        return not loss <= _FAR_RISEN * max(float(memory["first"]), self.unit)

    def _least(self, memory):
        """Difference that counts; the loss at the start takes part where a constant is perfect."""
        return self.tol * (self.unit + self.tol * float(memory["first"]))


def run_until_flat(run, state, n_rounds, rule) -> tuple[State, bool]:
    """State of the lowest held-out loss, of at most `n_rounds` rounds, and whether it is flat.

    ``run(state, until)`` runs rounds in place, and is true if somebody else ended them. What was
    seen so far is in the state's memory, so that a checkpoint has it.
    """
    if not state.memory:
        _begin(state, n_rounds, rule)
    while True:
        if run(state, int(state.memory["until"])):
            state.memory = {}
            return state, True
        state, flat = _check(state, rule)
        if flat or int(state.memory["until"]) == state.round:  # none are left
            return state.restored(state.memory), flat


def _begin(state, n_rounds, rule):
    trained, held_out = rule.losses(state)
    state.memory = {
        "first": trained,
        "reference": held_out,
        "gained": state.round,
        **_best_so_far(state, trained, held_out),
        **_ahead(state.round, trained, n_rounds),
    }


def _check(state, rule):
    """Judge the rounds since the last check: the state to go on from, and whether it is flat."""
    memory, left = state.memory, int(state.memory["left"])
    finite = len(state.history["loss"]) == state.round
    trained, held_out = rule.losses(state) if finite else (math.inf, math.inf)
    if rule.rises(trained, memory):
        if not rule.paced:
            raise DivergenceError(f"The rounds diverged: {rule.advice}")
        # Back to the best models, from which smaller steps go on.
        pace = state.server["pace"] / 2
        state = state.restored(memory)
        state.server["pace"] = pace
        state.memory = {**memory, **_ahead(state.round, memory["best_trained"], left)}
        return state, False
    if held_out < memory["best"]:
        memory |= _best_so_far(state, trained, held_out)
    if rule.gains(held_out, memory):
        memory |= {"reference": held_out, "gained": state.round}
    memory |= _ahead(state.round, trained, left)
    return state, state.round >= max(2 * int(memory["gained"]), rule.at_least)


def _ahead(t, trained, left):
    """What is known before the rounds up to the next check, with so many rounds left."""
    step = min(max(t // _FINER, 1), left)  # checks cost a share of the rounds, however many
    return {"trained": trained, "until": t + step, "left": left - step}


def _best_so_far(state, trained, held_out):
    """The models of a state as the best ones so far, and their losses."""
    return {"best": held_out, "best_trained": trained, **state.packed()}


def check_final_loss(
    final_loss: Callable,
    state: State,
    start: Callable[[], State],
    advice: str,
    where: str = "",
) -> None:
    """Raise or warn if rounds led to a training loss far above that of the best constant.

    Rounds that diverge may end before anything overflows. A loss of the same rows that was as high
    before the first round of this call is no sign of that.

    Parameters
    ----------
    final_loss : callable
        From a state to the mean loss of training rows under the models that clients predict with,
        and that of the best constant; None if it is not known.
    state : State
    start : callable
        Returns the state before the first round of this call.
    advice : str
        Sentence that names the learning rate.
    where : str
        Words for the client, if it is known.

    Raises
    ------
    DivergenceError
        If there is no model left to use.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a loss that overflows is one to report
        losses = final_loss(state)
    if losses is None:
        return
    loss, unit = losses
    if loss <= _FAR_RISEN * unit:
        return
    # Of all clients, like the loss: those of a round may have rows of another size.
    reference = max(unit, final_loss(replace(start(), own={}))[0])
    of_constant = f"{loss:.3g}{where}, where the best constant has {unit:.3g}: {advice}"
    # It may be NaN.
    if not loss <= _LOST * reference:
        raise DivergenceError(f"The rounds diverged to a training loss of {of_constant}")
    if loss > _FAR_RISEN * reference:
        warn_caller(
            f"The rounds ended with a training loss of {of_constant}",
            ConvergenceWarning,
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
