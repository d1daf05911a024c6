"""The inner state of an estimator on rounds after a fit, in one place."""

import copy

import numpy as np


def state_of(model):
    """Where the rounds of a fitted estimator are."""
    return model._progress.state


def parts_of(model):
    """Copies of all arrays of that state, and its history, by name."""
    state = state_of(model)
    names = ("server", "clients", "phase_arrays", "schedule", "history")
    return copy.deepcopy({name: getattr(state, name) for name in names})


def assert_same_bits(one, other):
    """Two fits ended in the same state and with the same report."""
    np.testing.assert_equal(parts_of(one), parts_of(other))
    assert one.privacy_ == other.privacy_


def initial_net(model):
    """Parameters of the global net before the first round, as one array."""
    return model._engines.population.start()


def is_stacked(model):
    """Whether the nets of a block of clients were trained at once."""
    return model._engines.trained[0].stacked
