"""Modules that are chains of linear layers, for many clients at once.

The forward and the backward pass are written out, so that a step changes stacked weights in place:
gradients are never formed. What a client's numbers become does not depend, to the bit, on the other
clients of its block. That is why only some functions may stand between the layers, and why every
client's matrices start at a boundary in memory: elsewhere products round differently.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_RECTIFIERS = {torch.relu, Tensor.relu, F.relu}
# A list of what is known, not of what is not: a function that mixes rows, or rounds by how many
# there are, would let one client's numbers depend on another's.
_ROW_FUNCTIONS = {
    *_RECTIFIERS,
    *(torch.tanh, Tensor.tanh, F.leaky_relu),
    *(torch.softmax, Tensor.softmax, F.softmax),
    *(torch.log_softmax, Tensor.log_softmax, F.log_softmax),
    *(torch.flatten, Tensor.flatten),
}
_BOUNDARY = 64  # bytes, a line of the cache and the widest vector register


class Linear(NamedTuple):
    """Linear layer: positions of its weight and bias (or None) among the parameters."""

    weight: int
    bias: int | None


class RowFunction(NamedTuple):
    """Function of single rows, and its other arguments."""

    function: Callable[..., Tensor]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def rectifies(self) -> bool:
        """Whether it sets what is negative to 0, whose way back needs the outputs alone."""
        return self.function in _RECTIFIERS

    def __call__(self, rows: Tensor) -> Tensor:
        return self.function(rows, *self.args, **self.kwargs)


def chain_of(module, shape, dtype, device) -> list[Any] | None:
    """Steps of a module on rows of a `shape`, or None if it is no chain.

    A chain passes its input through linear layers, each of them once, and through row functions
    that are known to treat every row alike.
    """
    if not all(values.requires_grad for values in module.parameters()):
        return None  # a step changes all parameters
    module = copy.deepcopy(module)  # its program runs, and may change it
    recorder = _Recorder(torch.zeros((2, *shape), dtype=dtype, device=device), module)
    with torch.enable_grad(), recorder:
        outputs = module(recorder.rows)
    steps = recorder.steps
    if None in steps or outputs is not recorder.rows:
        return None
    places = [place for step in steps if isinstance(step, Linear) for place in step]
    used = sorted(place for place in places if place is not None)
    # Each once: the way back puts a layer's gradient where it is and adds up none.
    if used != list(range(len(list(module.parameters())))):
        return None
    return steps if _agrees(steps, module, shape, dtype, device) else None


class _Recorder(TorchFunctionMode):
    """Notes what a module does to rows (n, ...), step by step; None for what no chain does.

    It sees what its own thread computes, and nothing else: networks may be fitted in others
    meanwhile.
    """

    def __init__(self, rows, module):
        super().__init__()
        self.rows, self.steps = rows, []
        self._places = {id(values): k for k, values in enumerate(module.parameters())}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        # A torch.autograd.Function, too, runs without gradients: its way back is its own.
        on_rows = bool(args) and args[0] is self.rows and torch.is_grad_enabled()
        step = self._step(function, args[1:], kwargs) if on_rows else None
        self.steps.append(step if self._keeps_rows(result) else None)
        self.rows = result
        return result

    def _step(self, function, args, kwargs):
        """Step that a call with the rows is, or None."""
        if function is F.linear:
            return self._linear(*args) if self.rows.ndim == 2 and len(args) == 2 else None
        # Another tensor among the arguments may be another row's.
        tensors = any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))
        treats_rows_alike = function in _ROW_FUNCTIONS and not tensors
        return RowFunction(function, args, kwargs) if treats_rows_alike else None

    def _linear(self, weight, bias):
        at, bias_at = self._places.get(id(weight)), self._places.get(id(bias))
        if at is None or (bias_at is None and bias is not None):
            return None  # computed, not a parameter
        return Linear(at, bias_at)

    def _keeps_rows(self, result):
        """Whether a result has as many rows, of the same type, as what it was computed from."""
        if not (isinstance(result, Tensor) and isinstance(self.rows, Tensor)):
            return False
        return result.dtype == self.rows.dtype and result.shape[:1] == self.rows.shape[:1]


def _agrees(steps, module, shape, dtype, device):
    """Whether the steps do for three different clients together what the module does for each."""
    size = torch.Size((3, 2, *shape)).numel()
    rows = torch.linspace(-9, 9, size, dtype=dtype, device=device).cos().reshape(3, 2, *shape)
    parameters = dict(module.named_parameters())
    clients = [
        {name: values.detach() * factor for name, values in parameters.items()}
        for factor in (1.0, 0.5, -2.0)
    ]
    stacked = [torch.stack([tensors[name] for tensors in clients]) for name in parameters]
    with torch.no_grad():
        pairs = zip(clients, rows, strict=True)
        expected = torch.stack([functional_call(module, tensors, (X,)) for tensors, X in pairs])
        outputs = Chain(steps, [align(values) for values in stacked]).evaluate(rows)
    # To single precision: a wrong step is off by far more.
    same = outputs.shape == expected.shape
    return same and torch.allclose(outputs, expected, rtol=1e-4, atol=1e-6)


def empty_aligned(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Empty tensor of a `shape` (g, ...) in which every client's part starts at a boundary."""
    size, unit = math.prod(shape[1:]), _BOUNDARY // like.element_size()
    return like.new_empty(shape[0], -(-size // unit) * unit)[:, :size].view(shape)


def align(values: Tensor) -> Tensor:
    """The same values (g, ...), moved if a client's part starts elsewhere."""
    step, size = values.element_size(), math.prod(values.shape[1:])
    starts = values.data_ptr() | (values.stride(0) * step if len(values) > 1 else 0)
    if starts % _BOUNDARY == 0 and (size == 0 or values[0].is_contiguous()):
        return values
    return empty_aligned(values.shape, values).copy_(values)


class Chain:
    """A chain with the parameters of g clients, tensors (g, ...) that steps change in place.

    The tensors are :func:`aligned <empty_aligned>`.
    """

    def __init__(self, steps: list[Any], parameters: list[Tensor]) -> None:
        self.steps, self.parameters = steps, parameters
        self._tape: list[tuple[Any, Any]] = []

    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (g, b, ...) of rows X (g, b, ...); a step follows the gradient that they get."""
        self._tape = []
        self._outputs = self._forward(X, self._tape).requires_grad_()
        return self._outputs

    def evaluate(self, X: Tensor) -> Tensor:
        """Outputs (g, b, ...) alone."""
        return self._forward(X, None)

    def step(self, loss: Tensor, rate: float, weight_decay: float) -> None:
        """Take a gradient step on the sum of losses of the latest outputs."""
        (slope,) = torch.autograd.grad(loss, self._outputs)
        self.follow(slope, rate, weight_decay)

    def follow(self, slope: Tensor, rate: float, weight_decay: float) -> None:
        """Take a step against the slopes (g, b, ...) of a loss by the latest outputs."""
        with torch.no_grad():
            for change in self._backward(slope):
                change(rate, weight_decay)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Gradients (g, ...) of the sum of losses of the latest outputs, one per parameter."""
        (slope,) = torch.autograd.grad(loss, self._outputs)
        gradients: list[Any] = [None] * len(self.parameters)
        with torch.no_grad():
            for change in self._backward(slope):
                change.collect(gradients)
        return gradients

    def _forward(self, X, tape):
        """Outputs of rows; what the way back needs goes on the tape, from the first layer on."""
        g, b = X.shape[:2]
        rows, any_layer = X, False
        entry: Any
        for step in self.steps:
            if isinstance(step, Linear):
                entry, any_layer = align(rows.reshape(g, b, -1)), True
                rows = self._linear(step, entry)
            elif tape is None or not any_layer:  # no parameter comes before, so no way back either
                with torch.no_grad():
                    rows, entry = _unflattened(step(rows.flatten(0, 1)), g), None
            elif step.rectifies:  # without a tape of torch, as it is most networks' only function
                rows = entry = torch.clamp_min(rows, 0, out=empty_aligned(rows.shape, rows))
            else:
                leaf = rows.flatten(0, 1).requires_grad_()
                with torch.enable_grad():
                    values = step(leaf.clone())  # some functions work in place
                rows, entry = _unflattened(values.detach(), g), (leaf, values)
            if tape is not None and any_layer:
                tape.append((step, entry))
        return rows

    def _linear(self, step, inputs):
        weight = self.parameters[step.weight].transpose(1, 2)
        bias = None if step.bias is None else self.parameters[step.bias].unsqueeze(1)
        return _product(inputs, weight, bias)

    def _backward(self, slope: Tensor) -> "Iterator[_LayerChange]":
        """What each layer's parameters are to do, from the last layer to the first.

        The slope passes a layer before its parameters change.
        """
        g, b = slope.shape[:2]
        slope = slope.reshape(g, b, -1)
        while self._tape:
            step, entry = self._tape.pop()
            if isinstance(step, Linear):
                here = align(slope)
                if self._tape:  # a layer before this one needs the slope of its outputs
                    slope = _product(here, self.parameters[step.weight])
                yield _LayerChange(self.parameters, step, entry, here)
            elif step.rectifies:
                slope = torch.mul(slope, entry > 0, out=empty_aligned(entry.shape, entry))
            else:
                leaf, values = entry
                (slope,) = torch.autograd.grad(values, leaf, slope.reshape(values.shape))
                slope = slope.reshape(g, b, -1)


def _product(rows, matrix, bias=None):
    """Products (g, b, c) of rows (g, b, d) and matrices (g, d, c), plus a bias (g, 1, c)."""
    if _is_thin(rows, matrix):  # twice the same client, so that it is a batch
        bias = None if bias is None else bias.expand(2, -1, -1)
        return _product(rows.expand(2, -1, -1), matrix.expand(2, -1, -1), bias)[:1]
    products = empty_aligned((*rows.shape[:2], matrix.shape[2]), rows)
    if bias is None:
        return torch.bmm(rows, matrix, out=products)
    return torch.baddbmm(bias, rows, matrix, out=products)


def _is_thin(rows, matrix):
    """Whether a product (1, b, c) of (1, b, d) and (1, d, c) may round otherwise than among others.

    Libraries have routines of their own for products of vectors, but not in batches.
    """
    return len(rows) == 1 and 1 in (*rows.shape[1:], matrix.shape[2])


def _unflattened(rows, n_clients):
    """Rows (g, b, ...) of g clients, from (g * b, ...)."""
    return rows.unflatten(0, (n_clients, -1))


class _LayerChange(NamedTuple):
    """A layer, its inputs (g, b, d), and the slopes (g, b, c) of its outputs."""

    parameters: list
    layer: Linear
    inputs: Any
    slopes: Any

    def __call__(self, rate, weight_decay):
        """Step of plain stochastic gradient descent, in place."""
        weight, keep = self.parameters[self.layer.weight], 1 - rate * weight_decay
        factors = (self.slopes.transpose(1, 2), self.inputs)
        # Three ways to one result: the kernels for vectors round by the number of clients.
        if weight.shape[2] == 1:
            weight.mul_(keep).sub_(self._of_weight(), alpha=rate)
        elif _is_thin(*factors):
            twice = empty_aligned((2, *weight.shape[1:]), weight).copy_(weight)
            slopes, inputs = (values.expand(2, -1, -1) for values in factors)
            weight.copy_(twice.baddbmm_(slopes, inputs, beta=keep, alpha=-rate)[:1])
        else:
            weight.baddbmm_(*factors, beta=keep, alpha=-rate)
        if self.layer.bias is not None:
            bias = self.parameters[self.layer.bias]
            if weight_decay:  # else one pass less
                bias.mul_(keep)
            bias.sub_(self.slopes.sum(dim=1), alpha=rate)

    def collect(self, gradients):
        """Put the gradients at the positions of the parameters."""
        gradients[self.layer.weight] = self._of_weight()
        if self.layer.bias is not None:
            gradients[self.layer.bias] = self.slopes.sum(dim=1)

    def _of_weight(self):
        return _product(self.slopes.transpose(1, 2), self.inputs)
