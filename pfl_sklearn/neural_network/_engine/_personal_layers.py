"""Nets in two parts: layers that all clients share, and layers that each keeps to itself."""

from functools import partial
from typing import Any

import numpy as np

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._base import backend


@with_parameters
class KeepsLayers:
    """Methods in which some of the layers, `personal_layers`, belong to clients."""

    _clients_keep = "layers"

    personal_layers: Any = parameter(
        default="last",
        ranges=[StrOptions({"last"}), "array-like"],
        text="""
            "last" or sequence of str
                Modules or parameters of the network, by name, that every client keeps to itself,
                such as ``["layers.4", "last"]``. "last" is the ``torch.nn.Linear`` that gives the
                logits. Without any name all layers are shared.
            """,
    )

    def _check_for_method(self, recipe):
        # Only a pass of rows tells which layer is the last one, and there are none yet.
        if not isinstance(self.personal_layers, str):
            backend().checks.check_layers(recipe, self.personal_layers)

    @staticmethod
    def _nets(server, clients):
        return merge_personal_layers(server, clients["personal"])


def personal_layer_mask(setup, names):
    """Which of the parameters (p,) belong to layers with these names, or to the last layer.

    Raises ValueError if a name is that of no trained parameter, the last layer is unknown, or the
    rounds before had other layers.
    """
    engine = setup.engines.client
    is_personal = np.zeros(engine.n_parameters, dtype=bool)
    places = {part.name: part.place for part in engine.parts}
    parameters_in = backend().checks.parameters_in
    chosen, last = parameters_in([names] if isinstance(names, str) else names, places)
    if last:
        chosen += parameters_in([_last_name(engine)], places)[0]
    for name in chosen:
        is_personal[places[name]] = True
    # What one client kept to itself would become part of what is sent, or the other way round.
    if setup.before is not None and np.any(setup.before.server["is_own"] != is_personal):
        raise ValueError(
            f"personal_layers={names!r} differ from those of the rounds before, which these rounds "
            "continue; fit anew."
        )
    return is_personal


def _last_name(engine):
    """Name of the last layer; ValueError if the module does not end with a linear one."""
    try:
        return engine.last_layer.name
    except ValueError as error:
        names, last = ", ".join(part.name for part in engine.parts), "personal_layers='last'"
        why = f"{last} cannot tell which layer is the last: {error} Or name"
        if isinstance(error, backend().probe.NoLastLayer):
            why = (
                f"{last} needs a module that ends with a trainable torch.nn.Linear, used once, "
                "whose outputs are the logits of the classes or the predictions; name"
            )
        raise ValueError(
            f"{why} the layers that clients keep, by personal_layers. The module's parameters are "
            f"{names}."
        ) from None


def shared_layers_method(setup, is_personal, local_steps, last_phase=None):
    """The method of rounds in which clients keep their own parameters (p,) and share the others.

    ``local_steps(server, t, block)`` gives a block's networks after their steps and the losses
    (g,).
    """
    engine, shared = setup.engines.client, ~is_personal
    update, shapes = shared_part_update(setup, shared)

    def init():
        start = engine.start()
        personal = np.tile(start.astype(engine.array_dtype), (setup.n_clients, 1))
        return {"global": start, "is_own": is_personal}, {"personal": personal}

    steps = partial(_split_steps, setup, shared, local_steps)
    return Method(init, partial(setup.engines.update, steps), update, shapes, last_phase)


def shared_part_update(setup, shared):
    """The server's update, which averages the `shared` parameters (p,), and shapes of a message.

    Raises ValueError if there are none, and a budget would be spent on them.
    """
    # Without a bound rounds in which nothing is sent do no harm: clients train alone.
    if not (shared.any() or setup.by_count):
        raise ValueError(
            "personal_layers names all layers, so that nothing is left to clip, and a budget would "
            "be spent on nothing; name fewer, or train every client alone (LocalNet)."
        )

    n_trained = int(shared[: setup.engines.client.n_trained].sum())  # buffers come last

    def server_update(server, total, t):
        vector = server["global"].copy()
        sent = {**server, "shared": vector[shared]}
        averaged = setup.average_into_server(sent, total, part="shared", n_trained=n_trained)
        # The personal layers of the server's network stay as drawn: unseen clients get these.
        vector[shared] = averaged.pop("shared")
        return {**averaged, "global": vector}

    return server_update, setup.shapes(shared=(int(shared.sum()),))


def _split_steps(setup, shared, local_steps, server, t, block):
    """Update of a block whose clients send how the shared parameters changed."""
    models, losses = local_steps(server, t, block)
    nets = models.array()
    start = server["global"][shared].astype(nets.dtype)  # of all phases
    return Update(setup.message(shared=nets[:, shared] - start), {"personal": nets}, losses)


def merge_personal_layers(server, personal):
    """Networks (g, p) of clients: their own parameters, and what they share."""
    return np.where(server["is_own"], personal, server["global"].astype(personal.dtype))
