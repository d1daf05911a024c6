"""Rounds that tests run by hand, without an estimator, in one place."""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._rounds.loop import (
    Run,
    Sampling,
    late_generator,
    round_generators,
    run_rounds,
    start,
)
from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn.privacy import ClippedSum


class Plan(NamedTuple):
    """Rounds of any method: all but what they compute."""

    sampling: Sampling
    n_rounds: int
    entropy: tuple
    n_jobs: int | None = None

    def late_generator(self, t, offset):
        """Generator of draws after round t."""
        return late_generator(self.entropy, t, offset)


def plan_of(n_rounds, rate=1.0, seed=(0,), n_jobs=None):
    """Rounds with Poisson sampling, all of whose draws follow from the seed."""
    return Plan(Sampling(rate), n_rounds, seed, n_jobs)


def generators_of(plan, first=0):
    """Generators of the rounds from `first` on."""
    return round_generators(plan.entropy, first)


def run_method(method, rows, plan, mechanism=None, state=None, protected=False, **options):
    """State after the rounds of a method, from its own start or from another state."""
    release = JointSum(mechanism or ClippedSum(None), method.messages)
    state = start(method, rows, release) if state is None else state
    return run_rounds(Run(method, rows, release, *plan, protected), state, **options)


def assert_same_state(one, other):
    for name in ("server", "clients", "schedule", "phase_arrays", "history", "round", "bound"):
        np.testing.assert_equal(getattr(one, name), getattr(other, name))
