"""PPSGD as a method on rounds: updates of additive global and local linear models.

Algorithms 1, 2 and 3, on blocks of clients. Coefficients are (d, c) for d features and c outputs.
Local models of dense rows are (g, d, c); those of sparse rows are values (n, c) on the pairs of a
client and a feature that occurs in its rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from pfl_sklearn._rounds.loop import Method, State, Update
from pfl_sklearn._typing import Floats
from pfl_sklearn.linear_model._ppsgd._sparse import LocalModels
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseMessages

# Names of a model and of its moment, in the states of the server and of the clients.
_POPULATION, _LOCAL = ("coef", "moment"), ("local", "local_moment")
_CONSTANT_STEPS = 20  # gradient steps to the best constant; the squared loss needs one


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
    residuals, label = odds / total, y[..., None]
    chosen = np.take_along_axis(shifted, label, axis=-1)[..., 0]
    np.put_along_axis(
        residuals, label, np.take_along_axis(residuals, label, axis=-1) - 1.0, axis=-1
    )
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
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the mean loss
        for _ in range(_CONSTANT_STEPS):  # steps of one over the curvature cannot overshoot
            residuals, _ = loss.function(np.tile(constant, (1, len(y), 1)), y[None])
            constant -= residuals.mean(axis=(0, 1)) / loss.curvature
        _, losses = loss.function(np.tile(constant, (1, len(y), 1)), y[None])
    return constant, float(losses.mean())


def ppsgd(
    n_local, shape, loss, steps, divisor, mean_batch, average, bounded=False, sparse=False
) -> Method:
    """The method, for coefficients of a `shape` (d, c) and `n_local` clients, or pairs if `sparse`.

    The sum of messages is divided by `divisor`, the number of clients or of rows expected in a
    round. If messages are sums over rows, `mean_batch` is the mean batch, else None. With
    `average` the states include moments; if `bounded`, local steps are at most the inverse
    curvature of their batch.
    """
    local_shape = (n_local, shape[1]) if sparse else (n_local, *shape)

    def init():
        server, clients = (
            {name: np.zeros(size) for name in names[: 1 + average]}
            for names, size in ((_POPULATION, shape), (_LOCAL, local_shape))
        )
        if sparse:  # the noise variance that features have got, and are due: see LateNoise
            server |= {"settled": np.zeros(shape[0]), "variance": np.zeros(1)}
        return server, clients

    settings = {"loss": loss, "step": steps.local, "mean_batch": mean_batch, "bounded": bounded}
    client_update = partial(sparse_update if sparse else dense_update, **settings)
    move = sparse_server_update if sparse else dense_server_update
    server_update = partial(move, step=steps.population / divisor)
    return Method(init, client_update, server_update, {"coef": shape})


def dense_update(server, t, batch, clients, *, loss, step, mean_batch, bounded) -> Update:
    """Messages, new local models and losses of clients with rows X (g, b, d)."""
    X, n_rows = batch.X, batch.X.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # the loop judges what is not finite
        residuals, losses = loss.function(X @ (server["coef"] + clients["local"]), batch.y)
        if mean_batch is None:  # clients count equally, however many rows they have
            residuals /= n_rows
        gradients = X.transpose(0, 2, 1) @ residuals
        squares = np.einsum("gbd,gbd->g", X, X) / (mean_batch or n_rows) if bounded else None
        new = _local_models(server, t, clients, gradients, squares, loss, step, mean_batch)
        losses = losses.sum(axis=1) / n_rows
    return Update({"coef": gradients}, new, losses)


def sparse_update(server, t, batch, clients, *, loss, step, mean_batch, bounded) -> Update:
    """Messages, new local values (n, c) and losses of the clients of a batch of sparse rows."""
    (X, y, features, owner, sizes), squares = batch, None
    client = np.repeat(np.arange(len(sizes)), sizes)
    with np.errstate(over="ignore", invalid="ignore"):  # the loop judges what is not finite
        predictors = X @ (server["coef"].take(features, axis=0) + clients["local"])
        (residuals,), (losses,) = loss.function(predictors[None], y[None])
        if mean_batch is None:  # clients count equally, however many rows they have
            residuals = residuals / np.repeat(sizes, sizes)[:, None]
        gradients = X.T @ residuals
        if bounded:
            squares = np.bincount(client, X.power(2).sum(axis=1), len(sizes))
            squares = (squares / (mean_batch or sizes))[owner]
        new = _local_models(server, t, clients, gradients, squares, loss, step, mean_batch)
    losses = np.bincount(client, losses, len(sizes)) / sizes
    return Update(SparseMessages(gradients, features, owner, len(sizes)), new, losses)


def _local_models(server, t, clients, gradients, squares, loss, step, mean_batch):
    """Local models after a step along gradients (k, ...) in round t, and their moments.

    Given squared norms (k,) of batches, steps are at most the inverse curvature of these.
    """
    if not step:  # only a global model is learned
        return {}
    if "step" in clients:
        step = clients["step"] * server["pace"]
    elif squares is not None:
        with np.errstate(divide="ignore"):  # rows of zeros take no step, however long it is
            step = np.minimum(step, 1 / (loss.curvature * squares))
    change = gradients.T * (-step / (mean_batch or 1.0))  # clients come last here
    return _apply_change(clients, _LOCAL, change.T, t)


def _apply_change(arrays, names, change, t):
    """A model after a change in round t, and its moment if it has one, by their `names`."""
    # A moment is the sum of a model's changes times their round numbers, from 1: the average
    # iterate is the last one less the moment over the number of rounds. So no round has to touch
    # the models of clients that are not sampled.
    model, moment = names
    new = {model: arrays[model] + change}
    if moment in arrays:
        new[moment] = arrays[moment] + (t + 1) * change
    return new


def dense_server_update(server: dict, total: dict, t: int, *, step: float) -> dict:
    """New population model."""
    return {
        **server,
        **_apply_change(server, _POPULATION, -_current_step(step, server) * total["coef"], t),
    }


def sparse_server_update(server: dict, total: Any, t: int, *, step: float) -> dict:
    """Population model after a round, in place, since most features stay; its noise comes later."""
    change = -_current_step(step, server) * total.values
    server["coef"][total.rows] += change
    if "moment" in server:
        server["moment"][total.rows] += (t + 1) * change
    server["variance"] += total.pending_variance
    return server


def _current_step(step, server):
    """Step size, halved each time that the training loss rose."""
    return step * server["pace"][0] if "pace" in server else step


def with_client_steps(method: Method, server: dict[str, Floats], intercept, steps) -> Method:
    """Method with a local step for each client, and further arrays of the `server`.

    The server's `pace` is a factor on all steps. The population model starts at an intercept (c,),
    unless that is None.
    """

    def init():
        start, clients = method.init()
        if intercept is not None:
            start["coef"][-1] = intercept
        return {**start, **server, "pace": np.ones(1)}, clients

    # Steps follow the rows of this call, not those of the rounds before.
    return method._replace(init=init, constants={"step": steps})


def model_iterates(state: State, layout: Any, n_clients: int) -> tuple[Floats, Any]:
    """Population and local models of a state, or their averages over the rounds.

    Local models are arrays (m, p, c), or :class:`LocalModels` if sparse rows have a `layout`.
    """
    population, local = state.server["coef"], state.clients["local"]
    if "moment" in state.server and state.round:  # see `_apply_change`
        population = population - state.server["moment"] / state.round
        local = local - state.clients["local_moment"] / state.round
    return population, local if layout is None else LocalModels(layout, local, n_clients)
