"""Fits that end without a clean-up, as if their process had been killed, and interrupted calls."""

import inspect
import math
import os
import sys

import pytest

import pfl_sklearn
from pfl_sklearn._rounds import checkpoint as _checkpoint
from pfl_sklearn.base import ClientMixin


class Killed(BaseException):
    pass


def interrupt(model, data, at):
    """The model after a fit that ended in round `at`; its checkpoint is left."""
    X, y, groups = data
    observe = _checkpoint.Checkpoint.observe

    def killing(checkpoint, state):
        observe(checkpoint, state)
        if state.round == at:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checkpoint.Checkpoint, "observe", killing)
        with pytest.raises(Killed):
            model.fit(X, y, groups=groups)
    assert os.path.exists(model.checkpoint)
    return model


def interrupt_everywhere(act, every=1):
    """Run a fit again and again, interrupted at one call of our functions after the other.

    The last 20 calls before it sets fitted attributes are all among them, the others only if their
    numbers divide by `every`. It never comes to its end.

    Returns
    -------
    int
        How many times it was interrupted.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientMixin, "_set_fitted", _interrupt)
        for _ in range(2):  # the second one without what is done once and kept
            n_calls = run_until(act, math.inf)
        places = [k for k in range(1, n_calls + 1) if k % every == 0 or k > n_calls - 20]
        # What is kept makes later runs shorter by some calls; they end before the attributes too.
        reached = [run_until(act, place) for place in places]
    assert all(
        calls == place or 0.9 * n_calls < calls < place
        for calls, place in zip(reached, places, strict=True)
    )
    return len(places)


def _interrupt(*args, **params):
    raise KeyboardInterrupt


def run_until(act, place):
    """Number of calls of this package's functions in an act, which the one at `place` interrupts.

    An act that is not interrupted ends in a KeyboardInterrupt of its own. Generators do not count:
    one that is thrown away is called again, where Python ignores what is raised.
    """
    folder, n_calls = os.path.dirname(pfl_sklearn.__file__), 0

    def watch(frame, event, _):
        nonlocal n_calls
        code = frame.f_code
        if code.co_flags & inspect.CO_GENERATOR:
            return
        if event == "call" and code.co_filename.startswith(folder):
            n_calls += 1
            if n_calls == place:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            act()
    finally:
        sys.setprofile(before)
    return n_calls
