"""Nets in two parts: layers that all clients share, and layers that each keeps to itself."""

from functools import partial

import numpy as np

from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._pieces import Averaging


def own_layers(setup, names):
    """Which of the parameters (p,) belong to layers with these names, or to the last layer.

    Raises
    ------
    ValueError
        If a name is that of no trained parameter, the last layer cannot be told, or the rounds
        before had other layers.
    """
    engine = setup.engines.client
    found = np.zeros(engine.n_parameters, dtype=bool)
    if isinstance(names, str):
        names = [_last_name(engine)]
    known = [part.name for part in engine.parts]
    for name in names:
        parts = [part for part in engine.parts if f"{part.name}.".startswith(f"{name}.")]
        if not parts:
            raise ValueError(
                f"personal_layers has {name!r}, which is no trained layer or parameter of the "
                f"module; its parameters are {', '.join(known)}."
            )
        for part in parts:
            found[part.place] = True
    if setup.before is not None and np.any(setup.before.server["is_own"] != found):
        raise ValueError(
            f"personal_layers={names!r} are others than in the rounds before, which these rounds "
            "continue; fit anew."
        )
    return found


def _last_name(engine):
    try:
        return engine.last_layer.name
    except ValueError:
        known = ", ".join(part.name for part in engine.parts)
        raise ValueError(
            "personal_layers='last' needs a module that ends with a trainable torch.nn.Linear, "
            "used once, whose outputs are the logits of the classes or the predictions; name the "
            f"layers that clients keep, by personal_layers. The module's parameters are {known}."
        ) from None


def split(setup, own, local_steps, last_phase=None):
    """The method of rounds in which clients keep their `own` parameters (p,) and share the others.

    ``local_steps(server, t, block)`` gives a block's nets after their steps and the losses (g,).
    """
    engine, shared = setup.engines.client, ~own
    averaging = Averaging(setup.n_expected, setup.divides_by_count)

    def init():
        start = engine.start()
        kept = np.tile(start.astype(engine.array_dtype), (setup.n_clients, 1))
        return {"global": start, "is_own": own}, {"personal": kept}

    def server_update(server, total, t):
        part = {"shared": server["global"][shared]}
        moved = server["global"].copy()
        moved[shared] = averaging.server_update(part, total, t)["shared"]
        return {**server, "global": moved}

    return Method(
        init,
        partial(_split_update, engine, averaging, shared, local_steps),
        server_update,
        averaging.shapes(shared=(int(shared.sum()),)),
        last_phase,
    )


def _split_update(engine, averaging, shared, local_steps, server, t, batch, clients):
    def steps(block):
        models, losses = local_steps(server, t, block)
        message = averaging.message(shared=models.change()[:, shared])
        return Update(message, {"personal": models.array()}, losses)

    return engine.run(steps, batch, clients)


def with_own(server, personal):
    """Nets (g, p) of clients: their own parameters, and what they share."""
    return np.where(server["is_own"], personal, server["global"].astype(personal.dtype))
