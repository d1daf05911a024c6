"""Pieces that methods on nets are made of: local steps, messages and averages."""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._rounds.loop import LastPhase, Update
from pfl_sklearn._rounds.rows import Reshuffled


class Averaging(NamedTuple):
    """How the server averages what clients sent.

    Over the clients that took part, whose number is then part of the message; or, where messages
    are clipped and noised, over the expected number, which is public.
    """

    n_expected: float
    by_count: bool

    def shapes(self, **parts):
        """Shape of each part of a message."""
        return {**parts, "count": ()} if self.by_count else parts

    def message(self, **parts):
        """Message of g clients, from arrays (g, ...)."""
        if not self.by_count:
            return parts
        like = next(iter(parts.values()))
        return {**parts, "count": np.ones(len(like), dtype=like.dtype)}

    def server_update(self, server, total, t):
        """Server whose values moved by the average change of each part."""
        divisor = max(float(total["count"]), 1.0) if self.by_count else self.n_expected
        moved = {name: server[name] + total[name] / divisor for name in total if name != "count"}
        return {**server, **moved}


def train(engine, block, start, rate, proximal=0.0, own=False):
    """Models of a block after its steps from `start`, and the losses (g,) before them.

    Models that the clients keep as their `own` are read through the clients' label frequencies.
    """
    models, before = engine.models(start, block.n_clients), None
    for X, y in block.steps():
        outputs = block.read(engine, models(X)) if own else models(X)
        losses = engine.losses(outputs, y)
        before = losses.detach() if before is None else before
        models.step(losses, rate)
        if proximal and rate:  # the weight may be infinite
            models.pull(rate * proximal)
    return models, np.asarray(before.cpu(), dtype=np.float64)


class NoisyGradients:
    """Gradients of a block's clients on their way through a mechanism, which draws by its seeds."""

    def __init__(self, mechanism, seeds):
        self._mechanism, self._generators = mechanism, mechanism.generators(seeds)

    def __call__(self, part, slopes):
        """Noisy gradients (g, p) of a part of the model, from a tensor to a tensor."""
        exact = slopes.detach().cpu().double().numpy()
        return slopes.new_tensor(self._mechanism.privatize(exact, part, self._generators))


def fine_tuning(setup, n_steps):
    """Last phase in which every client trains the global net on its own rows."""
    engine = setup.engines.client

    def init(server, clients):
        return {
            "personal": np.tile(server["global"].astype(engine.array_dtype), (setup.n_clients, 1))
        }

    update = partial(_fine_tuned, engine, setup.rates[-1])
    return LastPhase(init, update, Reshuffled(setup.batch_size, n_steps))


def _fine_tuned(engine, rate, server, batch, clients, own):
    done = engine.run(partial(_tuned_block, engine, rate), batch, {**clients, **own})
    return done.clients, done.losses


def _tuned_block(engine, rate, block):
    models, losses = train(engine, block, block.clients["personal"], rate, own=True)
    return Update({}, {"personal": models.array()}, losses)
