"""Step sizes of PPSGD: from the theorems, from public numbers alone, or from the data."""

import math
from typing import Any

import numpy as np
from scipy.linalg import norm
from sklearn.utils.extmath import row_norms

from pfl_sklearn._rounds.out_of_core import StoredRows, blocks_of
from pfl_sklearn._rounds.privacy import is_private, normalizes
from pfl_sklearn._rounds.rows import count_within
from pfl_sklearn._rounds.step_sizes import AUTO_RATIO, StepSizes, step_sizes
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.theory import ppsgd_learning_rate, smoothness_alpha

_POWERS = 16  # power iterations for a largest eigenvalue, which may be a few percent short
TOTAL_MOVE = 2.0  # how far all rounds together may move w, for features of unit scale
LOCAL_STEP_SUM = 2.0  # sum of the steps of a local model, in units of one over the curvature
LARGEST_NOISE = 0.2  # standard deviation that all rounds together may give a coefficient of w


def check_learning_rate(model: Any) -> None:
    """Raise ValueError if 'theory' lacks its constants, or if 'auto' would leak."""
    if model.learning_rate == "auto" and is_private(model) and not normalizes(model):
        raise ValueError(
            f"learning_rate='auto' with clip_norm={model.clip_norm!r} looks at the data, which "
            "would leak when noise is added; leave clip_norm=None, which normalizes messages, or "
            "give a number, or 'theory' with smoothness."
        )
    if model.learning_rate != "theory":
        return
    if normalizes(model):
        raise ValueError(
            "got learning_rate='theory' with noise and clip_norm=None, which normalizes messages: "
            "the theorems are about gradients. Give clip_norm, or leave learning_rate='auto'."
        )
    if model.smoothness is None:
        raise ValueError(
            "learning_rate='theory' needs smoothness: a bound on the curvature of a row's loss in "
            "both models together (for the squared loss twice the largest squared norm of a row of "
            "X). It is yours, never taken from the data."
        )
    if (model.solution_norm is None) != (model.gradient_std is None):
        raise ValueError(
            "solution_norm and gradient_std belong together; got "
            f"solution_norm={model.solution_norm!r}, gradient_std={model.gradient_std!r}."
        )


def steps_of_run(
    model: Any, plan: Any, rows: Any, alpha: float, n_expected: float, mean_batch: float | None
) -> tuple[float, StepSizes, Floats | None]:
    """Learning rate, steps, and each client's local step (m,) if they depend on the data."""
    rate, client_steps = _rate(model, plan, rows, alpha, n_expected, mean_batch)
    if not normalizes(model):
        return rate, step_sizes(alpha, rate, n_expected), client_steps
    # On messages of length one, a step moves w by the rate at most. The sum of a client's local
    # steps does not depend on the number of rounds: it is what keeps local models, which have no
    # penalty, from overfitting. At the default `alpha` neither model's steps are shortened.
    n_taken = model._last_round(0) * model._participation
    local = LOCAL_STEP_SUM / (model._loss.curvature * n_taken)
    units = step_sizes(alpha / AUTO_RATIO, 1.0, n_expected)
    return rate, StepSizes(rate * units.population, local * units.local), client_steps


def _rate(model, plan, rows, alpha, n_expected, mean_batch):
    """Learning rate, and each client's local step (m,) if they depend on the data, else None."""
    if model.learning_rate not in ("auto", "theory"):
        return float(model.learning_rate), None
    # Later rounds keep the rate, as `learning_rate_` is one number for the whole fit.
    earlier_rate = None if plan.earlier is None else plan.earlier.attributes["learning_rate_"]
    if uses_data_scales(model):
        return auto_steps(rows, model._loss, alpha, n_expected, mean_batch, earlier_rate)
    # Other rates depend on the number of rounds of a fit, unless it releases nothing more.
    if earlier_rate is not None and (plan.is_frozen or (normalizes(model) and not plan.events)):
        return earlier_rate, None
    n_rounds = model._last_round(0)
    if normalizes(model):
        return public_step(plan.mechanism.noise_multiplier, n_rounds, n_expected), None
    return theory_learning_rate(model, rows, alpha, n_expected, n_rounds), None


def uses_data_scales(model: Any) -> bool:
    """Whether steps, scales of features and the start depend on the data."""
    return model.learning_rate == "auto" and not normalizes(model)


def theory_learning_rate(model, rows, alpha, n_expected, n_rounds) -> float:
    """Larger of the two steps at the step eta of the theorems, which are about fixed `n_rounds`."""
    smoothness = smoothness_alpha(
        model.smoothness,
        alpha,
        rows.n_clients,
        batch_sizes=rows.schedule.batch_sizes,
        client_fraction=n_expected / rows.n_clients,
        weighting=model.weighting,
    )
    norm, std = model.solution_norm or 1.0, model.gradient_std or 0.0
    eta = float(ppsgd_learning_rate(smoothness, norm, std, n_rounds))
    # Ours are steps on averages; the paper's on sums take the number of clients out of both.
    return eta if math.isinf(alpha) else eta * max(alpha, 1 / n_expected)


def public_step(noise_multiplier: float, n_rounds: int, n_expected: float) -> float:
    """How far w may move in one of `n_rounds` rounds: from public numbers alone."""
    # The noise on w depends on how far it moves in all rounds together, not on their number.
    # Standard deviation of the noise on a coefficient if all rounds together may move w by 1.
    unit = noise_multiplier / math.sqrt(n_rounds) / n_expected
    return TOTAL_MOVE / max(1.0, TOTAL_MOVE * unit / LARGEST_NOISE) / n_rounds


def auto_steps(rows, loss, alpha, n_expected, mean_batch, rate=None) -> tuple[float, Floats]:
    """Learning rate, and the local step (m,) of every client, from the data."""
    # Unless given, the learning rate is the inverse curvature of an average round: all rows
    # together, plus an allowance for sampled clients and batches that are steeper. A client whose
    # batches are far steeper than the others' takes smaller local steps.
    units = step_sizes(alpha, 1.0, n_expected)
    sizes, batch_sizes = np.diff(rows.offsets), rows.schedule.batch_sizes
    # Messages are sums over rows, relative to an average batch, or means.
    relative = batch_sizes / mean_batch if mean_batch else np.ones(len(sizes))
    steepest = relative * batch_curvatures(rows.X, rows.offsets, batch_sizes)
    if rate is None and steepest.any():
        shared = largest_eigenvalue(rows.X, np.repeat(relative / sizes, sizes) / rows.n_clients)
        share = steepest / steepest.max()  # their squares may be too large
        typical = steepest.max() * np.sum(share**2) / np.sum(share)
        total = units.population * (shared + typical / n_expected) + units.local * typical
        rate = 1 / (loss.curvature * total)
    rate = 1.0 if rate is None else float(rate)  # any will do if all features are 0
    # Steps of 2 / curvature diverge. A quarter of that bounds a client alone, whatever the others.
    most = 0.5 / (loss.curvature * np.where(steepest > 0, steepest, 1.0))
    return rate, np.minimum(rate * units.local, most)


def batch_curvatures(X: Any, offsets: Integers, batch_sizes: Integers) -> Floats:
    """Bounds (m,) on the curvature of each client's batches, in units of the loss's."""
    # They are the largest mean squared norms of so many rows that follow one another, of rows X
    # (dense or CSR) in client order.
    squares = [row_norms(rows, squared=True) for _, rows in blocks_of(X)]
    total = np.cumsum(np.concatenate([[0.0], *squares]))
    counts = -(-np.diff(offsets) // batch_sizes)
    first = np.repeat(offsets[:-1], counts) + count_within(counts) * np.repeat(batch_sizes, counts)
    sizes = np.repeat(batch_sizes, counts)
    first = np.minimum(first, np.repeat(offsets[1:], counts) - sizes)
    # Differences of running sums may come out a little below 0.
    means = np.maximum(total[first + sizes] - total[first], 0.0) / sizes
    return np.maximum.reduceat(means, np.cumsum(counts) - counts)


def largest_eigenvalue(X: Any, weights: Floats) -> float:
    """Largest eigenvalue of the sum of x x' over rows X (n, p), with weights (n,)."""
    # From a fixed seed, so that equal data have equal steps.
    vector = np.random.default_rng(0).normal(size=X.shape[1])
    products: Any = None
    if isinstance(X, StoredRows):  # with the products a file is read once instead of each time
        products = sum(rows.T @ (weights[part, None] * rows) for part, rows in blocks_of(X))
    for _ in range(_POWERS):
        vector = vector / norm(vector, check_finite=False)  # not numpy's, which may overflow
        vector = X.T @ (weights * (X @ vector)) if products is None else products @ vector
        if not vector.any():
            return 0.0
    return float(norm(vector, check_finite=False))
