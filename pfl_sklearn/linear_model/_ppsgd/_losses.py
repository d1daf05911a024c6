"""Losses by which rounds of PPSGD are judged: whether they are over, and whether they diverged."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pfl_sklearn._rounds.loop import State
from pfl_sklearn._rounds.run import Run
from pfl_sklearn._rounds.stopping import FlatRule
from pfl_sklearn._typing import Floats
from pfl_sklearn.linear_model._ppsgd._coordinates import DesignRows
from pfl_sklearn.linear_model._ppsgd._sparse import LocalModels
from pfl_sklearn.linear_model._ppsgd._updates import Loss, best_constant, iterates


def flat_rule(
    run: Run,
    loss: Loss,
    train: DesignRows,
    held: DesignRows,
    by_rows: bool,
    fewest: float,
    tol: float,
    paced: bool,
) -> FlatRule:
    """Rule that ends the rounds when the loss of the held-out rows is flat.

    Clients count by their rows, or equally. No loss counts as flat before the `fewest` rounds.
    """
    sizes = np.diff(train.offsets)
    even = np.ones(len(sizes)) if by_rows else 1 / sizes
    # Clients of one row each hold none out; then the training loss stands for both.
    others = [(held, even)] if len(held.y) else []
    of_parts = _losses(run, loss, [(train, _weights(run, sizes, by_rows)), *others])

    def losses(state):
        values = of_parts(state)
        return values[0], values[-1]

    unit = _constant_loss(run, loss, train)
    return FlatRule(losses, tol, unit, fewest, paced, run.advice)


def final_loss(
    run: Run, loss: Loss, train: DesignRows, by_rows: bool
) -> Callable[[State], tuple[float, float]]:
    """Function of a state that gives the mean training loss, and that of the best constant."""
    of_parts = _losses(run, loss, [(train, _weights(run, np.diff(train.offsets), by_rows))])
    return lambda state: (of_parts(state)[0], _constant_loss(run, loss, train))


def _weights(run, sizes, by_rows) -> Floats:
    """Weights (m,) of the training rows of clients with so many.

    They must be those of the rounds, or the loss may rise while the rounds descend.
    """
    return (run.rows.schedule.batch_sizes if by_rows else 1.0) / sizes


def _constant_loss(run, loss, train):
    return best_constant(loss, train.y, run.method.messages["coef"][1])[1]


def _losses(run, loss, parts):
    """Function of a state that gives the mean loss of each part: rows, and weights of clients."""
    where, layout = run.rows.clients, run.layout

    def losses(state):
        local: Any
        population, local = iterates(state)
        if layout is not None:
            local = LocalModels(layout, local, 1 + int(where.max()))
        return [
            part.loss(loss.function, where, population, local, weights) for part, weights in parts
        ]

    return losses
