"""What streams promise: the mechanism of a message, what it costs, and the report."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pfl_sklearn.online._messages import Broadcast, NoNoise, Pairwise, Restricted, Senders
from pfl_sklearn.privacy import GaussianEvent, PrivacyReport, PureEvent, gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._running_sums import PartialSums
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums
from pfl_sklearn.privacy._report import leaking, private_report
from pfl_sklearn.theory import partial_sum_variance

# Schedules and weights of every mechanism, those of "auto" first.
SCHEDULES = {
    "sqrt": ("broadcast",),
    "tree": ("broadcast",),
    "pm1": ("round_robin", "restricted", "broadcast"),
    "pm2": ("round_robin", "restricted", "broadcast"),
}
WEIGHTS = {
    "sqrt": ("blue", "last"),
    "tree": ("blue", "last", "mom", "wmom"),
    "pm1": ("last", "blue", "mom", "wmom"),
    "pm2": ("wmom", "blue", "last", "mom"),
}
SENDERS: dict[str, type[Senders]] = {
    "broadcast": Broadcast,
    "round_robin": Pairwise,
    "restricted": Restricted,
}
_MECHANISMS = {
    "sqrt": "the square-root factorization of running sums",
    "tree": "a binary tree of partial sums",
    "pm1": "partial sums between two messages (PM-I)",
    "pm2": "a binary tree over the sums between two messages (PM-II)",
}
# Computed from messages alone, or also from what clients know exactly.
POPULATION_ATTRIBUTES = ("population_mean_", "population_mean_std_", "population_std_")
_CLIENT_ATTRIBUTES = (
    "means_",
    "stds_",
    "local_means_",
    "clients_",
    "n_samples_per_client_",
    "n_clipped_",
)
_LEAK = (
    "schedule='restricted' asks only those whose means seem equal, so whom an agent asks tells its "
    "exact mean: nothing protects the agents. Use schedule='round_robin'."
)
_COLLUSION = (
    "every pair of agents has noise of its own, so epsilon={:.4g} was bought against a single "
    "recipient, and all recipients together know far more: epsilon is what it comes to against "
    "them. mechanism='sqrt' protects against all of them with less noise."
)

_SO_FAR = (
    "epsilon_whole_client is of the rows so far and grows with every further one, without a horizon"
)


def _chosen(name, value, table, mechanism):
    """Schedule or weights asked for; raise ValueError if they do not go with the mechanism."""
    possible = table[mechanism]
    if value == "auto":
        return possible[0]
    if value not in possible:
        names = " or ".join(map(repr, ("auto", *possible)))
        raise ValueError(f"{name}={value!r} does not go with mechanism={mechanism!r}; use {names}.")
    return value


def weights_of(model) -> str:
    """What recipients make of messages; without noise the last mean is the best one."""
    weights = _chosen("weights", model.weights, WEIGHTS, model.mechanism)
    asked = model.weights not in ("auto", "blue")
    return weights if asked or math.isfinite(model.epsilon) else "last"


def schedule_of(model) -> str:
    """Schedule of the messages: who hears whom."""
    return _chosen("schedule", model.schedule, SCHEDULES, model.mechanism)


def check_promise(model) -> None:
    """Refuse parameters that contradict one another, before any data is read."""
    weights_of(model)
    pairwise = schedule_of(model) != "broadcast"
    if pairwise and model.noise_variance is None:
        raise ValueError(
            "noise_variance must be given where pairs of agents exchange messages, which hold "
            "sums of values alone; got None."
        )
    if model.schedule == "restricted" and model.decision == "mixture":
        raise ValueError(
            "schedule='restricted' asks whom a test takes for one class; use decision='test'."
        )
    if model.accounting == "printed" and model.mechanism not in ("pm1", "pm2"):
        raise ValueError(
            f"accounting='printed' is for mechanism='pm1' and 'pm2'; got mechanism="
            f"{model.mechanism!r}."
        )
    if math.isinf(model.epsilon):
        return
    if model.bounds is None:
        raise ValueError(
            "bounds must be given when epsilon is finite: the range (low, high) that every value "
            "is in. Choose it without looking at the data."
        )
    if model.delta == 0:  # Gaussian noise has no pure epsilon
        raise ValueError("delta must be above 0 for Gaussian noise; got 0.")
    if model.accounting == "printed" and model.epsilon > 1:
        raise ValueError(
            f"accounting='printed' holds for epsilon up to 1; got epsilon={model.epsilon!r}."
        )
    if model.accounting == "printed" and model.mechanism == "pm2" and model.horizon is None:
        raise ValueError("accounting='printed' of mechanism='pm2' needs a horizon; got None.")
    if pairwise and model.ledger is not None:
        raise ValueError(
            "a ledger cannot hold messages between pairs of agents, whose cost grows with the "
            "number of agents; use mechanism='sqrt' or 'tree', or schedule='broadcast'."
        )


def stream_events(model) -> tuple[Any, ...]:
    """Accounting events of a stream for its agent, against everybody else together."""
    if math.isinf(model.epsilon) or schedule_of(model) != "broadcast":
        return (PureEvent(math.inf, 0.0, "replace_one"),)
    mu = stream_mechanism(model, 2).mu  # of a broadcast, whatever the number of agents
    return (GaussianEvent(None, mu, mu_zero_out=mu),)


def new_senders(model, n_agents: int) -> Senders:
    """Senders of a stream that begins with so many agents, none of whom has joined yet."""
    return SENDERS[schedule_of(model)](
        stream_mechanism(model, n_agents),
        weights_of(model),
        2 if model.noise_variance is None else 1,  # squares let recipients estimate variances
        model.random_state,
    )


def stream_mechanism(model, n_agents: int) -> Any:
    """Mechanism of the messages of one stream."""
    if math.isinf(model.epsilon):
        return NoNoise()
    # In a round robin every pair has its turn; otherwise one may be asked at every step.
    others = max(n_agents - 1, 1) if schedule_of(model) == "round_robin" else 1
    releases = None if model.horizon is None else -(-model.horizon // others)
    mu = gdp_mu(model.epsilon, model.delta)
    if model.mechanism == "sqrt":
        return SquareRootSums(mu, model.horizon)
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


def report(model, senders: Senders, n_clients: int) -> PrivacyReport:
    """Report of the streams so far."""
    pairwise = not senders.is_common
    if isinstance(senders.mechanism, NoNoise):
        return PrivacyReport.unprotected(
            "epsilon=inf was asked for.",
            not_released=POPULATION_ATTRIBUTES + _CLIENT_ATTRIBUTES,
            n_clients=n_clients,
            unit="row",
        )
    others = max(n_clients - 1, 1) if pairwise else 1
    mechanism, delta = senders.mechanism, float(model.delta)
    mu = mechanism.mu * math.sqrt(others)  # independent noise for each of the others
    steps = model.horizon or int(senders.rows.max())
    # Of everybody's messages the mechanism knows what all rows of an agent cost together.
    # Pairs exchange messages at any time: at worst all rows of an agent lie between two of them.
    whole = steps * mu if pairwise else max(mechanism.whole_mu(steps), mu)
    facts = {
        "mechanism": f"Gaussian noise on running sums, by {_MECHANISMS[model.mechanism]}, rounded "
        "to a grid",
        "epsilon": gdp_epsilon(mu, delta),
        "delta": delta,
        "unit": "row",
        "noise_std": 1 / mechanism.mu,
        "sensitivity": 1.0,
        "trust": "local",
        "accountant": "exact (Gaussian differential privacy)",
    }
    private = private_report(
        facts,
        n_clients=n_clients,
        seeded=model.random_state is not None,
        caveats=(_COLLUSION.format(model.epsilon),) if others > 1 else (),
        assumptions=(
            "bounds, known variances and horizon are the user's, not the data's",
            "who receives a row, and when, is public",
            "noise and sensitivity are in units of the range of the values",
            *(() if model.horizon else (_SO_FAR,)),
        ),
        released=POPULATION_ATTRIBUTES,
        not_released=_CLIENT_ATTRIBUTES,
    )
    private = dataclasses.replace(
        private,
        epsilon_per_recipient=gdp_epsilon(mechanism.mu, delta),
        epsilon_whole_client=gdp_epsilon(whole, delta),
    )
    return leaking(private, _LEAK) if isinstance(senders, Restricted) else private
