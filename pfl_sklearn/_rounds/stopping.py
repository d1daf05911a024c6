"""Rounds that end by themselves, when the loss of rows that were held out is flat.

Only where nothing is private: the number of rounds and the steps follow the data.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from pfl_sklearn._rounds.loop import DivergenceError

_FINER = 4  # a check is due whenever the rounds have grown by a quarter
_RISEN = 1.1  # times the training loss before: less is the noise of batches
_DIVERGED = 2.0  # times the training loss at the start, or of the best constant


class FlatRule(NamedTuple):
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

    def gains(self, loss, memory):
        """Whether a loss is clearly less than the one that counted last."""
        return loss < float(memory["reference"]) - self._least(memory)

    def rises(self, loss, memory):
        """Whether a training loss has risen, or risen so far that fixed steps diverge."""
        if self.paced:
            return not loss <= _RISEN * float(memory["trained"]) + self._least(memory)
        return not loss <= _DIVERGED * max(float(memory["first"]), self.unit)

    def _least(self, memory):
        """Difference that counts; the loss at the start takes part where a constant is perfect."""
        return self.tol * (self.unit + self.tol * float(memory["first"]))


def run_until_flat(run, state, n_rounds, rule):
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
        **_kept(state, trained, held_out),
        **_ahead(state.round, trained, n_rounds),
    }


def _check(state, rule):
    """State to go on from, and whether the loss is flat."""
    memory, left = state.memory, int(state.memory["left"])
    finite = len(state.history["loss"]) == state.round
    trained, held_out = rule.losses(state) if finite else (math.inf, math.inf)
    if rule.rises(trained, memory):
        if not rule.paced:
            raise DivergenceError(f"The rounds diverged: {rule.advice}")
        pace = state.server["pace"] / 2
        state = state.restored(memory)
        state.server["pace"] = pace
        state.memory = {**memory, **_ahead(state.round, memory["best_trained"], left)}
        return state, False
    if held_out < memory["best"]:
        memory |= _kept(state, trained, held_out)
    if rule.gains(held_out, memory):
        memory |= {"reference": held_out, "gained": state.round}
    memory |= _ahead(state.round, trained, left)
    return state, state.round >= max(2 * int(memory["gained"]), rule.at_least)


def _ahead(t, trained, left):
    """What is known before the rounds up to the next check, with so many rounds left."""
    step = min(max(t // _FINER, 1), left)
    return {"trained": trained, "until": t + step, "left": left - step}


def _kept(state, trained, held_out):
    """The best models so far."""
    return {"best": held_out, "best_trained": trained, **state.packed()}
