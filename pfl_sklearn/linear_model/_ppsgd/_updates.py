"""Updates of additive global and local linear models: Algorithms 1, 2 and 3, on blocks of clients.

Coefficients are (d, c) for d features and c outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from pfl_sklearn._rounds.loop import Method, State, Update
from pfl_sklearn._typing import Floats

_CONSTANT_STEPS = 20  # towards the best constant, of which the squared loss needs one


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


def ppsgd(n_clients, shape, loss, steps, divisor, mean_batch, average) -> Method:
    """The method, for coefficients of a `shape` (d, c).

    Parameters
    ----------
    n_clients : int
    shape : tuple
    loss : Loss
    steps : Steps
    divisor : float
        Of the sum of messages: the number of clients, or of rows, expected in a round.
    mean_batch : float or None
        Rows of the average client in a round if messages are sums over rows; None: averages.
    average : bool
        Whether to follow the average iterate.
    """
    return Method(
        partial(zeros, shape, (n_clients, *shape), average),
        partial(dense_update, loss=loss.function, step=steps.local, mean_batch=mean_batch),
        partial(dense_server_update, step=steps.population / divisor),
        {"coef": shape},
    )


def zeros(shape: tuple[int, int], local_shape: tuple[int, ...], average: bool) -> Any:
    """Arrays of the server and of the clients before the first round, with their moments."""
    names = ("coef", "moment")[: 1 + average], ("local", "local_moment")[: 1 + average]
    shapes = zip(names, (shape, local_shape), strict=True)
    server, clients = ({name: np.zeros(size) for name in group} for group, size in shapes)
    return server, clients


def dense_update(server, t, batch, clients, *, loss, step, mean_batch) -> Update:
    """Messages, new local models and losses of clients with rows X (g, b, d)."""
    X, own, n_rows = batch.X, clients.get("step"), batch.X.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # the loop judges what is not finite
        residuals, losses = loss(X @ (server["coef"] + clients["local"]), batch.y)
        if mean_batch is None:  # clients count equally, however many rows they have
            residuals /= n_rows
        gradients = X.transpose(0, 2, 1) @ residuals
        rate = step if own is None else own[:, None, None] * server["pace"]
        change = gradients * (-rate / (mean_batch or 1.0)) if step else None
        new = moved_models(clients, change, t)
        losses = losses.sum(axis=1) / n_rows
    return Update({"coef": gradients}, new, losses)


def moved_models(clients: dict[str, Floats], change: Floats | None, t: int) -> dict[str, Floats]:
    """Local models after a change in round t, None for no step, and their moments.

    A moment is the sum of a model's changes times the numbers of their rounds, from 1: the average
    iterate is the last one less the moment over the number of rounds. So no round looks at models
    of clients that do not take part.
    """
    names: tuple[str, ...] = ("local", "local_moment")
    new = {name: clients[name] for name in names if name in clients}
    if change is not None:
        new["local"] = new["local"] + change
        if "local_moment" in new:
            new["local_moment"] = new["local_moment"] + (t + 1) * change
    return new


def dense_server_update(server: dict, total: dict, t: int, *, step: float) -> dict:
    """New population model."""
    change = -paced(step, server) * total["coef"]
    new = {**server, "coef": server["coef"] + change}
    if "moment" in server:
        new["moment"] = server["moment"] + (t + 1) * change
    return new


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
    if "moment" in state.server and state.round:  # see `moved_models`
        population = population - state.server["moment"] / state.round
        local = local - state.clients["local_moment"] / state.round
    return population, local
