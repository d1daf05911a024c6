"""Steps of AdaPeD: a personal net and a global one, which follow each other's predictions."""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._rounds.loop import LastPhase, Method, Update
from pfl_sklearn._rounds.rows import CatchingUp
from pfl_sklearn.neural_network._averaging import Averaging, NoisyGradients, in_double

_GLOBAL, _PSI = 0, 1  # parts of the model that steps through noise move


class Distillation(NamedTuple):
    """Settings of the steps: of psi, of the divergence, and of the global net's own loss.

    Personal nets start from the global one when their client first takes part in round
    `start_round` or later; None: they have their own start. `global_rates` are the learning rates
    of the global net by round. `catching_up` is the schedule of rows if personal nets are trained
    in rounds that their clients miss, otherwise None.
    """

    psi_init: float
    psi_min: float
    psi_rate: float
    from_global: bool
    global_loss: float
    start_round: int | None
    global_rates: np.ndarray
    catching_up: CatchingUp | None


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
        if settings.catching_up is not None:
            known = server if setup.before is None else setup.before.server
            clients |= received(known, engines.population, setup.n_clients)
        return server, clients

    def server_update(server, total, t):
        moved = averaging.server_update(server, total, t)
        return {**moved, "psi": np.maximum(moved["psi"], settings.psi_min)}

    return Method(
        init,
        partial(adaped_update, setup, settings, averaging),
        server_update,
        averaging.shapes(**{"global": (engines.population.n_parameters,), "psi": ()}),
        None if settings.catching_up is None else what_is_left(setup, settings),
        record=lambda server: {"psi": float(server["psi"])},
    )


def adaped_update(setup, settings, averaging, server, t, batch, clients):
    """What the clients of a block changed, and their personal nets."""
    steps = partial(adaped_steps, setup, settings, averaging, server, t)
    return setup.engines.client.run(steps, batch, clients, setup.engines.population)


def adaped_steps(setup, settings, averaging, server, t, block):
    """Local steps of Algorithm 2; each part of a step uses the newest values."""
    (client, population), shared_rate = setup.engines.pair, settings.global_rates[t]
    *missed, block = block.rounds(setup.local_steps)
    kept, before = caught_up(setup, settings, t, missed, block.clients), None
    kept = started(settings, server, t, kept)
    personal = client.models(kept["personal"], block.n_clients)
    shared = population.models(server["global"], block.n_clients)
    nets, psi = (personal, shared), personal.values.new_full((len(block.X),), float(server["psi"]))
    divergence = partial(population.divergence, from_first=settings.from_global)
    move_shared, noisy = _steps_of(setup.noisy_steps, shared, block)
    for X, y in block.steps():
        losses, others, theirs = personal_step(setup, settings, t, block, nets, psi, X, y)
        before = losses if before is None else before

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
    if settings.catching_up is not None:
        kept |= received(server, population, block.n_clients)
    kept.pop("offset", None)
    return Update(message, kept, in_double(before))


def personal_step(setup, settings, t, block, nets, psi, X, y):
    """Step of round `t` of personal nets, which are the first of `nets`; the global ones stay.

    Losses (g,) of personal nets before it, outputs and log probabilities of the global ones.
    """
    (client, population), (personal, shared) = setup.engines.pair, nets
    outputs, others = block.read(client, personal(X)), shared(X)
    losses = personal.losses(outputs, y)
    theirs = population.log_probabilities(block.read(population, others))
    own = client.log_probabilities(outputs)
    gap = population.divergence(theirs.detach(), own, from_first=settings.from_global)
    personal.step(losses + gap / (2 * psi), setup.rates[t])
    return losses.detach(), others, theirs


def received(server, population, n_clients):
    """What n clients keep of what they got from the server, as arrays with clients first."""
    vector = server["global"].astype(population.array_dtype)
    psi = np.full(n_clients, float(server["psi"]))
    return {"received": np.tile(vector, (n_clients, 1)), "received_psi": psi}


def caught_up(setup, settings, t, missed, clients):
    """Arrays of a block's clients after the latest rounds before `t`, which they `missed`.

    Of these there is a block each. Personal nets alone are trained, as in a round, against the
    global net and psi that the client received in its last one.
    """
    if not missed:
        return clients
    (client, population), n_clients = setup.engines.pair, missed[0].n_clients
    shared, values = population.models(clients["received"], n_clients), clients["personal"]
    for earlier, block in zip(range(t - len(missed), t), missed, strict=True):
        personal = client.models(values, n_clients)
        psi, nets = personal.values.new_tensor(clients["received_psi"]), (personal, shared.evaluate)
        for X, y in block.steps():
            personal_step(setup, settings, earlier, block, nets, psi, X, y)
        values = personal.array()
    return {**clients, "personal": values}


def what_is_left(setup, settings):
    """Last phase of rounds that clients missed since they last took part."""

    def init(server, clients):
        return {"personal": clients["personal"]}

    update = partial(_left_update, setup, settings)
    return LastPhase(init, update, settings.catching_up._replace(now=False))


def _left_update(setup, settings, server, t, batch, clients, own):
    def local_steps(block):
        missed = list(block.rounds(setup.local_steps))
        done = caught_up(setup, settings, t, missed, block.clients)
        return Update({}, {"personal": done["personal"]}, np.zeros(block.n_clients))

    client, population = setup.engines.pair
    return client.run(local_steps, batch, {**clients, **own}, population)


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
