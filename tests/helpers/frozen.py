"""Checks that a call leaves an estimator as it was, object by object and bit by bit."""

import copy
import pickle

import numpy as np


def freeze(model):
    """Everything that an estimator holds, by value."""
    return copy.deepcopy(vars(model)), {name: id(value) for name, value in vars(model).items()}


def assert_frozen(model, before):
    values, identities = before
    assert {name: id(value) for name, value in vars(model).items()} == identities
    assert pickle.dumps(_plain(vars(model))) == pickle.dumps(_plain(values))


def _plain(value):
    """Nested values as tuples, with arrays as bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple((name, _plain(item)) for name, item in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value).__name__, _plain(vars(value))
    return repr(value)
