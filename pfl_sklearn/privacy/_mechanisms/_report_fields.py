"""Fields of privacy reports, and checks of parameters, for all mechanisms."""

from __future__ import annotations

import math
from typing import Any

from pfl_sklearn.privacy._accounting._composition import events_epsilon
from pfl_sklearn.privacy._accounting._events import (
    LEAST_NOISE_MULTIPLIER,
    SampledGaussian,
    check_value,
    contribution_sensitivity,
)

EXACT = "exact (Gaussian differential privacy)"
_UPPER_ESTIMATE = "privacy loss distributions (dp-accounting), an upper estimate"
_SAMPLING_NAMES = {
    "none": "none: every client takes part",
    "poisson": "Poisson: every client by itself in every round",
    "fixed": "a fixed number of clients in every round, without replacement",
}


def release_fields(
    mechanism: Any, text: str, accountant: str, trust: str = "local"
) -> dict[str, Any]:
    """Fields of the report of one release, from the attributes of its mechanism and a text."""
    return {
        "mechanism": text,
        # A mechanism without epsilon promises nothing.
        "epsilon": getattr(mechanism, "epsilon", math.inf),
        # Randomized response is pure: no delta, and no noise of any standard deviation.
        "delta": getattr(mechanism, "delta", 0.0),
        "noise_std": getattr(mechanism, "noise_std", None),
        "sensitivity": mechanism.sensitivity,
        "trust": trust,
        "accountant": accountant,
    }


def rounds_fields(
    rounds: SampledGaussian, delta: float, relation: str, bound: float
) -> dict[str, Any]:
    """Fields of the report of all rounds together, with contributions of at most `bound`."""
    exact = rounds.rate == 1  # without sampling there is a closed form
    return {
        "epsilon": events_epsilon([rounds], delta, relation),
        "delta": delta,
        "relation": relation,
        "sensitivity": contribution_sensitivity(relation) * bound,
        "sampling": _SAMPLING_NAMES["none" if exact else rounds.sampling],
        "sampling_rate": rounds.rate,
        "accountant": EXACT if exact else _UPPER_ESTIMATE,
    }


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless a parameter is positive and finite."""
    check_value(name, value, 0 < value < math.inf, "positive and finite")


def check_noise_multiplier(value: float) -> None:
    """Raise ValueError unless the noise is 0 or large enough to count."""
    # Less noise would be reported as noise and accounted for as none.
    valid = value == 0 or LEAST_NOISE_MULTIPLIER <= value < math.inf
    expected = f"0, or finite and at least {LEAST_NOISE_MULTIPLIER}"
    check_value("noise_multiplier", value, valid, expected)


def check_bound(name: str, value: float) -> None:
    """Raise ValueError unless the L2 bound of a message is within the range of squares."""
    # Squares, sums over clients and products with noise then stay within double precision.
    check_value(name, value, 1e-100 <= value <= 1e100, "in [1e-100, 1e100]")
