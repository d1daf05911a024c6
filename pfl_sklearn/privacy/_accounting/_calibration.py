"""From noise to epsilon and back: one facade over the accountants.

Unsampled Gaussian releases are accounted exactly, by Gaussian DP. Accountants for sampled rounds
belong beside them, behind the same two functions.
"""

from __future__ import annotations

import math

from pfl_sklearn.privacy._accounting._gaussian_dp import gdp_epsilon, gdp_mu

__all__ = ["RELATIONS", "calibrate_noise", "epsilon_spent"]

RELATIONS = ("add_remove", "replace_one", "zero_out")
# What an add/remove sensitivity is at most under the other relations: a replacement removes one
# contribution and adds another; zeroing out removes one.
_FROM_ADD_REMOVE = {"add_remove": 1.0, "replace_one": 2.0, "zero_out": 1.0}


def epsilon_spent(
    noise_std: float,
    sensitivity: float,
    *,
    delta: float,
    relation: str = "replace_one",
    under: str | None = None,
    n_releases: int = 1,
) -> float:
    """Epsilon of Gaussian noise on a quantity of given L2 sensitivity.

    Parameters
    ----------
    noise_std : float, > 0
        Standard deviation of the noise in every coordinate, in the units of `sensitivity`.
    sensitivity : float, > 0
        How far the quantity can move, in L2 norm, between two tables that are neighbours under
        `relation`. For a sum over clients of vectors of norm at most C it is C under
        "add_remove" and "zero_out", and 2 C under "replace_one".
    delta : float in (0, 1)
    relation : {"add_remove", "replace_one", "zero_out"}, default="replace_one"
        The neighbouring relation that `sensitivity` is stated for.
    under : same choices, default=None
        The relation that the answer is wanted for; None means `relation`. Only an add/remove
        sensitivity can be converted (at most twice as large under replacement).
    n_releases : int, default=1
        Number of releases with this noise on the same data, accounted together.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If a parameter is out of its range, or the conversion is not determined.

    Notes
    -----
    Exact (Gaussian DP; Dong, Roth and Su, 2022). Every client takes part in every release: for
    sampled clients this is an upper bound.

    Examples
    --------
    A noise multiplier of 1 on the clip norm:

    >>> from pfl_sklearn.privacy import epsilon_spent
    >>> round(epsilon_spent(1.0, 1.0, delta=1e-5, relation="add_remove"), 4)
    4.3772
    >>> round(epsilon_spent(1.0, 2.0, delta=1e-5, relation="replace_one"), 4)
    9.9973
    >>> round(epsilon_spent(1.0, 1.0, delta=1e-5, relation="add_remove", under="replace_one"), 4)
    9.9973
    """
    sensitivity = _sensitivity_under(sensitivity, relation, under)
    if not noise_std > 0:
        raise ValueError(f"noise_std must be above 0; got {noise_std!r}.")
    return gdp_epsilon(_compose(sensitivity / noise_std, n_releases), delta)


def calibrate_noise(
    epsilon: float,
    delta: float,
    sensitivity: float,
    *,
    relation: str = "replace_one",
    under: str | None = None,
    n_releases: int = 1,
) -> float:
    """Smallest Gaussian noise standard deviation that spends (epsilon, delta): inverse of
    :func:`epsilon_spent`, with the same parameters.

    Examples
    --------
    >>> from pfl_sklearn.privacy import calibrate_noise
    >>> round(calibrate_noise(9.9973, 1e-5, sensitivity=2.0), 4)
    1.0
    """
    sensitivity = _sensitivity_under(sensitivity, relation, under)
    return _compose(sensitivity, n_releases) / gdp_mu(epsilon, delta)


def _compose(value: float, n_releases: int) -> float:
    if n_releases < 1:
        raise ValueError(f"n_releases must be at least 1; got {n_releases!r}.")
    return value * math.sqrt(n_releases)


def _sensitivity_under(sensitivity: float, relation: str, under: str | None) -> float:
    if not sensitivity > 0:
        raise ValueError(f"sensitivity must be above 0; got {sensitivity!r}.")
    for name, value in (("relation", relation), ("under", under)):
        if value not in RELATIONS and not (name == "under" and value is None):
            raise ValueError(f"{name} must be one of {', '.join(RELATIONS)}; got {value!r}.")
    if under is None or under == relation:
        return sensitivity
    if relation != "add_remove":
        raise ValueError(
            f"a sensitivity under relation={relation!r} does not determine the one under "
            f"under={under!r}; state the add_remove sensitivity."
        )
    return sensitivity * _FROM_ADD_REMOVE[under]
