"""Losses of rows under the networks that clients predict with: are they flat, or far too high?"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch.nn import L1Loss, MSELoss

from pfl_sklearn._rounds.loop import LastPhase, Update, run_last_phase
from pfl_sklearn._rounds.rows import NUMBERS_OF_A_BLOCK, Reshuffled, count_within
from pfl_sklearn._rounds.stopping import FlatRule
from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._averaging import as_float64
from pfl_sklearn.neural_network._engine._recipe import is_readable

# Clients whose loss is looked at after the rounds, and rows of each: more might take longer than
# the rounds of a few of many clients.
_MOST_LOOKED_AT = 128
_ROUNDING_OF_LOSS = 1e-6  # of a loss, over the mean square of the targets
_AT_ONCE = 8  # of these clients: a round of few clients has memory for few networks
_LATEST = 5  # rounds, in one of which the training loss of rounds that do not diverge is low


def flat_rule(
    engine, nets, train, held, *, by_rows, at_least, tol, advice, all_rows, all_constants
):
    """:class:`FlatRule` by which rounds of networks are over.

    ``nets(server, clients)`` gives the clients' parameters (g, p), or those (p,) that all of them
    have. Rounds use the rows `train`; the loss is that of the rows `held`, or of `train` if none is
    held out. Clients count `by_rows`, as in training, or equally. No training row is used again:
    rounds count as diverging only if both the losses of their batches and the held-out loss rise; a
    rise of the held-out loss alone may be overfitting.
    """
    sizes = np.diff(train.offsets)
    judged = held if held.n_clients else train
    here = np.searchsorted(train.clients, judged.clients)
    # If clients count equally, each has the same weight if the same share of its rows is held out.
    per_client = np.ones_like(sizes) if by_rows else sizes
    weights = np.diff(judged.offsets) / per_client[here]
    loss = partial(mean_loss, engine, nets, judged, weights)

    def losses(state):
        held_out = loss(state)
        return np.fmin.reduce([held_out, *state.history["loss"][-_LATEST:]]), held_out

    unit = constant_loss(engine.net.criterion_, train.y, np.repeat(1 / per_client, sizes))
    return FlatRule(losses, tol, unit, at_least, False, advice, all_rows, all_constants)


def final_loss(engine, nets, rows, by_rows):
    """Function of a state that gives the mean loss of clients' rows under their nets, and that of
    the best constant.

    Clients count by their numbers of rows, as in training, or equally. With many clients or rows
    the loss is of some of them. The losses of criteria whose best constant is not known may be of
    any size and sign, which says nothing; the function then gives None.
    """
    if not has_constant_loss(engine.net.criterion_):
        return lambda state: None
    clients, evaluated_rows = evenly_spread_clients(rows)
    sizes = np.diff(evaluated_rows.offsets)
    weights = np.diff(rows.offsets)[clients] if by_rows else np.ones(len(clients))
    numbers = int(sizes.max()) * max(math.prod(evaluated_rows.X.shape[1:]), 1)  # of a client's rows
    at_once = max(min(_AT_ONCE, NUMBERS_OF_A_BLOCK // numbers), 1)

    def losses(state):
        # Networks that the last phase made take the place of those of the rounds.
        ended = replace(state, clients={**state.clients, **state.phase_arrays})
        loss = mean_loss(engine, nets, evaluated_rows, weights, ended, at_once)
        of_rows = np.repeat(weights / sizes, sizes)
        # Of equal targets the constant's loss is 0, and that of a network what rounding leaves.
        rounding = _ROUNDING_OF_LOSS * float(np.mean(np.square(evaluated_rows.y, dtype=np.float64)))
        return loss, max(constant_loss(engine.net.criterion_, evaluated_rows.y, of_rows), rounding)

    return losses


def evenly_spread_clients(rows):
    """Positions of clients spread evenly over all, and rows of each spread over its own."""
    clients = even_positions(np.array([rows.n_clients]))
    sizes = np.diff(rows.offsets)[clients]
    taken = np.minimum(sizes, _MOST_LOOKED_AT)
    return clients, rows.only(np.repeat(rows.offsets[clients], taken) + even_positions(sizes))


def even_positions(sizes):
    """Of each of the sizes, one after the other, numbers below it: all, or some spread evenly."""
    taken = np.minimum(sizes, _MOST_LOOKED_AT)
    return count_within(taken) * np.repeat(sizes, taken) // np.repeat(taken, taken)


def mean_loss(
    engine: Any, nets: Any, rows: Any, weights: Floats, state: Any, at_once: int | None = None
) -> float:
    """Mean loss of clients with `weights` (m,), each the mean of its rows.

    Stacked networks are taken `at_once`, or as many as their rows allow.
    """
    n_clients, lone = 1 + int(rows.clients.max()), not engine.stacked
    # Networks that are trained one by one are tested so: a module may mix the rows of a batch.
    rows = rows._replace(at_once=1 if lone else at_once, seeded=rows.seeded or lone)
    # Rounds' own way through blocks of clients: a phase that keeps losses, not models. In order, as
    # the rows would go to workers for one look at them.
    phase = LastPhase(
        lambda server, clients: {"loss": np.zeros(n_clients)},
        partial(_losses_of_block, engine, nets),
        Reshuffled(None, 1),
    )
    losses = run_last_phase(phase, rows, state, entropy=(0,))["loss"][rows.clients]
    return float(weights @ losses / weights.sum())


def _losses_of_block(engine, nets, server, t, batch, clients, phase_arrays):
    """Losses of a block's clients under their networks."""

    def tested(block):
        models = engine.models(nets(server, block.clients), block.n_clients)
        ((X, y),) = block.steps()
        losses = models.losses(block.read(engine, models.test(X)), y)
        return Update({}, {}, as_float64(losses.detach()))

    losses = engine.run(tested, batch, clients).losses
    return Update({}, {"loss": losses}, losses)


def has_constant_loss(criterion: Any) -> bool:
    """Whether :func:`constant_loss` knows the loss of the best constant."""
    return isinstance(criterion, MSELoss | L1Loss) or is_readable(type(criterion))


def constant_loss(criterion: Any, y: np.ndarray, weights: Floats) -> float:
    """Loss of the best constant for targets (n, ...) with weights (n,); 0 if it is not known.

    With 0, gains are seen on the loss at the start alone.
    """
    shares = weights / weights.sum()
    if isinstance(criterion, MSELoss):
        return float(np.mean(shares @ (y - shares @ y) ** 2))
    if isinstance(criterion, L1Loss):
        return float(np.mean(shares @ np.abs(y - np.median(y, axis=0))))
    if not is_readable(type(criterion)):
        return 0.0
    frequencies = np.bincount(y.astype(np.intp), weights=shares)
    seen = frequencies[frequencies > 0]
    return float(-seen @ np.log(seen))
