"""Pieces that methods on networks are made of: local steps, messages and averages."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._rounds.loop import LastPhase, Method, State, Update
from pfl_sklearn._rounds.rows import Reshuffled
from pfl_sklearn.privacy._mechanisms._printed._noisy_steps import NoisySteps

SERVER_MEMORY = "optimizer."  # how names of the server's arrays start that its optimizer remembers


class Engines(NamedTuple):
    """Engines of the clients' own networks and of the population's: one, unless they differ.

    If these are mixtures, `component` is the engine of their parts, and the one that is trained.
    """

    client: Any
    population: Any
    component: Any = None

    @property
    def pair(self):
        """Engines of the clients' networks and of the population's."""
        return self.client, self.population

    @property
    def trained(self):
        """Engines whose networks take steps."""
        return self.pair if self.component is None else (self.component,)

    def update(self, steps, server, t, batch, clients, phase_arrays=None):
        """Update of a block's clients in round t, by ``steps(server, t, block)``.

        In a last phase clients also have `phase_arrays`.
        """
        first, *others = self.trained
        return first.run(partial(steps, server, t), batch, clients | (phase_arrays or {}), *others)


class MethodSetup(NamedTuple):
    """What a method on networks is built from, and how its server averages what clients send.

    - `n_clients`: clients with rows now or before; `n_expected`: those expected in a round.
    - `by_count`: whether the server divides by the number of clients that took part, which is then
      part of the message; or, where messages are clipped and noised, by the expected number, which
      is public.
    - `base_rate`: learning rate of the recipe, and `rates` (n_rounds + 1,) those of every round, as
      schedulers change it.
    - `n_rows` (n_clients,): the clients' rows, of which some may have none now.
    - `batch_size`: rows of a batch.
    - `local_work`: steps of a round and passes over a client's rows, of which one is 0.
    - `weights` (n_clients,): how much clients count; None: equally.
    - `server_step`: how the server steps along an average change; None: it adds the change.
    - `noisy_steps`: the mechanism that clients put their gradients through, or None.
    - `before`: the state that rounds go on from, or None.
    - `seed`: what seeds a generator of draws before the rounds, or None.
    - `personal`: what clients keep between rounds, as the method's class declares it.
    - `frozen`: whether the population stays as it is.
    """

    engines: Engines
    n_clients: int
    n_expected: float
    by_count: bool
    base_rate: float
    rates: np.ndarray
    n_rows: np.ndarray
    batch_size: int | None
    local_work: tuple[int, int]
    weights: np.ndarray | None
    server_step: Any
    noisy_steps: NoisySteps | None
    before: State | None
    seed: tuple[int, ...] | None
    personal: str
    frozen: bool = False

    @property
    def total_weight(self):
        """Sum of the weights of all clients."""
        return self.n_clients if self.weights is None else float(self.weights.sum())

    def shapes(self, **parts):
        """Shape of each part of a message."""
        return {**parts, "count": ()} if self.by_count else parts

    def message(self, **parts):
        """Message of g clients, from arrays (g, ...)."""
        if not self.by_count:
            return parts
        like = next(iter(parts.values()))
        return {**parts, "count": np.ones(len(like), dtype=like.dtype)}

    def average_into_server(self, server, total, rate=1.0, part="global", n_trained=None):
        """Server whose values moved by the average change of each part, times a rate.

        An optimizer moves the first `n_trained` values of one part, by default all parameters of
        the population's network; what follows, as running statistics do, gets plain averages.
        """
        # A round that nobody took part in has a sum of 0, and moves nothing.
        divisor = (float(total["count"]) or 1.0) if self.by_count else self.n_expected
        divisor /= rate
        averaged = {name: server[name] + total[name] / divisor for name in total if name != "count"}
        unchanged = {
            name: array for name, array in server.items() if not name.startswith(SERVER_MEMORY)
        }
        if self.server_step is None:
            return {**unchanged, **averaged}
        trained = self.engines.population.n_trained if n_trained is None else n_trained
        values, change = server[part][..., :trained], total[part][..., :trained] / divisor
        averaged[part][..., :trained], memory = self.server_step(server, values, change)
        return {**unchanged, **averaged, **memory}


def weighted(method, weights):
    """The method whose clients multiply all that they send by their weights (n_clients,).

    That is also the number of clients that took part, if it is sent: it becomes their total weight.
    """
    update = partial(_weighted_update, method.client_update)
    constants = {**method.constants, "weight": weights}
    return method._replace(client_update=update, constants=constants)


def with_offsets(method, offsets):
    """The method, whose clients have offsets (m, n_classes) of their own, unless these are None."""
    if offsets is None:
        return method
    # They follow from the labels of this call, so those of earlier calls are out of date.
    return method._replace(constants={**method.constants, "offset": offsets})


def _weighted_update(client_update, server, t, batch, clients):
    """Update of a block whose clients multiply their messages by their weights."""
    clients = dict(clients)
    weight = clients.pop("weight")
    update = client_update(server, t, batch, clients)
    messages = {
        name: part * weight.reshape(-1, *(1,) * (part.ndim - 1)).astype(part.dtype)
        for name, part in update.messages.items()
    }
    return update._replace(messages=messages)


def train(engine, block, start, rate, proximal=0.0, personal=False, towards=None, moving=None):
    """Models of a block after its steps from `start`, and the losses (g,) before them.

    Models that the clients keep (`personal`) are read through the clients' label frequencies.
    With `proximal` they are pulled `towards` a vector, by default their start. All parameters move,
    or those that are `moving` (p,).
    """
    models, before = engine.models(start, block.n_clients, moving), None
    towards = None if towards is None else models.parts(towards)
    for X, y in block.steps():
        outputs = block.read(engine, models(X)) if personal else models(X)
        before = models.losses(outputs, y).detach() if before is None else before
        models.learn(outputs, y, rate)
        if proximal and rate:  # the weight may be infinite
            models.pull(rate * proximal, towards)
    return models, as_float64(before)


def divergence(first, second, from_first=True):
    """Kullback-Leibler divergences (g,), means over rows (g, b, c) of log probabilities.

    They go from `first`, the truth, to `second`, or the other way round.
    """
    reference, other = (first, second) if from_first else (second, first)
    return (reference.exp() * (reference - other)).sum(dim=-1).mean(dim=-1)


def as_float64(values):
    """Array of a tensor's values in double precision."""
    return values.cpu().double().numpy()  # in torch, as numpy lacks some of its types


def averaging_method(setup, local_steps, clients=None, last_phase=None, rate=1.0, constants=None):
    """The method of rounds in which clients change the global network and the server averages.

    Where clients keep networks of their own, these start as the global one does, and "started" says
    whether they were ever trained: see :func:`personal_or_global`.

    ``local_steps(server, t, block)`` gives a block's global networks after their steps, the arrays
    that clients keep, and the losses (g,). `clients` are the arrays that clients start with, `rate`
    is a factor on the average change, and `constants` are further arrays of the server.
    """
    engine = setup.engines.client

    def init():
        nets = untrained(setup) if setup.personal == "net" else {}
        return {"global": engine.start(), **(constants or {})}, {**(clients or {}), **nets}

    def server_update(server, total, t):
        return setup.average_into_server(server, total, rate)

    update = partial(setup.engines.update, partial(_averaged_steps, setup, local_steps))
    shapes = setup.shapes(**{"global": (engine.n_parameters,)})
    return Method(init, update, server_update, shapes, last_phase)


def init_as_declared(init, personal, name):
    """Initial arrays of the server and of clients, which hold what the method's class declares.

    Raises TypeError if the class declares other `personal` parts than its method starts clients
    with.
    """
    server, clients = init()
    keeps = "nothing"
    if "personal" in clients:
        keeps = "layers" if "is_own" in server else "net"
    if personal not in (keeps, "other"):
        raise TypeError(
            f"{name} declares _clients_keep={personal!r}, but its method starts clients with "
            f"{keeps!r} (arrays {sorted(clients)}); correct one of them."
        )
    return server, clients


def untrained(setup):
    """Nets (m, p) of clients that have trained none: the initial or the latest global one."""
    engine = setup.engines.client
    # Clients that come late start from what the others have learned.
    latest = engine.start() if setup.before is None else setup.before.server["global"]
    nets = np.tile(latest.astype(engine.array_dtype), (setup.n_clients, 1))
    return {"personal": nets, "started": np.zeros(setup.n_clients, dtype=bool)}


def personal_or_global(server, clients):
    """Networks (g, p) of clients: their own or, where these were never trained, the global one.

    Without networks of their own all clients have the global one, (p,).
    """
    if "personal" not in clients:
        return server["global"]
    personal, started = clients["personal"], clients.get("started")
    if started is None or started.all():
        return personal
    return np.where(started[:, None], personal, server["global"].astype(personal.dtype))


def n_components_for(n_components, n_clients, n_before):
    """Number of components: the one given, or that of the rounds before, or two of two clients.

    Raises ValueError if there are more components than clients, or the rounds before had another
    number.
    """
    if n_components is None:
        return min(2, n_clients) if n_before is None else n_before
    # One client alone may mix the components that many clients made.
    if n_before is None and n_components > n_clients:
        raise ValueError(
            f"n_components={n_components} is more than the number of clients, {n_clients}; "
            "expected at most one component for each client."
        )
    if n_before not in (None, n_components):
        raise ValueError(
            f"the rounds before had {n_before} components, and these would have {n_components}; "
            "fit anew."
        )
    return n_components


def running_shares(shares, counts, n_clients):
    """Running average (M,) of components' shares, after a round with these counts (M,)."""
    total = counts.sum()
    # An empty round, or counts that are lost in noise, say nothing of the shares.
    if not total > 0:
        return shares
    weight = min(1.0, total / n_clients)
    return (1 - weight) * shares + weight * counts / total


def _averaged_steps(setup, local_steps, server, t, block):
    """Update of a block whose clients send how the global network changed."""
    models, arrays, losses = local_steps(server, t, block)
    # Only methods with networks of clients' own ask who has one already.
    if "started" in block.clients:
        arrays = {**arrays, "started": np.ones(block.n_clients, dtype=bool)}
    return Update(setup.message(**{"global": models.change()}), arrays, losses)


def continue_personal(setup, server, t, block):
    """Clients' own networks of a block, trained further, and the losses (g,) before."""
    return train(setup.engines.client, block, block.personal, setup.rates[t], personal=True)


def fine_tuning_phase(setup, n_steps):
    """Last phase in which every client trains the global network on its own rows."""
    return personal_nets_phase(setup, n_steps, partial(continue_personal, setup))


def personal_nets_phase(setup, n_steps, local_steps, start=None, n_passes=0):
    """Last phase in which every client makes a network of its own of the global one.

    ``local_steps(server, t, block)`` gives a block's networks and losses after so many batches, or
    those of so many passes. A client's "personal" network is ``start(server, personal)`` before, by
    default the global one.
    """
    engine = setup.engines.client

    def init(server, clients):
        if start is not None:
            return {"personal": start(server, clients["personal"])}
        shared = server["global"].astype(engine.array_dtype)
        return {"personal": np.tile(shared, (setup.n_clients, 1))}

    update = partial(setup.engines.update, partial(keep_personal_nets, local_steps))
    return LastPhase(init, update, Reshuffled(setup.batch_size, n_steps, n_passes))


def keep_personal_nets(local_steps, server, t, block):
    """Update of a block whose clients send nothing, and keep the nets that their steps lead to."""
    models, losses = local_steps(server, t, block)
    return Update({}, {"personal": models.array()}, losses)
