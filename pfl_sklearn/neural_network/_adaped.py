"""AdaPeD: personal nets near a global one in what they predict, at a distance that is learned."""

import math
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._docs import fill_doc
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._base import BaseNeural, NeuralClassifierMixin
from pfl_sklearn.neural_network._docs import NEURAL
from pfl_sklearn.neural_network._pieces import Averaging


class Distillation(NamedTuple):
    """Settings of the steps: of psi, of the divergence, and of the global net's own loss.

    Personal nets start from the global one when their client first takes part in round
    `start_round` or later; None: they have their own start.
    """

    psi_init: float
    psi_min: float
    psi_rate: float
    from_global: bool
    global_loss: float
    start_round: int | None


def adaped(setup, settings):
    """The method."""
    engines = setup.engines
    averaging = Averaging(setup.n_expected, setup.divides_by_count)
    size, kind = engines.client.n_parameters, engines.client.array_dtype

    def init():
        start = engines.client.start().astype(kind)
        server = {"global": engines.population.start(), "psi": np.array(settings.psi_init)}
        clients = {"personal": np.tile(start, (setup.n_clients, 1))}
        if settings.start_round is not None:
            clients["started"] = np.zeros(setup.n_clients, dtype=bool)
        return server, clients

    def server_update(server, total, t):
        moved = averaging.server_update(server, total, t)
        return {**moved, "psi": np.maximum(moved["psi"], settings.psi_min)}

    return Method(
        init,
        partial(adaped_update, setup, settings, averaging),
        server_update,
        averaging.shapes(**{"global": (engines.population.n_parameters,), "psi": ()}),
        record=lambda server: {"psi": float(server["psi"])},
    )


def adaped_update(setup, settings, averaging, server, t, batch, clients):
    """What the clients of a block changed, and their personal nets."""
    steps = partial(adaped_steps, setup, settings, averaging, server, t)
    return setup.engines.client.run(steps, batch, clients, setup.engines.population)


def adaped_steps(setup, settings, averaging, server, t, block):
    """Local steps of Algorithm 2; each part of a step uses the newest values."""
    (client, population), rate = setup.engines, setup.rates[t]
    kept, before = started(settings, server, t, block.clients), None
    personal = client.models(kept["personal"], block.n_clients)
    shared = population.models(server["global"], block.n_clients)
    psi = personal.values.new_full((block.n_clients,), float(server["psi"]))
    divergence = partial(population.divergence, from_first=settings.from_global)
    for X, y in block.steps():
        outputs, others = personal(X), shared(X)
        losses = client.losses(outputs, y)
        before = losses.detach() if before is None else before
        theirs = population.log_probabilities(others)
        gap = divergence(theirs.detach(), client.log_probabilities(outputs))
        personal.step(losses + gap / (2 * psi), rate)

        own = client.log_probabilities(personal.evaluate(X))
        pull = divergence(theirs, own) / (2 * psi)
        if settings.global_loss:
            pull = pull + settings.global_loss * population.losses(others, y)
        shared.step(pull, rate)

        gap = divergence(population.log_probabilities(shared.evaluate(X)), own)
        psi = psi - settings.psi_rate * (1 / (2 * psi) - gap / (2 * psi**2))
        psi = psi.clamp_min(settings.psi_min)
    change = psi.double().cpu().numpy() - float(server["psi"])
    message = averaging.message(**{"global": shared.change(), "psi": change})
    kept = {**kept, "personal": personal.array()}
    return Update(message, kept, np.asarray(before.cpu(), dtype=np.float64))


def started(settings, server, t, clients):
    """Arrays of a block's clients, of which some start from the global net now."""
    if settings.start_round is None or t < settings.start_round:
        return clients
    personal = clients["personal"].copy()
    personal[~clients["started"]] = server["global"]
    return {"personal": personal, "started": np.ones_like(clients["started"])}
