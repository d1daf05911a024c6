"""Personal models of late clients: the population model of the fit does not change."""

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pfl_sklearn._clients import EncodedClients, encode_clients, match_clients
from pfl_sklearn._rounds.loop import Sampling, State, run_rounds
from pfl_sklearn._rounds.run import (
    CheckedTable,
    FitClients,
    FitPlan,
    ModelRounds,
    Progress,
    first_state,
    sampling_of,
)
from pfl_sklearn._rounds.stopping import check_converged, check_final_loss
from pfl_sklearn._typing import Integers

_ROUNDING_OF_ROUNDS = 1e-9  # relative: 0.29 of 100 rounds, which may be 29.000...04, counts as 29


def encode_personal(model: Any, groups: Any, n_rows: int) -> EncodedClients:
    """Clients of the rows of ``personalize``."""
    known = getattr(model, "clients_", None)
    if groups is None:
        if known is not None and len(known) > 1:
            raise ValueError(
                f"This {type(model).__name__} knows {len(known)} clients; pass groups= to say "
                "whose rows these are."
            )
        only = np.zeros(1, dtype=np.intp) if known is None else known
        return EncodedClients(only, np.zeros(n_rows, dtype=np.intp))
    if known is not None and not model._fitted_with_groups:
        raise ValueError(
            f"groups= was given, but this {type(model).__name__} was fitted without groups, as "
            "one client; personalize without them."
        )
    clients = encode_clients(groups, n_rows)
    if known is not None:
        # Refuses ids of another type; as a categorical, fractions are ids, too.
        match_clients(pd.Categorical(clients.ids), len(clients.ids), known)
    return clients


def frozen_progress(model: Any, ids: np.ndarray) -> Progress:
    """Progress of rounds that left the population model and no client; ids are like `ids`."""
    none, state = np.zeros(0, dtype=np.intp), State(model._server, {}, {}, math.inf)
    attributes = {"learning_rate_": getattr(model, "learning_rate_", None)}
    return Progress(state, ids[:0], none, None, attributes, False, model._frozen_layout(), 0.0)


def personal_part(
    model: Any, table: CheckedTable, client: np.ndarray, frozen: Progress, drawn: Any
) -> dict[str, Any]:
    """Fitted attributes of one client (1,), clients first."""
    n_rounds, n_rows = model.n_rounds_, len(table.y)
    no_positions = np.zeros(0, dtype=np.intp)
    n_population = model.privacy_.n_clients or 1
    setup_seed, entropy = drawn
    # No events: nothing is released, so nothing is spent.
    plan = FitPlan(
        clients=FitClients(
            client, np.zeros(n_rows, dtype=np.intp), np.zeros(1, np.intp), no_positions
        ),
        earlier=frozen,
        n_rounds=n_rounds,
        sampling=sampling_of(model, n_population),
        setup_seed=setup_seed,
        entropy=entropy,
        n_population=n_population,
    )
    rounds = model._make_rounds(table, plan)
    first_attributes = model._models(first_state(plan, rounds), client, rounds.layout)
    personal = {*rounds.attributes, *first_attributes} & set(model._client_attributes)
    if rounds.method.last_phase is None and not personal:
        raise ValueError(
            f"clients of this {type(model).__name__} keep nothing of their own: all have the "
            "population model, also new ones, so there is nothing to personalize. Choose a "
            "method or parameters (such as fine_tune_steps of FedAvg) with personal models."
        )
    state = _personal_state(plan, rounds, model._rounds_of_a_client(n_rounds))
    models = {**rounds.attributes, **model._models(state, client, rounds.layout)}
    part = {name: models[name] for name in model._client_attributes if name in models}
    return {**part, "n_samples_per_client_": np.array([n_rows])}


def with_personal(model: Any, clients: EncodedClients, parts: list[dict]) -> dict[str, Any]:
    """Clients' attributes with those of `clients`, which take the place of earlier ones."""
    known = getattr(model, "clients_", clients.ids[:0])
    (others,) = np.isin(known, clients.ids, invert=True).nonzero()
    names = {name for name in model._client_attributes if hasattr(model, name)}
    if hasattr(model, "clients_") and names != parts[0].keys():
        raise model._changed_since_fit()
    ids = np.concatenate([known[others], clients.ids])
    order = np.argsort(ids, kind="stable")
    merged = {"clients_": ids[order]}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if len(others):
            values.insert(0, _of_clients(getattr(model, name), others))
        merged[name] = _of_clients(_concatenated(values), order)
    return merged


def _personal_state(plan: FitPlan, rounds: ModelRounds, n_taken: int) -> State:
    """State after `n_taken` rounds of a client and the last phase, which leave the server alone.

    The rounds are spread evenly over those of the fit, whose learning rates they have.
    """
    start = partial(first_state, plan, rounds)
    method, state, ids = rounds.method, start(), plan.clients.ids
    # Rounds in which clients keep nothing could only move the population.
    n_taken = n_taken if state.clients.keys() - method.constants.keys() else 0
    numbers = ((np.arange(n_taken) + 0.5) * plan.n_rounds / max(n_taken, 1)).astype(int)
    method = method._replace(
        client_update=partial(_update_of_round, method.client_update, numbers.tolist()),
        server_update=lambda server, total, t: server,
        record=lambda server: {},
        last_phase=_after_round(method.last_phase, plan.n_rounds),
    )
    # Alone, and in every round: what a client gets must not depend on others.
    run = rounds.make_run(plan)._replace(n_rounds=n_taken, sampling=Sampling(1.0), method=method)
    run_rounds(run, state)
    if state.failures:  # there is nobody to hide it from
        raise ValueError(
            f"training failed on the rows of client {ids[0]} "
            f"({', '.join(sorted(state.failures))}); fit them alone to see the error."
        )
    check_converged(state, ids, rounds.advice, run.protected)
    check_final_loss(rounds.final_loss, state, start, rounds.advice, f" at client {ids[0]}")
    state.round = plan.n_rounds
    return state


def expected_rounds(client_fraction: float, n_rounds: int) -> int:
    """Rounds of `n_rounds` that a client takes part in, on average, rounded up."""
    return math.ceil(client_fraction * n_rounds * (1 - _ROUNDING_OF_ROUNDS))


def _concatenated(parts: list[Any]) -> Any:
    """Arrays with clients first, or models that stack themselves, one after the other."""
    first = parts[0]
    return first.stacked(parts) if hasattr(first, "stacked") else np.concatenate(parts)


def _of_clients(value: Any, positions: Integers) -> Any:
    """Clients at positions of an array, or of models."""
    return value.of_clients(positions) if hasattr(value, "of_clients") else value[positions]


def _update_of_round(client_update, numbers, server, t, batch, clients):
    """Update of round t of a client alone, as in the round of the fit with that number."""
    return client_update(server, numbers[t], batch, clients)


def _after_round(phase, last):
    """The phase, and those before it, as it is after the `last` round of the fit."""
    if phase is None:
        return None
    update, after = partial(_update_after, phase.update, last), _after_round(phase.after, last)
    return phase._replace(update=update, after=after)


def _update_after(update, last, server, t, batch, clients, phase_arrays):
    return update(server, last, batch, clients, phase_arrays)
