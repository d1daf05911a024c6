"""Steps of two nets of a client, its own and the global one, that follow each other's predictions.

Weights are fixed; in AdaPeD they adapt.
"""

from typing import NamedTuple

from pfl_sklearn.neural_network._pieces import in_double


class Weights(NamedTuple):
    """Weights of the losses on labels and of the divergences, of own nets and of the global one.

    With `both_teach` the global net takes the own one's predictions for the truth; otherwise its
    own in both divergences.
    """

    own_loss: float
    own_pull: float
    global_loss: float
    global_pull: float
    both_teach: bool = False


def mutual_steps(setup, weights, server, t, block):
    """Global nets of a block after their steps, what clients keep, and losses of their own nets."""
    engine, rate, first = setup.engines.client, setup.rates[t], None
    shared = engine.models(server["global"], block.n_clients)
    own = engine.models(block.clients["personal"], block.n_clients)
    for X, y in block.steps():
        outputs, others = block.read(engine, own(X)), shared(X)
        losses = own.losses(outputs, y)
        theirs = engine.log_probabilities(block.read(engine, others))
        gap = engine.divergence(theirs.detach(), engine.log_probabilities(outputs))
        own.step(weights.own_loss * losses + weights.own_pull * gap, rate)
        first = losses.detach() if first is None else first

        mine = engine.log_probabilities(block.read(engine, own.evaluate(X)))
        gap = engine.divergence(theirs, mine, from_first=not weights.both_teach)
        loss = weights.global_pull * gap
        if weights.global_loss:
            loss = loss + weights.global_loss * shared.losses(others, y)
        if weights.global_loss or weights.global_pull:  # else not even weight decay
            shared.step(loss, rate)
    return shared, {"personal": own.array()}, in_double(first)
