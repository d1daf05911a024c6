"""Parts of AdaPeD: steps of personal networks, also in rounds that clients miss."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._rounds.loop import LastPhase, Update
from pfl_sklearn._rounds.rows import CatchingUp
from pfl_sklearn.neural_network._engine._averaging import divergence


class DistillationSettings(NamedTuple):
    """Settings of the steps: of psi, of the divergence, and of the global network's own loss.

    Personal networks start from the global one when their client first takes part in round
    `start_round` or later; None: they have their own start. `global_rates` are the learning rates
    of the global network by round. `catching_up` is the schedule of rows if personal networks are
    trained in rounds that their clients miss, otherwise None.
    """

    psi_init: float
    psi_min: float
    psi_rate: float
    from_global: bool
    global_loss: float
    start_round: int | None
    global_rates: np.ndarray
    catching_up: CatchingUp | None


def personal_step(setup, settings, t, block, nets, psi, X, y):
    """Step of round `t` of personal networks, which are the first of `nets`; the global ones stay.

    Losses (g,) of personal networks before it, outputs and log probabilities of the global ones.
    """
    (client, population), (personal, shared) = setup.engines.pair, nets
    outputs, others = block.read(client, personal(X)), shared(X)
    losses = personal.losses(outputs, y)
    shared_log_p = population.log_probabilities(block.read(population, others))
    personal_log_p = client.log_probabilities(outputs)
    # Detached, since this step moves the personal network alone; the caller goes on with the graph.
    kl = divergence(shared_log_p.detach(), personal_log_p, from_first=settings.from_global)
    personal.step(losses + kl / (2 * psi), setup.rates[t])
    return losses.detach(), others, shared_log_p


def broadcast_arrays(server, population, n_clients):
    """The global net (n, p) and psi (n,) that n clients get from the server, for them to keep."""
    vector = server["global"].astype(population.array_dtype)
    psi = np.full(n_clients, float(server["psi"]))
    return {"received": np.tile(vector, (n_clients, 1)), "received_psi": psi}


def train_missed_rounds(setup, settings, t, missed, clients):
    """Arrays of a block's clients after the latest rounds before `t`, which they `missed`.

    Of these there is a block each. Personal networks alone are trained, as in a round, against the
    global network and psi that the client received in its last one.
    """
    if not missed:
        return clients
    (client, population), n_clients = setup.engines.pair, missed[0].n_clients
    # Nobody sampled the client, so it knows nothing newer than what it received last.
    shared, values = population.models(clients["received"], n_clients), clients["personal"]
    for earlier, block in zip(range(t - len(missed), t), missed, strict=True):
        personal = client.models(values, n_clients)
        psi, nets = personal.values.new_tensor(clients["received_psi"]), (personal, shared.evaluate)
        for X, y in block.steps():
            personal_step(setup, settings, earlier, block, nets, psi, X, y)
        # Models anew in each round, as in rounds with the server: momentum ends with a round.
        values = personal.array()
    return {**clients, "personal": values}


def pending_steps(setup, settings):
    """Last phase, in which personal networks take the steps of rounds since they last took part."""

    def init(server, clients):
        return {"personal": clients["personal"]}

    update = partial(setup.engines.update, partial(pending_steps_update, setup, settings))
    return LastPhase(init, update, replace(settings.catching_up, now=False))


def pending_steps_update(setup, settings, server, t, block):
    """Update of a block whose personal nets take the steps of missed rounds, and send nothing."""
    missed = block.rounds(setup.local_work[0])
    done = train_missed_rounds(setup, settings, t, missed, block.clients)
    return Update({}, {"personal": done["personal"]}, np.zeros(block.n_clients))
