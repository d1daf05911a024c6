"""Privacy between pairs of agents by PM-I and PM-II of Yakimenka et al. (2024).

``accounting="printed"`` is the paper's noise, "exact" what its mechanisms need.
"""

from __future__ import annotations

import math
from typing import Any

from pfl_sklearn.privacy import gdp_mu
from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._printed._partial_sums import PartialSums
from pfl_sklearn.theory import partial_sum_variance


def check_pairs(model, schedule: str) -> None:
    """Refuse what does not go with messages between pairs."""
    if schedule != "broadcast" and model.noise_variance is None:
        raise ValueError(
            "noise_variance must be given where pairs of agents exchange messages, which hold "
            "sums of values alone; got None."
        )
    if model.schedule == "restricted" and model.decision == "mixture":
        raise ValueError(
            "schedule='restricted' asks whom a test takes for one class; use decision='test'."
        )


def check_printed_noise(model, schedule: str) -> None:
    """Refuse what the paper's noise is not for, and ledgers of pairs; of a finite epsilon."""
    if model.accounting == "printed" and model.epsilon > 1:
        raise ValueError(
            f"accounting='printed' holds for epsilon up to 1; got epsilon={model.epsilon!r}."
        )
    if model.accounting == "printed" and model.mechanism == "pm2" and model.horizon is None:
        raise ValueError("accounting='printed' of mechanism='pm2' needs a horizon; got None.")
    if schedule != "broadcast" and model.ledger is not None:
        raise ValueError(
            "a ledger cannot hold messages between pairs of agents, whose cost grows with the "
            "number of agents; use mechanism='sqrt' or 'tree', or schedule='broadcast'."
        )


def paper_mechanism(model, schedule: str, n_agents: int) -> Any:
    """PM-I or PM-II for the messages of one stream."""
    # In a round robin every pair has its turn; otherwise one may be asked at every step.
    others = max(n_agents - 1, 1) if schedule == "round_robin" else 1
    releases = None if model.horizon is None else -(-model.horizon // others)
    mu = gdp_mu(model.epsilon, model.delta)
    if model.mechanism == "pm1":
        return PartialSums(mu if model.accounting == "exact" else _printed_mu(model, 1))
    if model.accounting == "printed" and releases is not None:
        # The paper gives every level of the tree its share of epsilon: noise for one sum each.
        levels = releases.bit_length()
        mu = _printed_mu(model, model.horizon.bit_length()) * math.sqrt(levels)
    return BinaryTree(mu, releases)


def _printed_mu(model, levels):
    """Gaussian-DP parameter of one sum with the paper's noise, in a range of length 1."""
    promise, half_width = (model.epsilon, model.delta), 0.5
    return partial_sum_variance(half_width, *promise, levels=levels, version="printed") ** -0.5
