"""Updates of additive global and local linear models: Algorithms 1, 2 and 3, on blocks of clients.

Coefficients are (d, c) for d features and c outputs.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from pfl_sklearn._rounds.loop import Method, Update

_STEPS = 20  # of which the squared loss needs one


class Loss(NamedTuple):
    """Function from predictors (g, b, c) and targets to residuals and losses (g, b).

    Residuals are the derivative by the predictors. `curvature` bounds the second derivative.
    """

    function: object
    curvature: float


def squared_error(predictors, y):
    """Half squared error; targets (g, b, c)."""
    residuals = predictors - y
    return residuals, 0.5 * np.vecdot(residuals, residuals)


def log_loss(predictors, y):
    """Logistic loss of one predictor (g, b, 1), or softmax loss of several; labels (g, b)."""
    if predictors.shape[-1] == 1:
        signed = np.where(y == 1, predictors[..., 0], -predictors[..., 0])
        residuals = np.where(y == 1, -expit(-signed), expit(-signed))[..., None]
        return residuals, np.logaddexp(0.0, -signed)
    shifted = predictors - predictors.max(axis=-1, keepdims=True)
    odds = np.exp(shifted)
    total = odds.sum(axis=-1, keepdims=True)
    residuals = odds / total
    chosen = np.take_along_axis(shifted, y[..., None], axis=-1)[..., 0]
    np.put_along_axis(
        residuals, y[..., None], np.take_along_axis(residuals, y[..., None], -1) - 1.0, axis=-1
    )
    return residuals, np.log(total[..., 0]) - chosen


def one_versus_all(predictors, y):
    """Half squared error of the indicators of classes, less their mean; labels (g, b)."""
    n_classes = predictors.shape[-1]
    if n_classes == 1:
        targets = (y - 0.5)[..., None]
    else:
        targets = np.eye(n_classes)[y] - 1.0 / n_classes
    return squared_error(predictors, targets)


LOSSES = {
    "squared_error": Loss(squared_error, 1.0),
    "log_loss": Loss(log_loss, 0.5),
    "one_versus_all": Loss(one_versus_all, 1.0),
}


def best_constant(loss, y, n_outputs):
    """Constant predictors (c,) that are nearly best for targets, and their mean loss."""
    constant = np.zeros(n_outputs)
    for _ in range(_STEPS):
        residuals, _ = loss.function(np.tile(constant, (1, len(y), 1)), y[None])
        constant -= residuals.mean(axis=(0, 1)) / loss.curvature
    _, losses = loss.function(np.tile(constant, (1, len(y), 1)), y[None])
    return constant, float(losses.mean())


def ppsgd(n_clients, shape, loss, steps, divisor, mean_batch, average):
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
    names = ("local", "local_moment") if average else ("local",)
    population = ("coef", "moment") if average else ("coef",)

    def init():
        server = {name: np.zeros(shape) for name in population}
        return server, {name: np.zeros((n_clients, *shape)) for name in names}

    return Method(
        init,
        partial(dense_update, loss=loss.function, step=steps.local, mean_batch=mean_batch),
        partial(dense_server_update, step=steps.population / divisor),
        {"coef": shape},
    )


def dense_update(server, t, batch, clients, *, loss, step, mean_batch):
    """Messages, new local models and losses of clients with rows X (g, b, d).

    The moment of the local model is the sum of its increments times the numbers of their rounds,
    from 1: the average iterate is the last one less the moment over the number of rounds.
    """
    X, y = batch.X, batch.y
    local, moment, n_rows = clients["local"], clients.get("local_moment"), X.shape[1]
    own = clients.get("step")
    with np.errstate(over="ignore", invalid="ignore"):
        coef = server["coef"] + local
        residuals, losses = loss(X @ coef, y)
        if mean_batch is None:
            residuals /= n_rows
        gradients = X.transpose(0, 2, 1) @ residuals
        if step:
            rate = step if own is None else own[:, None, None] * server["pace"]
            change = np.multiply(gradients, -rate / (mean_batch or 1.0), out=coef)
            moment = None if moment is None else moment + (t + 1) * change
            local = np.add(local, change, out=coef)
        losses = losses.sum(axis=1) / n_rows
    new = {"local": local} if moment is None else {"local": local, "local_moment": moment}
    return Update({"coef": gradients}, new, losses)


def dense_server_update(server, total, t, *, step):
    """New population model."""
    change = -paced(step, server) * total["coef"]
    new = {**server, "coef": server["coef"] + change}
    if "moment" in server:
        new["moment"] = server["moment"] + (t + 1) * change
    return new


def paced(step, server):
    """Step at the pace that the server has come down to."""
    return step * server["pace"][0] if "pace" in server else step


def with_own_steps(method, coordinates, steps, intercept):
    """The method in coordinates of its own, with a local step for each client, clients first.

    The server's `pace` is a factor on all steps. The population model starts at an intercept (c,),
    unless that is None.
    """

    def init():
        server, clients = method.init()
        server |= {**coordinates._asdict(), "pace": np.ones(1)}
        if intercept is not None:
            server["coef"][-1] = intercept
        return server, {**clients, "step": steps.copy()}

    return method._replace(init=init)


def averaged(last, moment, n_rounds):
    """Average over the rounds of an iterate that started at 0, before each of their updates."""
    return last - moment / n_rounds


def iterates(state):
    """Population and local models of a state, or their averages over the rounds."""
    population, local = state.server["coef"], state.clients["local"]
    if "moment" not in state.server or not state.round:
        return population, local
    return (
        averaged(population, state.server["moment"], state.round),
        averaged(local, state.clients["local_moment"], state.round),
    )
