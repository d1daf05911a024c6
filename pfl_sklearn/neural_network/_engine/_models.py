"""Models of the clients of a block and their steps, and the server's step by an optimizer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from skorch import NeuralNet
from torch import Tensor
from torch.optim.sgd import sgd

from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._averaging import SERVER_MEMORY
from pfl_sklearn.neural_network._engine._chain import Chain, align, empty_aligned
from pfl_sklearn.neural_network._engine._mlp import evaluate
from pfl_sklearn.neural_network._engine._recipe import first_line

LARGEST_STACKED_BATCH = 128  # rows: products of a client alone are large enough beyond it
ROWS_AT_ONCE = 512  # of a prediction
_INSTEAD = "give a class of torch.optim, such as torch.optim.Adam, or a functools.partial of one"
_NORM_FLOOR = 1e-6  # on the norm that a bound is divided by, as torch has it


class Optimizer(NamedTuple):
    """The network's optimizer: its class, and its parameters besides the learning rate.

    `clips` are bounds on the norm of a gradient, and the orders of the norms.
    """

    kind: type
    params: dict[str, Any]
    clips: tuple[tuple[float, float], ...] = ()

    @property
    def is_sgd(self) -> bool:
        """Whether it is torch's stochastic gradient descent: a subclass may step otherwise."""
        return self.kind is torch.optim.SGD

    @property
    def weight_decay(self) -> float:
        """Multiple of the parameters that is added to their gradient."""
        return self.params.get("weight_decay", 0.0)

    @property
    def momentum(self) -> float:
        """Share of the last step that goes on in the next one."""
        return self.params.get("momentum", 0.0)

    @property
    def is_plain(self) -> bool:
        """Whether steps of gradient descent are along the gradients as they come."""
        return not (self.momentum or self.clips)

    def clipped(self, slopes: Sequence[Tensor], counted: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients (g, ...) scaled so that each client's norm of those `counted` is in bounds.

        As ``torch.nn.utils.clip_grad_norm_`` scales them.
        """
        for bound, order in self.clips:
            norms = gradient_norms(counted, order)
            factors = (bound / (norms + _NORM_FLOOR)).clamp(max=1.0)
            slopes, counted = (
                scale_gradients(gradients, factors) for gradients in (slopes, counted)
            )
        return slopes

    def step(self, parameters, slopes, speed, rate) -> list[torch.Tensor] | None:
        """Step of stochastic gradient descent, in place; returns the speed for the next one.

        Every client starts with a new memory in every round, and this needs no new optimizer.
        """
        speed = speed or [None] * len(parameters)
        names = ("weight_decay", "momentum", "dampening", "nesterov")
        options = {name: self.params.get(name, 0) for name in names}
        sgd(parameters, list(slopes), speed, foreach=True, lr=rate, maximize=False, **options)
        return speed


def gradient_norms(slopes, order):
    """Norms (g,) of the clients' gradients (g, ...) together."""
    # Of two clients at least: a sum over one tensor alone may be split among threads, and rounds
    # otherwise than among others.
    flat = [slope.flatten(1) for slope in slopes]
    flat = [gradient.expand(2, -1) if len(gradient) == 1 else gradient for gradient in flat]
    parts = torch.stack(
        [torch.linalg.vector_norm(gradient, order, dim=1) for gradient in flat], dim=1
    )
    return torch.linalg.vector_norm(parts, order, dim=1)[: len(slopes[0])]


def scale_gradients(slopes, factors):
    """Gradients (g, ...) times factors (g,)."""
    return [slope * factors.view(-1, *(1,) * (slope.ndim - 1)) for slope in slopes]


def optimizer_of(net: NeuralNet, clips: tuple[tuple[float, float], ...] = ()) -> Optimizer:
    """Optimizer of an initialized network."""
    _, params = net.get_params_for_optimizer("optimizer", net.module_.named_parameters())
    params.pop("lr", None)  # each round has its own
    return Optimizer(net.optimizer, params, clips)


class _Models:
    """Models of g clients of a block; ``values`` (g, p) are their parameters.

    ``tensors`` are those that are trained, clients first. What is done to them in place is done to
    the models. If only some parameters are `moving`, their own steps leave the others as they are.
    """

    values: Any
    tensors: Any
    _cut: Callable[[Tensor], list[Tensor]]
    _starts: list[Tensor]

    def __init__(self, engine: Any, start: Tensor) -> None:
        self._start, self._optimizer, self._engine = start, engine.optimizer, engine

    def copies(self) -> list[Tensor]:
        """Tensors as they are now."""
        return [values.clone() for values in self.tensors]

    def parts(self, vectors: np.ndarray) -> list[Tensor]:
        """Tensors like those of the models, from an array (p,) or (g, p)."""
        kind = self._engine.array_dtype
        return self._cut(torch.from_numpy(np.array(vectors, dtype=kind)).to(self._start.device))

    def pull(self, weight: float, towards: list[Tensor] | None = None) -> None:
        """Implicit step on `weight` times half the squared distance from tensors, or the start.

        Unlike an explicit one, it does not diverge, however large the weight.
        """
        towards = self._starts if towards is None else towards
        for values, start in zip(self.tensors, towards, strict=True):
            values.lerp_(start.expand_as(values), 1 - 1 / (1 + weight))

    def array(self) -> np.ndarray:
        """Parameters as an array (g, p)."""
        return array_of(self.values)

    def change(self) -> np.ndarray:
        """Array (g, p): parameters less those that they started from."""
        return array_of(self.values - self._start)


class StackedModels(_Models):
    """Models of clients whose network is a chain."""

    def __init__(self, engine, start, n_clients, moving=None):
        super().__init__(engine, start)
        self._starts = self._cut(start)
        parameters = [empty_aligned((n_clients, *part.shape), start) for part in engine.parts]
        for values, first in zip(parameters, self._starts, strict=True):
            values.copy_(first)
        self._chain, self._speed = Chain(engine.chain, parameters), None
        places = [] if moving is None else [part.place for part in engine.parts]
        self.frozen_layers = [k for k, place in enumerate(places) if not moving[place].any()]

    @property
    def values(self) -> Tensor:
        """Parameters (g, p), copied together."""
        return torch.cat([tensor.flatten(1) for tensor in self._chain.parameters], dim=1)

    def take_buffers(self, other: "StackedModels") -> None:
        """Take what training moved in other models without a gradient: nothing in a chain."""

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters of the chain, (g, ...) each."""
        return self._chain.parameters

    def _cut(self, vectors):
        parts = self._engine.parts
        return [vectors[..., part.place].unflatten(-1, part.shape) for part in parts]

    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (g, b, ...) of rows (g, b, ...), for :meth:`step` to follow."""
        return self._chain(X)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses (g,) of outputs (g, b, ...) for targets (g, b, ...)."""
        return self._engine.row_losses(outputs, y)

    def evaluate(self, X: Tensor) -> Tensor:
        """Outputs (g, b, ...) alone."""
        return self._chain.evaluate(X)

    def test(self, X: Tensor) -> Tensor:
        """Outputs (g, n, ...) of rows that nobody trains on, a batch of them at a time."""
        parts = [self.evaluate(align(rows)) for rows in X.split(LARGEST_STACKED_BATCH, dim=1)]
        return torch.cat(parts, dim=1)

    def step_through(self, privatize: Callable, losses: Tensor, rate: float) -> None:
        """Step along the gradients (g, p) of losses (g,) that `privatize` makes of theirs."""
        tensors = self._chain.parameters
        slopes = self._chain.gradients(losses.sum())
        changes = privatize(torch.cat([slope.flatten(1) for slope in slopes], dim=1))
        sizes = [values[0].numel() for values in tensors]
        for values, change in zip(tensors, changes.split(sizes, dim=1), strict=True):
            # Decay stays outside of the clip: it is the same whatever the rows are.
            values.mul_(1 - rate * self._optimizer.weight_decay)
            values.sub_(change.view(values.shape), alpha=rate)

    def step(self, losses: Tensor, rate: float) -> None:
        """One step of the network's optimizer, from losses (g,) of the latest outputs."""
        optimizer, chain = self._optimizer, self._chain
        if not optimizer.is_plain:
            slopes = chain.gradients(losses.sum())
            # What stands still is no part of the gradient that counts.
            counted = [slope for k, slope in enumerate(slopes) if k not in self.frozen_layers]
            slopes = optimizer.clipped(slopes, counted)
            self._speed = optimizer.step(chain.parameters, slopes, self._speed, rate)
        else:
            chain.step(losses.sum(), rate, optimizer.weight_decay)
        self.reset_frozen()

    def reset_frozen(self):
        # A chain moves all of its layers; those that stand still go back to where they were.
        for k in self.frozen_layers:
            self.tensors[k].copy_(self._starts[k])

    def learn(self, outputs: Tensor, y: Tensor, rate: float) -> None:
        """One step of the network's optimizer on the losses of the latest outputs for targets."""
        plain = self._optimizer.is_plain and self._engine.reads_logits
        if not plain or outputs.ndim != 3:
            self.step(self.losses(outputs, y), rate)
            return
        # The slope of the cross-entropy is the softmax less indicators, which needs no tape.
        slopes = outputs.detach().softmax(dim=2)
        slopes.scatter_add_(2, y.unsqueeze(2), slopes.new_tensor(-1.0).expand(*y.shape, 1))
        slopes /= y.shape[1]
        self._chain.follow(slopes, rate, self._optimizer.weight_decay)
        self.reset_frozen()


class LoneModel(_Models):
    """Model of one client, of any network."""

    def __init__(self, engine, start, n_clients, moving=None):
        super().__init__(engine, start)
        self._values = start.expand(n_clients, engine.n_parameters).clone()
        # Buffers come after what is trained, and no gradient moves them.
        self._trained = slice(engine.n_trained)
        self._net, self._memory = engine.fitted_net(self._values[0]), None
        # With noise in the steps, what is sent must not depend on what a forward pass changes.
        self._outside: Any = self._values.clone() if engine.noisy_steps else None
        if moving is not None:
            self._freeze(~moving)
        self._tensors = [p for p in self._net.module_.parameters() if p.requires_grad]
        self._starts = self._cut(start)

    def _freeze(self, still):
        named = dict(self._net.module_.named_parameters())
        for part in self._engine.parts:
            if part.name in named and still[part.place].all():
                named[part.name].requires_grad_(False)

    @property
    def values(self) -> Tensor:
        """Parameters (1, p), with the buffers as the latest forward pass left them."""
        for part in self._engine.parts:
            if part.name in self._engine.moving:
                self._follow(part)
        return self._values

    def _follow(self, part):
        """Copy a buffer that the module replaced by another tensor, and put ours in its place."""
        where, _, name = part.name.rpartition(".")
        layer = self._net.module_.get_submodule(where)
        view, latest = self._values[0, part.place].view(part.shape), getattr(layer, name)
        if latest.data_ptr() != view.data_ptr():
            view.copy_(latest.detach())
            # With a version counter of its own: a gradient may need what the buffer is now.
            setattr(layer, name, view.data)

    def take_buffers(self, other: "LoneModel") -> None:
        """Take what training moved in another model without a gradient."""
        self.values[:, self._trained.stop :] = other.values[:, self._trained.stop :]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is trained, as one tensor (1, p)."""
        return [self._values[:, self._trained]]

    def _cut(self, vectors):
        return [vectors[..., self._trained]]

    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (1, b, ...) of rows (1, b, ...), for :meth:`step` to follow."""
        return self._net.infer(X[0])[None]

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses (1,) of outputs (1, b, ...) for targets (1, b, ...)."""
        return self._net.get_loss(outputs[0], y[0], X=None, training=True)[None]

    def evaluate(self, X: Tensor) -> Tensor:
        """Outputs (1, b, ...) alone."""
        with torch.no_grad():
            return self(X)

    def test(self, X: Tensor) -> Tensor:
        """Outputs (1, n, ...) in evaluation mode, which the model keeps."""
        evaluate(self._net.module_)
        return torch.cat([self.evaluate(rows) for rows in X.split(ROWS_AT_ONCE, dim=1)], dim=1)

    def change(self) -> np.ndarray:
        """Array (1, p): parameters less those that they started from."""
        values = self.values if self._outside is None else self._outside
        return array_of(values - self._start)

    def step_through(self, privatize: Callable, losses: Tensor, rate: float) -> None:
        """Step along the gradients (1, p) of losses (1,) that `privatize` makes of theirs.

        The parameters that count are not the module's, which it may change in its forward pass.
        """
        slopes = [slope.reshape(1, -1) for slope in self._slopes(losses)]
        self._outside.mul_(1 - rate * self._optimizer.weight_decay)
        self._outside.sub_(privatize(torch.cat(slopes, dim=1)), alpha=rate)
        self._values.copy_(self._outside)

    def _slopes(self, losses):
        """Gradients, one for each tensor, of losses (1,) of the latest outputs."""
        return torch.autograd.grad(
            # A layer that no row went through has a gradient of 0, which still gets decay and
            # noise.
            losses.sum(),
            self._tensors,
            allow_unused=True,
            materialize_grads=True,
        )

    def step(self, losses: Tensor, rate: float) -> None:
        """One step of the network's optimizer, from losses (1,) of the latest outputs."""
        if not self._tensors:  # all layers stand still in this part of a round
            return
        slopes = self._slopes(losses)
        with torch.no_grad():
            if self._optimizer.clips:
                gradients = [slope[None] for slope in slopes]  # a client's, of one
                slopes = [slope[0] for slope in self._optimizer.clipped(gradients, gradients)]
            if self._optimizer.is_sgd:
                step = self._optimizer.step
                self._memory = step(self._tensors, slopes, self._memory, rate)
            else:
                self._step_by(slopes, rate)

    def learn(self, outputs: Tensor, y: Tensor, rate: float) -> None:
        """One step of the network's optimizer on the loss of the latest outputs for targets."""
        self.step(self.losses(outputs, y), rate)

    def _step_by(self, slopes, rate):
        """Step of an optimizer of torch, which remembers what it wants."""
        # An optimizer of torch's own: its state, as Adam's moments, lasts for one round of one
        # client.
        if self._memory is None:  # the rate is that of the round, in which the memory ends
            kind, params = self._optimizer.kind, self._optimizer.params
            self._memory = kind(self._tensors, lr=rate, **params)
        for parameter, slope in zip(self._tensors, slopes, strict=True):
            parameter.grad = slope
        self._memory.step()


def array_of(tensor: Tensor) -> np.ndarray:
    """Array of a tensor's values."""
    return tensor.detach().cpu().numpy()


# The server's step --------------------------------------------------------------------------------


class ServerStep(NamedTuple):
    """Steps of an optimizer that ``make(parameters)`` gives anew in each round.

    What it remembers is among the server's arrays, so that rounds can go on; `memory` maps the
    names there to those that the optimizer has.
    """

    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    memory: dict[str, str]

    def __call__(self, server: Any, values: Floats, change: Floats) -> tuple[Floats, dict]:
        """Values after a step along minus a change, and what is to be remembered."""
        # One vector, as in the step that said what is remembered: some tell vectors from matrices.
        parameter = torch.nn.Parameter(torch.from_numpy(values.flatten()))
        optimizer = self.make([parameter])
        # Of an optimizer of another kind, or with other options, nothing is known to go on with.
        if self.memory.keys() <= server.keys():
            optimizer.state[parameter] |= {
                name: torch.from_numpy(np.array(server[key])) for key, name in self.memory.items()
            }
        parameter.grad = torch.from_numpy(-change.ravel())
        optimizer.step()
        state = optimizer.state[parameter]
        remembered = {key: state[name].detach().numpy() for key, name in self.memory.items()}
        return parameter.detach().numpy().reshape(values.shape), remembered


def server_step(make: Callable[..., Any]) -> ServerStep:
    """The server's step by an optimizer, which takes a step on numbers of no meaning first.

    Raises ValueError if the optimizer cannot follow a gradient, or remembers what is no tensor.
    """
    kind = getattr(make, "func", make)
    name = f"server_optimizer={getattr(kind, '__name__', kind)}"
    values = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    try:
        optimizer = make([values])
    except Exception as error:  # optimizers raise what they like
        raise ValueError(f"{name} takes no parameters: {first_line(error)}; {_INSTEAD}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"{name} gives {type(optimizer).__name__}, no optimizer; {_INSTEAD}.")
    values.grad = torch.ones_like(values)
    try:
        optimizer.step()
    except Exception as error:  # LBFGS, say, asks for a closure that computes a loss
        raise ValueError(
            f"{name} cannot step along a gradient alone, and the server has no loss: "
            f"{first_line(error)}; {_INSTEAD}."
        ) from error
    if (values > 0).any():
        raise ValueError(f"{name} steps against the clients' change; leave maximize out.")
    return ServerStep(make, _memory_of(optimizer, values, name))


def _memory_of(optimizer, values, name):
    """Names of what an optimizer remembers of a parameter, by those among the server's arrays."""
    state = {key: array for key, array in optimizer.state[values].items() if array is not None}
    other = [key for key, array in state.items() if not isinstance(array, torch.Tensor)]
    if other:
        raise ValueError(
            f"{name} remembers {other[0]!r}, which is no tensor, so that rounds could not go on "
            f"with it; {_INSTEAD}."
        )
    return {f"{SERVER_MEMORY}{type(optimizer).__name__}.{key}": key for key in state}
