"""Privacy of streams: the mechanism of a message, its cost, and the report."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pfl_sklearn.online._messages import Broadcast, NoNoise, Senders
from pfl_sklearn.online._printed._pairwise import Pairwise, Restricted
from pfl_sklearn.online._printed._promise import check_pairs, check_printed_noise, paper_mechanism
from pfl_sklearn.privacy import GaussianEvent, PrivacyReport, PureEvent, gdp_epsilon, gdp_mu
from pfl_sklearn.privacy._mechanisms._binary_tree import BinaryTree
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums
from pfl_sklearn.privacy._report import private_report, without_guarantee

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
_OF_PAPER = ("pm1", "pm2")  # mechanisms whose messages may go between pairs
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
_SO_FAR = (
    "epsilon_whole_client is of the rows so far and grows with every further one, without a horizon"
)


def _resolve_choice(name, value, table, mechanism):
    """Schedule or weights asked for; raise ValueError if they do not go with the mechanism."""
    possible = table[mechanism]
    if value == "auto":
        return possible[0]
    if value not in possible:
        names = " or ".join(map(repr, ("auto", *possible)))
        raise ValueError(f"{name}={value!r} does not go with mechanism={mechanism!r}; use {names}.")
    return value


def weights_of(model) -> str:
    """Weights that recipients give to messages; without noise the last mean is the best one."""
    weights = _resolve_choice("weights", model.weights, WEIGHTS, model.mechanism)
    asked = model.weights not in ("auto", "blue")
    return weights if asked or math.isfinite(model.epsilon) else "last"


def schedule_of(model) -> str:
    """Schedule of the messages: who receives them."""
    return _resolve_choice("schedule", model.schedule, SCHEDULES, model.mechanism)


def check_promise(model) -> None:
    """Refuse parameters that contradict one another, before any data is read."""
    weights_of(model)
    schedule, of_paper = schedule_of(model), model.mechanism in _OF_PAPER
    if of_paper:
        check_pairs(model, schedule)
    elif model.accounting == "printed":
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
    if of_paper:
        check_printed_noise(model, schedule)


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
    if model.mechanism in _OF_PAPER:
        return paper_mechanism(model, schedule_of(model), n_agents)
    mechanism = SquareRootSums if model.mechanism == "sqrt" else BinaryTree
    return mechanism(gdp_mu(model.epsilon, model.delta), model.horizon)


def report(model, senders: Senders, n_clients: int) -> PrivacyReport:
    """Report of the streams so far."""
    if isinstance(senders.mechanism, NoNoise):
        return PrivacyReport.unprotected(
            "epsilon=inf was asked for.",
            not_released=POPULATION_ATTRIBUTES + _CLIENT_ATTRIBUTES,
            n_clients=n_clients,
            unit="row",
        )
    mechanism, delta = senders.mechanism, float(model.delta)
    mu, whole = senders.costs(model.horizon or int(senders.rows.max()))
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
        caveats=senders.caveats(model.epsilon),
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
    return without_guarantee(private, senders.leak) if senders.leak else private
