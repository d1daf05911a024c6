"""Steps of AdaPeD: a personal net and a global one, which follow each other's predictions."""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._pieces import Averaging, NoisyGradients

_GLOBAL, _PSI = 0, 1  # parts of the model that steps through noise move


class Distillation(NamedTuple):
    """Settings of the steps: of psi, of the divergence, and of the global net's own loss.

    Personal nets start from the global one when their client first takes part in round
    `start_round` or later; None: they have their own start. `global_rates` are the learning rates
    of the global net by round.
    """

    psi_init: float
    psi_min: float
    psi_rate: float
    from_global: bool
    global_loss: float
    start_round: int | None
    global_rates: np.ndarray


def adaped(setup, settings):
    """The method."""
    engines = setup.engines
    averaging = Averaging(setup.n_expected, setup.divides_by_count)
    kind = engines.client.array_dtype

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
    shared_rate = settings.global_rates[t]
    kept, before = started(settings, server, t, block.clients), None
    personal = client.models(kept["personal"], block.n_clients)
    shared = population.models(server["global"], block.n_clients)
    psi = personal.values.new_full((block.n_clients,), float(server["psi"]))
    divergence = partial(population.divergence, from_first=settings.from_global)
    move_shared, noisy = _steps_of(setup.noisy_steps, shared, block)
    for X, y in block.steps():
        outputs, others = block.read(client, personal(X)), shared(X)
        losses = personal.losses(outputs, y)
        before = losses.detach() if before is None else before
        theirs = population.log_probabilities(block.read(population, others))
        gap = divergence(theirs.detach(), client.log_probabilities(outputs))
        personal.step(losses + gap / (2 * psi), rate)

        own = client.log_probabilities(block.read(client, personal.evaluate(X)))
        pull = divergence(theirs, own) / (2 * psi)
        if settings.global_loss:
            pull = pull + settings.global_loss * shared.losses(others, y)
        move_shared(pull, shared_rate)

        others = block.read(population, shared.evaluate(X))
        gap = divergence(population.log_probabilities(others), own)
        psi = psi - settings.psi_rate * noisy(1 / (2 * psi) - gap / (2 * psi**2))
        psi = psi.clamp_min(settings.psi_min)
    change = psi.double().cpu().numpy() - float(server["psi"])
    message = averaging.message(**{"global": shared.change(), "psi": change})
    kept = {**kept, "personal": personal.array()}
    kept.pop("offset", None)
    return Update(message, kept, np.asarray(before.cpu(), dtype=np.float64))


def _steps_of(noisy_steps, shared, block):
    """How the global nets of a block step, from losses, and what becomes of slopes (g,) of psi."""
    if noisy_steps is None:
        return shared.step, lambda slopes: slopes
    gradients = NoisyGradients(noisy_steps, block.seeds)
    move_shared = partial(shared.step_through, partial(gradients, _GLOBAL))
    return move_shared, lambda slopes: gradients(_PSI, slopes[:, None])[:, 0]


def check_steps(engine, rates):
    """Raise ValueError if noise on gradients does not cover all that a net sends."""
    if engine.moving:
        raise ValueError(
            f"training moves {', '.join(engine.moving)} of the net without a gradient, so "
            "noise='per_step' does not protect it; use noise='per_round', or a module without it."
        )
    if engine.array_dtype.itemsize < 4:
        raise ValueError(
            f"the net computes in {engine.array_dtype}, whose rounding is too coarse for "
            "noise='per_step'; use single or double precision."
        )
    decay = np.abs(rates).max() * engine.optimizer.weight_decay
    if not decay <= 2:
        raise ValueError(
            f"lr times weight_decay of the net is {decay:.4g}, which blows up differences; "
            "noise='per_step' is certified up to 2."
        )


def started(settings, server, t, clients):
    """Arrays of a block's clients, of which some start from the global net now."""
    if settings.start_round is None or t < settings.start_round:
        return clients
    personal = clients["personal"].copy()
    personal[~clients["started"]] = server["global"]
    return {**clients, "personal": personal, "started": np.ones_like(clients["started"])}
