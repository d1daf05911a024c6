"""Modes of all clients at given population values, and what their rows say of the population."""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._glmm._likelihood import (
    CLOSE_ENOUGH,
    RowStack,
    find_mode,
    form_of,
    population_predictors,
    start_state,
    whiten_information,
    whitened_rows,
)


class ClientModes(NamedTuple):
    """All clients, at given population values."""

    deviations: np.ndarray  # (m, a, q)
    rows: np.ndarray  # (m, k, a p), whitened: their Gram matrix is the information on B
    log_likelihood: float
    converged: bool


def client_modes(table, stacks, outcome, maximum, n_jobs):
    """Modes, criterion and information of all clients at the population of a Maximum."""
    a, factor = outcome.n_outputs, maximum.factor
    function = partial(_stack_modes, outcome=outcome, population=maximum.population, factor=factor)
    # The states of the search are at the modes or near them; without a search we start at zero.
    states = maximum.states or [start_state(stack, factor, a) for stack in stacks]
    batches = [(*stack, state) for stack, state in zip(stacks, states, strict=True)]
    results = map_batches(function, batches, n_jobs)
    deviations = np.empty((table.n_clients, a, table.n_random))
    # Clients with fewer rows get rows of zeros, which say nothing.
    longest = max(whitening.shape[1] for _, whitening, _, _ in results)
    rows = np.zeros((table.n_clients, longest, a * table.columns.shape[1]))
    for stack, (moved, whitening, _, _) in zip(stacks, results, strict=True):
        deviations[stack.clients] = moved
        rows[stack.clients, : whitening.shape[1]] = whitened_rows(whitening, stack.x)
    value = float(sum(result[2] for result in results))
    return ClientModes(deviations, rows, value, all(result[3] for result in results))


def _stack_modes(clients, x, y, w, state, *, outcome, population, factor):
    """Deviations (b, a, q), whitening, summed criterion, and whether the search found all modes."""
    stack = RowStack(clients, x, y, w)
    form = form_of(x, factor)
    offset = population_predictors(x, population)
    mode = find_mode(form, outcome, offset, stack, state, CLOSE_ENOUGH)
    deviations = (factor @ form.effects(mode.state)).transpose(0, 2, 1)
    whitening, log_det = whiten_information(form, outcome.roots(mode.predictors, w), x)
    return deviations, whitening, float(np.sum(mode.value) - 0.5 * log_det), bool(mode.found.all())


def free_information(rows, a, n_known):
    """Information (a f, a f) on all but the first columns, from whitened rows (m, k, a p)."""
    m, k, p = rows.shape[0], rows.shape[1], rows.shape[2] // a
    free = rows.reshape(-1, a, p)[:, :, n_known:].reshape(m * k, a * (p - n_known))
    return free.T @ free
