"""A client's steps on its own rows, for a block of clients.

Parameters are vectors: of the server (p,), of a block's clients (g, p), of the network's type. A
method writes its steps once, for tensors with clients first. Chains of linear layers run them for
all clients of the block at once. Any other module runs them client by client: stacked convolutions
are slower, and their bits would depend on the block. Which of the two follows from the network
alone.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch.nn import CrossEntropyLoss
from torch.nn.modules.conv import _ConvNd

from pfl_sklearn._rounds.loop import Update
from pfl_sklearn._rounds.rows import finite_clients
from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._chain import align, chain_of
from pfl_sklearn.neural_network._engine._models import (
    LARGEST_STACKED_BATCH,
    ROWS_AT_ONCE,
    LoneModel,
    StackedModels,
    optimizer_of,
)
from pfl_sklearn.neural_network._engine._probe import (
    LastLayer,
    NoLastLayer,
    check_keeps_nothing_else,
    fewest_rows,
    last_layer_of,
    probe,
)
from pfl_sklearn.neural_network._engine._recipe import (
    first_line,
    is_mean,
    log_probabilities,
    parameter_type,
    reads_plainly,
    seeded,
    select_outputs,
    shift_log_probabilities,
    twin,
)

_PARAMETERS_AT_ONCE = 1 << 20  # of a block of stacked clients: they should stay in the cache
_FEWEST_STACKED, _MOST_STACKED = 4, 64  # clients of a block, of large networks and of small ones
_CLIENTS_ALONE = 1  # clients of a block that are trained one by one: workers share them evenly


class ParameterPlace(NamedTuple):
    """A tensor among a vector of parameters: its name, shape, and place."""

    name: str
    shape: tuple[int, ...]
    place: slice


class Engine:
    """A network's training and prediction, from vectors of parameters.

    - `net`: an initialized skorch net, whose weights are those that training starts from.
    - `example` (2, ...): rows of the shape and the type that the network gets, of no client.
    - `batch_size`: rows of a step; None: all rows of a client.
    - `protected`: whether no client may end the fit.
    - `noisy_steps`: whether what clients send has noise already.
    - `clips`: bounds on the norm of a step's gradient, and the orders of the norms.
    - `n_parameters`: length p of a vector: trainable parameters, `n_trained` in number, then
      buffers that training moves.
    - `whole`: whether rows stay integers.
    - `chain`: steps for stacked clients, where the network allows them.
    - `in_double`: whether predictions are computed in double precision.
    - `columns` (n_classes,): which outputs are those of the classes; None: all, in order.

    Raises ValueError if nothing of the network can be trained, or it keeps statistics of rows in a
    `protected` fit.
    """

    def __init__(self, net, example, batch_size, protected=False, noisy_steps=False, clips=()):
        self.net, self.device = net, torch.device(net.device)
        self.protected, self.noisy_steps = protected, noisy_steps
        self.output_shape, self.random, self.moving = probe(net, example)
        self.optimizer = optimizer_of(net, clips)
        if protected and self.moving:
            raise ValueError(
                f"training moves {', '.join(self.moving)} of the net, statistics of the clients' "
                "rows that no noise covers. Use a module without them, such as one with "
                "torch.nn.GroupNorm, or fit without noise."
            )
        # Clients keep the network's own precision: double would take twice the memory of single.
        self.array_dtype = parameter_type(net)
        trained = [(n, v) for n, v in net.module_.named_parameters() if v.requires_grad]
        buffers = dict(net.module_.named_buffers())
        # Buffers last, so that what steps move is the front of every vector.
        tensors = [*trained, *((name, buffers[name]) for name in self.moving)]
        ends = np.cumsum([values.numel() for _, values in tensors]).tolist()
        self.parts = [
            ParameterPlace(name, tuple(values.shape), slice(end - values.numel(), end))
            for (name, values), end in zip(tensors, ends, strict=True)
        ]
        self.n_trained = sum(values.numel() for _, values in trained)
        self.n_parameters, self.dtype = self.parts[-1].place.stop, trained[0][1].dtype
        self.example, self.row_shape = example, example.shape[1:]
        self.whole = example.dtype.kind in "iu"
        self.chain = self._chain(batch_size)
        self.columns: np.ndarray | None = None  # of the classes, set after the labels are read
        # Double precision takes convolutions several times as long, and graphics cards even more.
        convolves = any(isinstance(layer, _ConvNd) for layer in net.module_.modules())
        self.in_double = not convolves and self.device.type == "cpu"

    def try_out(self) -> None:
        """Predict for a row of no client, in double precision if the module takes it.

        One that names another type in its forward pass predicts in its own.

        Raises ValueError if it cannot predict, or predictions follow what rounds would lose.
        """
        start, reason = self.start(), None
        rows = self.example[: fewest_rows(self.net)]
        for in_double in (True, False) if self.in_double else (False,):
            self.in_double = in_double
            try:
                with seeded(0, self.device):
                    self.outputs(start, rows)
            except Exception as error:  # modules are the user's: they raise what they like
                reason = error
            else:
                check_keeps_nothing_else(self.net, self.example, self.moving)
                return
        raise ValueError(
            f"the net cannot predict for a row of shape {self.row_shape} and type "
            f"{self.example.dtype}: {first_line(reason)}"
        ) from reason

    def _chain(self, batch_size):
        """Steps for stacked clients, where the network allows them; else None."""
        net = self.net
        # All rows of a client may be any number.
        if batch_size is None or batch_size > LARGEST_STACKED_BATCH:
            return None
        # What is drawn, or moves besides the parameters, would be shared by the block's clients.
        fixed = not (self.random or self.moving or self.whole) and self.optimizer.is_sgd
        if not (fixed and reads_plainly(net) and is_mean(net.criterion_)):
            return None
        return chain_of(net.module_, self.row_shape, self.dtype, self.device)

    def __getstate__(self) -> dict[str, Any]:
        """With the network by value: its class may be a script's, which no worker can import."""
        net = cloudpickle.dumps((type(self.net), vars(self.net)))
        state = {**vars(self), "net": net}  # a copy: other threads may add what is cached
        # It holds a network as well, which would have to go by value; it is made again there.
        state.pop("_row_loss", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, attributes = cloudpickle.loads(state["net"])
        net = object.__new__(kind)
        vars(net).update(attributes)
        vars(self).update(state, net=net)

    @property
    def stacked(self) -> bool:
        """Whether clients of a block are trained at once."""
        return self.chain is not None

    @property
    def clients_at_once(self) -> int:
        """Clients of a block, at most."""
        most = _PARAMETERS_AT_ONCE // self.n_parameters
        return min(max(most, _FEWEST_STACKED), _MOST_STACKED) if self.stacked else _CLIENTS_ALONE

    @cached_property
    def last_layer(self) -> LastLayer:
        """The layer that gives the logits; ValueError if there is none."""
        return last_layer_of(self)

    def with_offsets(self, vector: Floats, offsets: Floats) -> Floats:
        """Vector (p,) of a network whose log probabilities are moved by offsets (n_classes,).

        Raises AttributeError if its logits have no bias that could take them up.
        """
        try:
            bias = self.last_layer.bias
        except NoLastLayer:
            bias = None
        if bias is None:
            raise AttributeError(
                "net_ alone is not the client's model: label_prior reads it through the client's "
                "label frequencies, and its module does not end with a torch.nn.Linear with a bias "
                "for each class, which could hold them. Use predict_proba of the model, or "
                "for_client."
            )
        shifted = vector.copy()
        shifted[bias] += offsets
        return shifted

    @cached_property
    def _row_loss(self):
        """Net whose criterion, a mean, gives the losses of rows."""
        net = twin(self.net)
        net.criterion_.reduction = "none"
        return net

    def start(self) -> Floats:
        """Vector (p,) of the weights that training starts from, in double precision."""
        tensors = _tensors_of(self.net.module_)
        flat = [tensors[part.name].detach().double().cpu().reshape(-1) for part in self.parts]
        return torch.cat(flat).numpy()

    def run(self, local_steps: Any, batch: Any, clients: Any, *others: "Engine") -> Update:
        """Update of a block of clients: ``local_steps(block)``, for all at once or one by one.

        ``local_steps(block)`` turns a :class:`BlockSteps` into an Update of arrays; `others` are
        the engines of further models that it trains or reads.
        """
        X, y = (torch.from_numpy(values).to(self.device) for values in (batch.X, batch.y))
        offsets = clients.get("offset")
        if offsets is not None:
            offsets = torch.from_numpy(offsets).to(self.device, self.dtype).unsqueeze(1)
        if all(engine.stacked for engine in (self, *others)):
            update = local_steps(BlockSteps(X, y, clients, offsets, batch.seeds))
            # Rounds that no client may end judge what is finite by themselves.
            return update if self.protected else nan_losses_if_not_finite(update)
        updates = []
        for i in range(len(X)):
            here = slice(i, i + 1)
            client_arrays = {name: values[here] for name, values in clients.items()}
            client_offsets = None if offsets is None else offsets[here]
            block = BlockSteps(X[here], y[here], client_arrays, client_offsets, batch.seeds[here])
            # Whatever draws, in the module or the criterion, draws from the client's own seed.
            with seeded(int(batch.seeds[i]), self.device):
                updates.append(_steps_of_one(local_steps, block, self))
        return (
            _joined_updates(updates)
            if self.protected
            else nan_losses_if_not_finite(_joined_updates(updates))
        )

    def models(self, vectors: Floats, n_clients: int, moving: Any = None) -> Any:
        """Models of a block's clients, from one vector (p,) for all of them or from (g, p).

        If only some parameters are `moving` (p,), steps leave the others as they are.
        """
        # A copy: steps in place would write into the server's vector.
        start = torch.from_numpy(np.array(vectors, dtype=self.array_dtype)).to(self.device)
        return (StackedModels if self.stacked else LoneModel)(self, start, n_clients, moving)

    def widened(self, offsets: Floats | None) -> Floats | None:
        """Offsets (m, n_outputs) from those of classes (m, n_classes); other outputs have 0."""
        if offsets is None or self.columns is None:
            return offsets
        wide = np.zeros((len(offsets), *self.output_shape))
        wide[:, self.columns] = offsets
        return wide

    def row_losses(self, outputs: torch.Tensor, y: torch.Tensor, by: int = 1) -> torch.Tensor:
        """Losses (g,) of outputs (g, b, ...) for targets (g, b, ...); with `by` 2 (g, b), of rows.

        The criterion must be a mean over rows.
        """
        losses = self._row_loss.get_loss(outputs.flatten(0, 1), y.flatten(0, 1))
        return losses.reshape(*y.shape[:by], -1).mean(dim=by)

    def log_probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logarithms (..., n_classes) of the probabilities that outputs stand for."""
        return log_probabilities(self.net.criterion_, outputs)

    @property
    def reads_logits(self) -> bool:
        """Whether outputs of a chain are logits, whose loss is the plain cross-entropy."""
        loss = self.net.criterion_
        return self.stacked and type(loss) is CrossEntropyLoss and not loss.label_smoothing

    def outputs(self, vector: Floats, X: np.ndarray, offsets: Floats | None = None) -> np.ndarray:
        """What the network with these parameters gives for rows: an array (n, ...).

        For classifiers these are probabilities of the classes, as skorch reads them off their
        outputs. Offsets (n, n_outputs) move their logarithms. They are computed in double precision
        where that is cheap, so that a row's hardly depend on others.
        """
        net, kind = self.evaluating(vector)
        parts = []
        with torch.no_grad(), np.errstate(over="ignore"):  # infinite is what single precision has
            for first in range(0, len(X), ROWS_AT_ONCE):
                values = X[first : first + ROWS_AT_ONCE]
                # An embedding would look up the code below a fraction without a word.
                if self.whole and not np.array_equal(values, np.trunc(values)):
                    raise ValueError("X must hold whole numbers, as in fit; got fractions.")
                rows = np.array(values, dtype=kind, order="C")
                outputs = net.infer(torch.from_numpy(rows).to(self.device))
                if outputs.shape != (len(rows), *self.output_shape):
                    raise ValueError(
                        f"the module of the net gives an output of shape {tuple(outputs.shape)} "
                        f"for {len(rows)} row(s); expected {(len(rows), *self.output_shape)}."
                    )
                if offsets is not None:
                    shifts = torch.from_numpy(offsets[first : first + ROWS_AT_ONCE])
                    outputs = shift_log_probabilities(
                        net.criterion_, outputs, shifts.to(outputs.device)
                    )
                if self.columns is not None:
                    outputs = select_outputs(net.criterion_, outputs, self.columns)
                # As skorch's predict_proba reads them.
                probabilities = net._get_predict_nonlinearity()(outputs.double())
                parts.append(probabilities.cpu().numpy())
        return np.concatenate(parts)

    def evaluating(self, vector: Floats) -> tuple[Any, np.dtype]:
        """A network with these parameters (p,) in evaluation mode, and its type for rows.

        It computes in double precision where that is cheap.
        """
        net, kind = self.fitted_net(self.models(vector, 1).values[0]), self.array_dtype
        net.module_.eval()
        if self.in_double:
            net.module_.double()
            kind = np.dtype(np.float64)
        return net, np.dtype(np.int64) if self.whole else kind

    def fitted_net(self, vector: torch.Tensor) -> Any:
        """A network with these parameters, a tensor (p,), as skorch leaves it after a fit.

        They are views of the vector: what changes one changes the other.
        """
        net = twin(self.net)
        tensors = _tensors_of(net.module_)
        for part in self.parts:
            tensors[part.name].data = vector[part.place].view(part.shape)
        return net


class BlockSteps(NamedTuple):
    """Clients that take their steps together.

    Rows X (g, s, b, ...) and targets y (g, s, b, ...) of their s steps, as tensors, and what these
    clients keep, as arrays with clients first. Offsets (g, 1, n_classes) of log probabilities are a
    tensor, or None; seeds (g,) are an array if rows come with seeds.
    """

    X: Any
    y: Any
    clients: dict[str, np.ndarray]
    offsets: Any = None
    seeds: np.ndarray | None = None

    @property
    def n_clients(self) -> int:
        """Clients g of the block."""
        return len(self.X)

    @property
    def personal(self) -> np.ndarray:
        """Nets (g, p) that these clients keep from round to round."""
        if "personal" not in self.clients:
            raise TypeError(
                "the method reads nets that clients keep, and its class declares none: set "
                "_clients_keep to 'net' or 'layers'."
            )
        return self.clients["personal"]

    def read(self, engine: Engine, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs (g, b, ...) as these clients read them, with their offsets."""
        if self.offsets is None:
            return outputs
        return shift_log_probabilities(engine.net.criterion_, outputs, self.offsets)

    def part(self, first: int, last: int | None = None) -> "BlockSteps":
        """A block of the same clients with the steps from `first` to before `last`."""
        return self._replace(X=self.X[:, first:last], y=self.y[:, first:last])

    def rounds(self, n_steps: int) -> list["BlockSteps"]:
        """Blocks of the same clients with so many of the steps each, in order; all with 0."""
        n_all = self.X.shape[1]
        step = n_steps or n_all
        return [self.part(k, k + step) for k in range(0, n_all, step)]

    def steps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows (g, b, ...) and targets (g, b, ...) of each step."""
        for k in range(self.X.shape[1]):
            yield align(self.X[:, k]), self.y[:, k]


def _steps_of_one(local_steps, block, engine):
    """Update of one client; in a protected fit rows that the network refuses do not end the fit.

    Such a client keeps what it has, as one whose loss is not finite, and counts as 0 in the sum. If
    messages have noise already, one without noise would show who failed: it takes its steps on
    zeros.
    """
    try:
        return local_steps(block)
    except Exception as error:  # modules are the user's: they raise what they like
        if not engine.protected:
            raise
        # The class alone: the text of an exception may have the client's values.
        failures = frozenset({type(error).__name__})
        zeros = block._replace(X=torch.zeros_like(block.X), y=torch.zeros_like(block.y))
        update = local_steps(zeros)
        messages = update.messages
        if not engine.noisy_steps:
            messages = {name: np.full_like(part, np.nan) for name, part in messages.items()}
        losses = np.full_like(update.losses, np.nan)
        return update._replace(messages=messages, losses=losses, failures=failures)


def nan_losses_if_not_finite(update):
    """Update in which the loss of each client with an array that is not finite is NaN.

    Fits without noise then name the client; those with noise leave out what is not finite.
    """
    fine = finite_clients((*update.messages.values(), *update.clients.values()))
    return update._replace(losses=np.where(fine, update.losses, np.nan))


def _joined_updates(updates):
    """One update of clients that took their steps one by one."""
    first = updates[0]
    messages, new = (
        {
            name: np.concatenate([getattr(update, part)[name] for update in updates])
            for name in values
        }
        for part, values in (("messages", first.messages), ("clients", first.clients))
    )
    losses = np.concatenate([update.losses for update in updates])
    return Update(
        messages, new, losses, frozenset().union(*(update.failures for update in updates))
    )


def _tensors_of(module):
    """Parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
