"""Rounds that tests run by hand, without an estimator, in one place."""

import numpy as np

from pfl_sklearn._rounds.loop import Run, Sampling, run_rounds, start
from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn.privacy import ClippedSum


def plan_of(n_rounds, rate=1.0, seed=(0,), n_jobs=None):
    """Rounds with Poisson sampling, all of whose draws follow from the seed."""
    return Run(n_rounds, Sampling(rate), seed, n_jobs)


def generators_of(plan, first=0):
    """Generators of the rounds from `first` on."""
    return plan.generators(first)


def run_method(method, rows, plan, mechanism=None, state=None, protected=False, **options):
    """State after the rounds of a method, from its own start or from another state."""
    release = JointSum(mechanism or ClippedSum(None), method.messages)
    state = start(method, rows, release) if state is None else state
    run = plan._replace(method=method, rows=rows, release=release, protected=protected)
    return run_rounds(run, state, **options)


def assert_same_state(one, other):
    for name in ("server", "clients", "schedule", "own", "history", "round", "bound"):
        np.testing.assert_equal(getattr(one, name), getattr(other, name))
