"""Personal parts of clients who come after the rounds, against a population model that stays."""

import math
from functools import partial
from typing import Any

import numpy as np

from pfl_sklearn._clients import EncodedClients
from pfl_sklearn._rounds.loop import Plan, Sampling, State, check_converged, run_rounds
from pfl_sklearn._rounds.rows import Arrays
from pfl_sklearn._rounds.run import Progress, RoundsAhead, Run, first_state
from pfl_sklearn._rounds.stopping import check_final_loss
from pfl_sklearn._typing import Integers

_ROUNDING = 1e-9  # relative: 0.29 of 100 rounds, which may be 29.000...04, counts as 29


def frozen_progress(server: Arrays, layout: Any, like: np.ndarray, settled: dict) -> Progress:
    """Rounds that left the population's `server` arrays, and no client; ids are `like` those."""
    none, state = np.zeros(0, dtype=np.intp), State(server, {}, {}, math.inf)
    return Progress(state, like[:0], none, None, settled, False, layout, 0.0)


def one_ahead(
    client: np.ndarray, n_rows: int, earlier: Progress, last: int, n_population: int, drawn: Any
) -> RoundsAhead:
    """Rounds to come of one client (1,) alone, after those of a population of so many clients."""
    return RoundsAhead(
        clients=EncodedClients(client, np.zeros(n_rows, dtype=np.intp)),
        earlier=earlier,
        ids=client,
        earlier_at=np.zeros(0, dtype=np.intp),
        now_at=np.zeros(1, dtype=np.intp),
        last=last,
        until_flat=False,
        events=None,  # nothing is released, so nothing is spent
        mechanism=None,
        order=drawn[0],
        entropy=drawn[1],
        n_population=n_population,
    )


def personal_state(run: Run, ahead: RoundsAhead, n_taken: int) -> State:
    """State after `n_taken` rounds of a client and the last phase, which leave the server alone.

    The rounds are spread evenly over those of the fit, whose learning rates they have.
    """
    method, state = run.method, first_state(run, ahead, None)
    # Rounds in which clients keep nothing could only move the population.
    n_taken = n_taken if state.clients.keys() - method.constants.keys() else 0
    numbers = ((np.arange(n_taken) + 0.5) * ahead.last / max(n_taken, 1)).astype(int)
    method = method._replace(
        client_update=partial(_at_round, method.client_update, numbers.tolist()),
        server_update=_unmoved,
        record=lambda server: {},
        last_phase=_after_round(method.last_phase, ahead.last),
    )
    # Alone: what one client gets must not depend on others.
    plan = Plan(n_taken, Sampling(1.0), ahead.entropy)
    run_rounds(method, run.rows, state, plan, run.release)
    if state.failures:  # there is nobody to hide it from
        raise ValueError(
            f"training failed on the rows of client {ahead.ids[0]} "
            f"({', '.join(sorted(state.failures))}); fit them alone to see the error."
        )
    check_converged(state, run.advice, False, ahead.ids)
    if run.final_loss is not None:
        start, where = partial(first_state, run, ahead, None), f" at client {ahead.ids[0]}"
        check_final_loss(run.final_loss, state, start, run.advice, where)
    state.round = ahead.last
    return state


def expected_rounds(client_fraction: float, n_rounds: int) -> int:
    """Rounds of `n_rounds` that a client takes part in, on average, rounded up."""
    return math.ceil(client_fraction * n_rounds * (1 - _ROUNDING))


def stacked(parts: list[Any]) -> Any:
    """Arrays with clients first, or models that stack themselves, one after the other."""
    first = parts[0]
    return first.stacked(parts) if hasattr(first, "stacked") else np.concatenate(parts)


def in_order(value: Any, order: Integers) -> Any:
    """Clients of an array, or of models, in an order."""
    return value.of_clients(order) if hasattr(value, "of_clients") else value[order]


def _at_round(client_update, numbers, server, t, batch, clients):
    return client_update(server, numbers[t], batch, clients)


def _unmoved(server, total, t):
    return server


def _after_round(phase, last):
    """The phase, and those before it, as it is after the `last` round of the fit."""
    if phase is None:
        return None
    update, after = partial(_late, phase.update, last), _after_round(phase.after, last)
    return phase._replace(update=update, after=after)


def _late(update, last, server, t, batch, clients, own):
    return update(server, last, batch, clients, own)
