"""Fits that end without a clean-up, as if their process had been killed, and interrupted calls."""

import inspect
import linecache
import math
import operator
import os
import sys
from contextlib import contextmanager

import pytest

import pfl_sklearn
from pfl_sklearn import _fitted
from pfl_sklearn._rounds import checkpoint as _checkpoint
from pfl_sklearn.base import ClientMixin

FOLDER = os.path.dirname(pfl_sklearn.__file__)
# What scikit-learn's callbacks set during a fit.
_OF_CALLBACKS = {"_callback_fit_ctx", "_skl_callbacks_to_teardown"}


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
    n_calls = 0

    def watch(frame, event, _):
        nonlocal n_calls
        code = frame.f_code
        if code.co_flags & inspect.CO_GENERATOR:
            return
        if event == "call" and code.co_filename.startswith(FOLDER):
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


def states_at_lines(model, act):
    """All fitted states of a model that an interruption at a line of this package could leave.

    Parameters
    ----------
    model : estimator
    act : callable
        Refits the model.

    Returns
    -------
    list of dict
        Its attributes from before the act, and after every change, in order.
    """
    others = {*model.get_params(deep=False), *_OF_CALLBACKS}
    attributes, states = [], []

    def look(frame, event, _):
        nonlocal attributes
        # Attributes are compared by identity, so that equal values of two fits are two states.
        held = [each for pair in vars(model).items() for each in pair if pair[0] not in others]
        if len(held) != len(attributes) or not all(map(operator.is_, held, attributes)):
            attributes = held
            states.append(dict(zip(held[::2], held[1::2], strict=True)))
        return look

    def enter(frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        look(frame, event, None)
        # Only lines of what has the model can set its attributes; arithmetic has no need to wait.
        return look if any(each is model for each in frame.f_locals.values()) else None

    look(None, None, None)
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        act()
    finally:
        sys.settrace(before)
    look(None, None, None)
    return states


def interrupt_at_line(act, place, error=KeyboardInterrupt):
    """Run an act, whose line at `place` from the end of this package's lines raises an error.

    Lines are counted in a first run, which has to come to its end, and be the same in a second one.
    """
    n_lines = _run_lines(act, math.inf, error)
    with pytest.raises(error):
        _run_lines(act, n_lines - place, error)


def _run_lines(act, last, error):
    """Number of lines of this package that an act runs; the one after `last` raises an error."""
    n_lines = 0

    def count(frame, event, _):
        nonlocal n_lines
        n_lines += event == "line"
        if n_lines > last:
            sys.settrace(None)
            raise error
        return count

    def enter(frame, event, _):
        return count if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        act()
    finally:
        sys.settrace(before)
    return n_lines


def refused_at_the_end(model, act, error):
    """Names of attributes that an act sets on a model, where `error` is in place of the storing.

    All that the act computes is computed by then, and nothing may have been set.
    """

    def refuse(store, *args):
        raise error

    with _watched(model, refuse) as written, pytest.raises(error):
        act()
    return written


def stored_at_the_end(model, act):
    """Names of attributes that an act sets on a model, and the lines of code after the storing.

    Lines are texts, of this package alone. Between one that computes and the storing an
    interruption leaves what was there before; one that comes later finds a refit that is over.
    """
    lines = []

    def look(frame, event, _):
        if event == "line":
            lines.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip())
        return look

    def store_and_look(store, *args):
        store(*args)
        sys.settrace(lambda *event: None)  # what these functions call shows in their own lines
        frame = sys._getframe(1)
        while frame:
            ours = frame.f_code.co_filename.startswith(FOLDER)
            frame.f_trace = look if ours else None
            frame = frame.f_back

    before = sys.gettrace()
    try:
        with _watched(model, store_and_look) as written:
            act()
    finally:
        sys.settrace(before)
    return written, lines


@contextmanager
def _watched(model, instead):
    """List of the attributes of a model that are set or deleted; `instead` is called to store."""
    kind, store, written = type(model), _fitted._replace, []

    def set_attribute(estimator, name, value):
        if estimator is model and name not in _OF_CALLBACKS:
            written.append(name)
        object.__setattr__(estimator, name, value)

    def delete_attribute(estimator, name):
        if estimator is model and name not in _OF_CALLBACKS:
            written.append(name)
        object.__delattr__(estimator, name)

    def replace(estimator, *args):
        (instead if estimator is model else _call)(store, estimator, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__setattr__", set_attribute)
        patch.setattr(kind, "__delattr__", delete_attribute)
        patch.setattr(_fitted, "_replace", replace)
        yield written


def _call(function, *args):
    function(*args)
