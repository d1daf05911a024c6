"""Laplace approximation of the marginal likelihood of clients' logistic regressions.

Row j of client i has the linear predictors u_j = B x_j + V_i' L' z_j with population coefficients B
(a, p), the factor L (q, r) of the between-client covariance L L', random columns z_j (the first q
of x_j) and standard normal effects V_i (r, a). The criterion of a client is

    log-likelihood - |V|^2 / 2 - log det(H) / 2,   H = I + sum_j W_j (x) L'z_j z_j'L,

at the mode of V. Clients of (nearly) equal size are stacked; whatever is smaller is solved for, the
r effects or, with V = Z L' alpha, the n rows.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import client_batches
from pfl_sklearn._parallel import map_batches

_SIZES = 4  # stacked sizes differ by less than a share of 1 / 4
_CELLS = 1 << 19  # numbers of a stack's columns; more clients make another stack
_LAST_DECREMENT = 1e-13  # squared Newton decrement, in nats, of the step that is the last
CLOSE_ENOUGH = 1e-8  # the same where no gradients depend on the mode: its error is about this
_MAX_NEWTON = 100
_SMALL = 16  # size of a system up to which all clients are eliminated together
_SLACK = 1e-13  # relative decrease of the criterion of a mode that is rounding


class Stack(NamedTuple):
    """Rows of clients of nearly equal size; absent ones have weight and columns 0."""

    clients: np.ndarray  # (b,)
    x: np.ndarray  # (b, n, p), random columns first
    y: np.ndarray  # (b, n), labels
    w: np.ndarray  # (b, n)


class Primal(NamedTuple):
    """Modes by the effects: the state (b, r, a) is V."""

    features: np.ndarray  # (b, n, r), Z L

    def gram(self):
        """Z L L' Z' (b, n, n)."""
        return self.features @ self.features.transpose(0, 2, 1)

    def deviation(self, state):
        """Predictors (b, n, a) less the population's."""
        return self.features @ state

    def penalty(self, state, deviation):
        return 0.5 * np.einsum("bra,bra->b", state, state)

    def residual(self, score, state):
        return self.features.transpose(0, 2, 1) @ score - state

    def decrement(self, residual, step, moved):
        return np.einsum("bra,bra->b", residual, step)

    def system(self, weight):
        """H (b, r a, r a)."""
        b, _, r = self.features.shape
        a = weight.shape[-1]
        system = np.zeros((b, r, a, r, a))
        across = self.features.transpose(0, 2, 1)
        for k in range(a):
            for c in range(k + 1):
                block = across @ (weight[..., k, c, None] * self.features)
                system[:, :, k, :, c] = system[:, :, c, :, k] = block
        return _plus_identity(system.reshape(b, r * a, r * a))

    def effects(self, state):
        return state

    def slopes(self, state, terms, inverse, slope_of):
        """Slopes of the criterion in u (b, n, a) and, through Z L, in the factor (b, n, r)."""
        b, n, r = self.features.shape
        a = terms.score.shape[-1]
        pulled = self.features @ inverse.reshape(b, r, a * r * a)
        pulled = pulled.reshape(b, n, a, r, a)
        spread = np.einsum("bnarc,bnr->bnac", pulled, self.features)
        own = np.einsum("bnac,bnarc->bnr", terms.weight, pulled)
        slope = slope_of(spread)
        moved = _apply(inverse, -0.5 * self.features.transpose(0, 2, 1) @ slope)
        total = _total_score(terms, slope, self.features @ moved)
        across = total @ state.transpose(0, 2, 1) + terms.score @ moved.transpose(0, 2, 1)
        return total, across - own


class Dual(NamedTuple):
    """Modes by the rows: the state (b, n, a) is alpha."""

    features: np.ndarray  # (b, n, r), Z L
    kernel: np.ndarray  # (b, n, n), Z L L' Z'

    def gram(self):
        """Z L L' Z' (b, n, n)."""
        return self.kernel

    def deviation(self, state):
        """Predictors (b, n, a) less the population's."""
        return self.kernel @ state

    def penalty(self, state, deviation):
        return 0.5 * np.einsum("bna,bna->b", state, deviation)

    def residual(self, score, state):
        return score - state

    def decrement(self, residual, step, moved):
        return np.einsum("bna,bna->b", residual, moved)

    def system(self, weight):
        """I + W (Z L L' Z' (x) I) (b, n a, n a), of the determinant of H."""
        b, n, a, _ = weight.shape
        system = weight[:, :, :, None, :] * self.kernel[:, :, None, :, None]
        return _plus_identity(system.reshape(b, n * a, n * a))

    def effects(self, state):
        return self.features.transpose(0, 2, 1) @ state

    def slopes(self, state, terms, inverse, slope_of):
        """Slopes of the criterion in u (b, n, a) and, through Z L, in the factor (b, n, r)."""
        b, n, a = terms.score.shape
        blocks = inverse.reshape(b, n, a, n, a)
        spread = np.einsum("bjl,blajc->bjac", self.kernel, blocks)
        spread = 0.5 * (spread + spread.transpose(0, 1, 3, 2))
        own = np.einsum("bjakc,bkca->bjk", blocks, terms.weight)
        slope = slope_of(spread)
        moved = _apply(inverse, -0.5 * slope)
        total = _total_score(terms, slope, self.kernel @ moved)
        across = total @ state.transpose(0, 2, 1) + terms.score @ moved.transpose(0, 2, 1)
        return total, (across - own) @ self.features


class Mode(NamedTuple):
    """Modes of the clients of a stack."""

    state: np.ndarray
    predictors: np.ndarray  # (b, n, a)
    terms: NamedTuple  # RowTerms
    value: np.ndarray  # (b,), log-likelihood less penalty
    found: np.ndarray  # (b,), bool


def stack_rows(columns, labels, weights, codes, n_clients):
    """Stacks of the rows of all clients.

    Parameters
    ----------
    columns : ndarray of shape (n_rows, p)
    labels : ndarray of shape (n_rows,)
    weights : ndarray of shape (n_rows,) or None
    codes : ndarray of shape (n_rows,)
    n_clients : int

    Returns
    -------
    list of Stack
    """
    cells = max(_CELLS // max(columns.shape[1], 1), 1)
    stacks = []
    for batches in _of_similar_size(client_batches(codes, n_clients, cells), cells):
        rows = [batch.rows for batch in batches]
        longest = max(block.shape[1] for block in rows)
        at = np.concatenate([_padded(block, longest) for block in rows])
        clients = np.concatenate([batch.clients for batch in batches])
        x, y = _gathered(columns, at), labels[at]
        w = np.ones(at.shape) if weights is None else weights[at]
        absent = at < 0
        if absent.any():
            x[absent], y[absent], w[absent] = 0.0, 0, 0.0
        stacks.append(Stack(clients, x, y, w))
    return stacks


def _of_similar_size(batches, cells):
    """Consecutive batches that share a stack."""
    joined, key, cost = [], None, 0
    for batch in batches:
        b, n = batch.rows.shape
        step = 1 << max(n.bit_length() - _SIZES.bit_length(), 0)
        cost += b * n
        if key != (n - 1) // step * step or cost > cells:
            joined.append([])
            key, cost = (n - 1) // step * step, b * n
        joined[-1].append(batch)
    return joined


def _gathered(values, at):
    """Rows `at` (b, n) of values; not copied if they follow one another."""
    first = at.ravel()[0]
    if first >= 0 and np.array_equal(at.ravel(), np.arange(first, first + at.size)):
        return values[first : first + at.size].reshape(*at.shape, -1)
    return values[at]


def _padded(rows, length):
    """Rows (b, n) with -1 up to a length."""
    return np.pad(rows, ((0, 0), (0, length - rows.shape[1])), constant_values=-1)


def form_of(x, factor):
    """The smaller of the two systems, for columns (b, n, p) and a factor (q, r)."""
    q, r = factor.shape
    b, n, _ = x.shape
    diagonal = np.diag(factor) if q == r else np.zeros(0)
    if q == r and np.array_equal(factor, np.diag(diagonal)):
        features = x[:, :, :q] * diagonal
    else:
        features = (x[:, :, :q].reshape(b * n, q) @ factor).reshape(b, n, r)
    if r <= n:
        return Primal(features)
    return Dual(features, features @ features.transpose(0, 2, 1))


def population_predictors(x, population):
    """Predictors (b, n, a) of columns (b, n, p) under population coefficients (a, p)."""
    return (x.reshape(-1, x.shape[-1]) @ population.T).reshape(*x.shape[:-1], len(population))


def find_mode(form, outcome, offset, stack, state, last_decrement=_LAST_DECREMENT):
    """Modes by damped Newton steps; every client stops by itself."""
    deviation = form.deviation(state)
    terms = outcome.terms(offset + deviation, stack.y, stack.w)
    value = terms.value.sum(axis=1) - form.penalty(state, deviation)
    moving = np.ones(len(offset), dtype=bool)
    for _ in range(_MAX_NEWTON):
        residual = form.residual(terms.score, state)
        step = _solve(form.system(terms.weight), residual)
        moved = form.deviation(step)
        last = form.decrement(residual, step, moved) < last_decrement
        size = moving.astype(float)
        while True:
            new_state = state + size[:, None, None] * step
            new_deviation = deviation + size[:, None, None] * moved
            terms = outcome.terms(offset + new_deviation, stack.y, stack.w)
            new_value = terms.value.sum(axis=1) - form.penalty(new_state, new_deviation)
            worse = ~(new_value >= value - _SLACK * (1 + np.abs(value))) & (size > 1e-9)
            if not worse.any():
                break
            size[worse] /= 2
        state, deviation, value = new_state, new_deviation, new_value
        moving &= ~last
        if not moving.any():
            break
    return Mode(state, offset + deviation, terms, value, ~moving)


def start_state(stack, factor, n_outputs):
    """State of effects that are zero."""
    b, n, _ = stack.x.shape
    return np.zeros((b, min(n, factor.shape[1]), n_outputs))


def evaluate_stack(clients, x, y, w, state, *, outcome, population, factor):
    """Criterion of the clients of a stack (summed), its gradients, and the state at the mode.

    Returns value, gradient (a, p) in the population, gradient (q, r) in the factor, state and
    whether all modes were found.
    """
    stack = Stack(clients, x, y, w)
    form = form_of(x, factor)
    mode = find_mode(form, outcome, population_predictors(x, population), stack, state)
    system = form.system(mode.terms.weight)
    log_det = np.linalg.slogdet(system)[1]
    slope_of = partial(outcome.weight_slopes, mode.predictors, w)
    score, across = form.slopes(mode.state, mode.terms, np.linalg.inv(system), slope_of)
    columns = x.reshape(-1, x.shape[-1])
    by_population = score.reshape(len(columns), -1).T @ columns
    by_factor = columns[:, : len(factor)].T @ across.reshape(len(columns), -1)
    value = float(np.sum(mode.value - 0.5 * log_det))
    return value, by_population, by_factor, mode.state, bool(mode.found.all())


class LaplaceCriterion:
    """Approximate log marginal likelihood as a function of population and factor.

    Modes are kept from one call to the next, where the next search starts.
    """

    def __init__(self, stacks, outcome, n_clients, n_jobs=None):
        self.stacks, self.outcome = stacks, outcome
        self.n_clients, self.n_jobs = n_clients, n_jobs
        self.states = None
        self.modes_found = True

    def __call__(self, population, factor):
        """Value in nats, gradient (a, p) in the population and (q, r) in the factor."""
        if self.states is None:
            self.states = [start_state(s, factor, self.outcome.n_outputs) for s in self.stacks]
        function = partial(
            evaluate_stack, outcome=self.outcome, population=population, factor=factor
        )
        batches = [(*s, state) for s, state in zip(self.stacks, self.states, strict=True)]
        parts = map_batches(function, batches, self.n_jobs)
        self.states = [part[3] for part in parts]
        self.modes_found = all(part[4] for part in parts)
        value, by_population, by_factor = (sum(part[k] for part in parts) for k in range(3))
        return value, by_population, by_factor


def _plus_identity(systems):
    """Stacked matrices plus the identity, in place."""
    diagonal = np.arange(systems.shape[1])
    systems[:, diagonal, diagonal] += 1.0
    return systems


def _solve(systems, right):
    """Solutions (b, k, a) of systems (b, k a, k a)."""
    if systems.shape[1] <= _SMALL and right.shape[2] == 1:
        return _eliminate(systems, right[..., 0])[..., None]
    return np.linalg.solve(systems, right.reshape(*systems.shape[:2], 1)).reshape(right.shape)


def _eliminate(systems, right):
    """Solutions (b, k): all systems at a time, one column after the other.

    Without pivoting, which I + W K (similar to a positive definite matrix by a diagonal one) and H
    do not need: their pivots are at least 1.
    """
    rows = np.ascontiguousarray(systems.transpose(1, 2, 0))
    values = np.ascontiguousarray(right.T)
    for j in range(len(rows)):
        share = rows[j + 1 :, j] / rows[j, j]
        rows[j + 1 :, j + 1 :] -= share[:, None] * rows[j, j + 1 :]
        values[j + 1 :] -= share * values[j]
    for j in range(len(rows) - 1, -1, -1):
        values[j] /= rows[j, j]
        values[:j] -= rows[:j, j] * values[j]
    return values.T


def _apply(matrices, right):
    """Products (b, k, a) of matrices (b, k a, k a)."""
    return (matrices @ right.reshape(*matrices.shape[:2], 1)).reshape(right.shape)


def _total_score(terms, slope, moved):
    """Slopes of the criterion in u: directly, through log det H, and through the mode."""
    through_mode = (terms.weight @ moved[..., None])[..., 0]
    return terms.score - 0.5 * slope - through_mode
