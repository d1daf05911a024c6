"""Updates of additive global and local linear models, and the sizes of their steps.

Algorithms 1, 2 and 3, on blocks of clients. Coefficients are (d, c) for d features and c outputs.
Step sizes come from alpha, from the theorems, or from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import expit

from pfl_sklearn._columns import check_float_range
from pfl_sklearn._rounds.loop import Method, State, Update
from pfl_sklearn._rounds.privacy import is_private, normalizes
from pfl_sklearn._rounds.rows import count_within, is_sparse
from pfl_sklearn._rounds.stored import StoredRows, blocks_of
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.theory import ppsgd_learning_rate, smoothness_alpha

if TYPE_CHECKING:
    from pfl_sklearn._rounds.run import CheckedTable

# Names of a model and of its moment, in the states of the server and of the clients.
_POPULATION, _LOCAL = ("coef", "moment"), ("local", "local_moment")
_CONSTANT_STEPS = 20  # towards the best constant, of which the squared loss needs one
AUTO_RATIO = 30.0  # of the global step to the local ones
_POWERS = 16  # products that a largest eigenvalue takes; a few percent short is good enough
REACH = 2.0  # how far all rounds together may move w, for features of unit scale
LOCAL_TIME = 2.0  # sum of the steps of a local model, in units of one over the curvature
MOST_NOISE = 0.2  # standard deviation that all rounds together may give a coefficient of w
_UNIT_SCALE = 3.0  # root mean square of a column that needs no scaling


class Loss(NamedTuple):
    """Function from predictors (g, b, c) and targets to residuals and losses (g, b).

    Residuals are the derivative by the predictors. `curvature` bounds the second derivative.
    """

    function: Callable[[Floats, np.ndarray], tuple[Floats, Floats]]
    curvature: float


def squared_error(predictors: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Half squared error; targets (g, b, c)."""
    residuals = predictors - y
    return residuals, 0.5 * np.vecdot(residuals, residuals)


def log_loss(predictors: Floats, y: np.ndarray) -> tuple[Floats, Floats]:
    """Logistic loss of one predictor (g, b, 1), or softmax loss of several; labels (g, b)."""
    if predictors.shape[-1] == 1:
        # Of the margin, whose exponential cannot overflow in logaddexp and expit.
        signed = np.where(y == 1, predictors[..., 0], -predictors[..., 0])
        residuals = np.where(y == 1, -expit(-signed), expit(-signed))[..., None]
        return residuals, np.logaddexp(0.0, -signed)
    shifted = predictors - predictors.max(axis=-1, keepdims=True)  # exp of large ones overflows
    odds = np.exp(shifted)
    total = odds.sum(axis=-1, keepdims=True)
    residuals, own = odds / total, y[..., None]
    chosen = np.take_along_axis(shifted, own, axis=-1)[..., 0]
    np.put_along_axis(residuals, own, np.take_along_axis(residuals, own, axis=-1) - 1.0, axis=-1)
    return residuals, np.log(total[..., 0]) - chosen


def one_versus_all(predictors: Floats, y: np.ndarray) -> tuple[Floats, Floats]:
    """Half squared error of the indicators of classes, less their mean; labels (g, b)."""
    n_classes = predictors.shape[-1]
    if n_classes == 1:
        targets = (y - 0.5)[..., None]
    else:
        targets = np.eye(n_classes)[y] - 1.0 / n_classes
    return squared_error(predictors, targets)


LOSSES = {
    "squared_error": Loss(squared_error, 1.0),
    # The softmax's Hessian diag(p) - p p' has eigenvalues up to 1/2, that of one logit 1/4.
    "log_loss": Loss(log_loss, 0.5),
    "one_versus_all": Loss(one_versus_all, 1.0),
}


def best_constant(loss: Loss, y: np.ndarray, n_outputs: int) -> tuple[Floats, float]:
    """Constant predictors (c,) that are nearly best for targets, and their mean loss."""
    constant = np.zeros(n_outputs)
    for _ in range(_CONSTANT_STEPS):  # each of one over the curvature, which cannot overshoot
        residuals, _ = loss.function(np.tile(constant, (1, len(y), 1)), y[None])
        constant -= residuals.mean(axis=(0, 1)) / loss.curvature
    _, losses = loss.function(np.tile(constant, (1, len(y), 1)), y[None])
    return constant, float(losses.mean())


def ppsgd(n_clients, shape, loss, steps, divisor, mean_batch, average, bounded=False) -> Method:
    """The method, for coefficients of a `shape` (d, c).

    Parameters
    ----------
    n_clients : int
    shape : tuple
    loss : Loss
    steps : StepSizes
    divisor : float
        Of the sum of messages: the number of clients, or of rows, expected in a round.
    mean_batch : float or None
        Rows of the average client in a round if messages are sums over rows; None: averages.
    average : bool
        Whether to follow the average iterate.
    bounded : bool
        Whether local steps are at most the inverse curvature of their batch.
    """
    local = {"loss": loss, "step": steps.local, "mean_batch": mean_batch, "bounded": bounded}
    return Method(
        partial(zeros, shape, (n_clients, *shape), average),
        partial(dense_update, **local),
        partial(dense_server_update, step=steps.population / divisor),
        {"coef": shape},
    )


def zeros(shape: tuple[int, int], local_shape: tuple[int, ...], average: bool) -> Any:
    """Arrays of the server and of the clients before the first round, with their moments."""
    names = (names[: 1 + average] for names in (_POPULATION, _LOCAL))
    shapes = zip(names, (shape, local_shape), strict=True)
    return tuple({name: np.zeros(size) for name in group} for group, size in shapes)


def dense_update(server, t, batch, clients, *, loss, step, mean_batch, bounded) -> Update:
    """Messages, new local models and losses of clients with rows X (g, b, d)."""
    X, own, n_rows = batch.X, clients.get("step"), batch.X.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # the loop judges what is not finite
        residuals, losses = loss.function(X @ (server["coef"] + clients["local"]), batch.y)
        if mean_batch is None:  # clients count equally, however many rows they have
            residuals /= n_rows
        gradients = X.transpose(0, 2, 1) @ residuals
        rate = step if own is None else own[:, None, None] * server["pace"]
        if bounded:
            squares = np.einsum("gbd,gbd->g", X, X) / (mean_batch or n_rows)
            rate = bounded_step(step, loss, squares)[:, None, None]
        change = gradients * (-rate / (mean_batch or 1.0)) if step else None
        new = moved_models(clients, change, t)
        losses = losses.sum(axis=1) / n_rows
    return Update({"coef": gradients}, new, losses)


def bounded_step(step: float, loss: Loss, squares: Floats) -> Floats:
    """Local steps (g,), at most the inverse curvature of batches with squared norms (g,)."""
    with np.errstate(divide="ignore"):  # rows of zeros take no step, however long it is
        return np.minimum(step, 1 / (loss.curvature * squares))


def moved_models(clients: dict[str, Floats], change: Floats | None, t: int) -> dict[str, Floats]:
    """Local models after a change in round t, None for no step, and their moments."""
    if change is None:
        return {name: clients[name] for name in _LOCAL if name in clients}
    return _moved(clients, _LOCAL, change, t)


def _moved(arrays, names, change, t):
    """A model of these names after a change in round t, and its moment if it has one.

    A moment is the sum of a model's changes times the numbers of their rounds, from 1: the average
    iterate is the last one less the moment over the number of rounds. So no round looks at models
    of clients that do not take part.
    """
    model, moment = names
    new = {model: arrays[model] + change}
    if moment in arrays:
        new[moment] = arrays[moment] + (t + 1) * change
    return new


def dense_server_update(server: dict, total: dict, t: int, *, step: float) -> dict:
    """New population model."""
    return {**server, **_moved(server, _POPULATION, -paced(step, server) * total["coef"], t)}


def paced(step: float, server: dict[str, Floats]) -> float:
    """Step size, halved each time that the training loss rose."""
    return step * server["pace"][0] if "pace" in server else step


def with_own_steps(method, coordinates, steps, intercept) -> Method:
    """Method with scaled features and a local step for each client.

    The server's `pace` is a factor on all steps. The population model starts at an intercept (c,),
    unless that is None.
    """

    def init():
        server, clients = method.init()
        server |= {**coordinates._asdict(), "pace": np.ones(1)}
        if intercept is not None:
            server["coef"][-1] = intercept
        return server, clients

    # Steps follow the rows of this call, not those of the rounds before.
    return method._replace(init=init, constants={"step": steps})


def iterates(state: State) -> tuple[Floats, Floats]:
    """Population and local models of a state, or their averages over the rounds."""
    population, local = state.server["coef"], state.clients["local"]
    if "moment" in state.server and state.round:  # see `_moved`
        population = population - state.server["moment"] / state.round
        local = local - state.clients["local_moment"] / state.round
    return population, local


# Step sizes ---------------------------------------------------------------------------------------


class StepSizes(NamedTuple):
    """Step sizes of both models on average gradients.

    Parameters
    ----------
    population : float
        On the average over the clients expected in a round.
    local : float
        On a client's own average over its rows, of a client with the average number of them.
    """

    population: float
    local: float


def alpha_of(alpha: float | str, n_expected: float) -> float:
    """Number that `alpha` stands for, with so many clients expected in a round."""
    return AUTO_RATIO / n_expected if alpha == "auto" else float(alpha)


def step_sizes(alpha: float, learning_rate: float, n_expected: float) -> StepSizes:
    """Step sizes of the two models; `learning_rate` is the larger of them.

    With ``a = alpha * n_expected`` they are (a, 1) for a <= 1 and (1, 1 / a) beyond, in units of
    `learning_rate`. In the paper's symbols they are alpha eta and eta / (q N).
    """
    if math.isinf(alpha):
        return StepSizes(learning_rate, 0.0)
    ratio = alpha * n_expected
    if ratio <= 1:
        return StepSizes(ratio * learning_rate, learning_rate)
    return StepSizes(learning_rate, learning_rate / ratio)


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


def theory_learning_rate(model, rows, alpha, n_expected, n_rounds) -> float:
    """Larger of the two steps at the step eta of the theorems."""
    smoothness = smoothness_alpha(
        model.smoothness,
        alpha,
        rows.n_clients,
        batch_sizes=rows.schedule.batch_sizes,
        client_fraction=n_expected / rows.n_clients,
        weighting=model.weighting,
    )
    norm, std = model.solution_norm or 1.0, model.gradient_std or 0.0
    eta = ppsgd_learning_rate(smoothness, norm, std, n_rounds)
    # Ours are steps on averages; the paper's on sums take the number of clients out of both.
    return eta if math.isinf(alpha) else eta * max(alpha, 1 / n_expected)


def normalized_steps(
    move: float, alpha: float, n_expected: float, loss: Loss, n_taken: float
) -> StepSizes:
    """Steps on messages of length one, which move w by `move` at most, and on local gradients.

    Local steps add up to the same time whatever the number `n_taken` of rounds that a client is
    expected in: local models have no penalty, so the time is what keeps them from overfitting.
    Both are full at the default `alpha`.
    """
    units = step_sizes(alpha / AUTO_RATIO, 1.0, n_expected)
    local = LOCAL_TIME / (loss.curvature * n_taken)
    return StepSizes(move * units.population, local * units.local)


def public_move(noise_multiplier: float, n_rounds: int, n_expected: float) -> float:
    """How far w may move in one of `n_rounds` rounds: from public numbers alone.

    The noise on w depends on how far all rounds together reach, not on their number.
    """
    unit = noise_multiplier / math.sqrt(n_rounds) / n_expected  # of a coefficient, at a reach of 1
    return REACH / max(1.0, REACH * unit / MOST_NOISE) / n_rounds


def auto_steps(
    rows, loss, weighting, alpha, n_expected, mean_batch, rate=None
) -> tuple[float, Floats]:
    """Learning rate, and the local step (m,) of every client: they look at the data.

    Unless it is given, the learning rate is the inverse curvature of an average round: of all rows
    together, and of the chance that `n_expected` clients and their batches are steeper. A client
    whose batches are far steeper than the others' has a smaller local step of its own.
    """
    units = step_sizes(alpha, 1.0, n_expected)
    relative = np.ones(rows.n_clients)
    if weighting == "samples":
        relative = rows.schedule.batch_sizes / mean_batch
    steepest = relative * batch_curvatures(rows.X, rows.offsets, rows.schedule.batch_sizes)
    if rate is None and steepest.any():
        sizes = np.diff(rows.offsets)
        shared = largest_eigenvalue(rows.X, np.repeat(relative / sizes, sizes) / rows.n_clients)
        share = steepest / steepest.max()  # their squares may be too large
        typical = steepest.max() * np.sum(share**2) / np.sum(share)
        total = units.population * (shared + typical / n_expected) + units.local * typical
        rate = 1 / (loss.curvature * total)
    rate = 1.0 if rate is None else float(rate)  # any will do if all features are 0
    # Steps of 2 / curvature diverge. A quarter of that bounds a client alone, whatever the others.
    most = 0.5 / (loss.curvature * np.where(steepest > 0, steepest, 1.0))
    return rate, np.minimum(rate * units.local, most)


def check_squarable(table: CheckedTable) -> None:
    """Raise ValueError if values cannot be squared; not for fits with noise.

    We scale columns inside, so they may be small.
    """
    features = table.features.data if is_sparse(table.features) else table.features
    for _, rows in blocks_of(features):
        check_float_range("X", rows, smallest=0.0)
    if table.y.dtype.kind == "f":
        check_float_range("y", table.y)


def divergence_advice(
    table: CheckedTable, learning_rate: float, private: bool, smoothness: float | None = None
) -> str:
    """Sentence to give if the rounds diverge; in a private fit it does not depend on the data.

    A rate "theory" follows from the `smoothness` given.
    """
    text, lower = f"learning_rate={learning_rate:.4g} is too large", "lower it"
    if smoothness is not None:
        text = (
            f"learning_rate='theory', which is {learning_rate:.4g} for smoothness={smoothness:.4g},"
            " is too large"
        )
        lower = "raise smoothness"
    if private:
        return f"{text} for these features. {lower.capitalize()}, or scale the features."
    if _largest_size(table.features) > _UNIT_SCALE:
        return f"{text} for these features. Scale them, or {lower}."
    return f"{text}, although the features have unit scale. {lower.capitalize()}."


def _largest_size(X):
    """Largest root mean square of a column of X (n, d), dense or CSR.

    Methods of a sparse X may add up its duplicates in place, and its arrays are the caller's.
    """
    with np.errstate(over="ignore"):
        if is_sparse(X):
            squares = np.bincount(X.indices, X.data**2, X.shape[1])
        else:
            squares = sum(np.einsum("nd,nd->d", rows, rows) for _, rows in blocks_of(X))
        return float(np.sqrt(squares.max(initial=0.0) / X.shape[0]))


def batch_curvatures(X: Any, offsets: Integers, batch_sizes: Integers) -> Floats:
    """Bounds (m,) on the curvature of each client's batches, in units of the loss's.

    They are the largest mean squared norms of so many rows that follow one another, of rows X
    (dense or CSR) in client order.
    """
    if is_sparse(X):
        squares = np.asarray(X.power(2).sum(axis=1)).ravel()
    else:
        parts = [np.einsum("nd,nd->n", rows, rows) for _, rows in blocks_of(X)]
        squares = np.concatenate(parts)
    total = np.concatenate([[0.0], np.cumsum(squares)])
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
    vector, eigenvalue = np.random.default_rng(0).normal(size=X.shape[1]), 0.0
    products = _products(X, weights) if isinstance(X, StoredRows) else None
    for _ in range(_POWERS):
        vector = vector / np.linalg.norm(vector)
        vector = X.T @ (weights * (X @ vector)) if products is None else products @ vector
        size = np.abs(vector).max()  # divided by, so that the norm cannot overflow
        if size == 0:
            return 0.0
        vector = vector / size
        eigenvalue = float(size * np.linalg.norm(vector))
    return eigenvalue


def _products(X, weights):
    """Sum (p, p) of x x' over stored rows: with it, a file is read once instead of each time."""
    products = np.zeros((X.shape[1], X.shape[1]))
    for part, rows in blocks_of(X):
        products += rows.T @ (weights[part, None] * rows)
    return products
