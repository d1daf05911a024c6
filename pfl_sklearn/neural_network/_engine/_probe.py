"""Trial passes on rows of no client, and the last linear layer of a network."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from skorch import NeuralNet, NeuralNetRegressor
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._chain import align
from pfl_sklearn.neural_network._engine._mlp import evaluate
from pfl_sklearn.neural_network._engine._recipe import (
    as_input,
    first_line,
    initialized,
    input_type,
    log_probabilities,
    seeded,
    take_over,
    twin,
)

_NOT_ONE = 1e-3  # distance of a sum of probabilities from 1 that is no rounding
_PASSES = 2  # of training: after one, a sum over batches is still their mean
# Of outputs that should be the same: a graphics card may add in another order.
_RTOL, _ATOL = 1e-4, 1e-6
_SAME_PROBABILITY = 1e-5  # in single precision; another readout is off by far more


class NoLastLayer(ValueError):
    """The module of a network does not end with a linear layer."""


def started(
    recipe: NeuralNet, shape: tuple[int, ...], kind: np.dtype, seed: int, earlier: Any = None
) -> tuple[NeuralNet, np.ndarray]:
    """Net with weights from a seed, or of an earlier engine, and trial rows of a shape and type."""
    net = initialized(recipe, seed)
    rows = trial_rows(net, shape, kind)
    materialize(net, rows, seed)
    if earlier is not None:
        take_over(net, earlier.net)
    return net, rows


def trial_rows(net: NeuralNet, shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Rows (2, *shape) as the net gets those of a type: of no client, and the same in every fit."""
    zeros = as_input(net, np.zeros((2, *shape), kind), private=True)
    # No rows of clients, whom a trial must not depend on, and not zeros, which move no running
    # mean. Between 0 and 1, where a network that looks numbers up finds code 0, which tables have.
    rows = np.random.default_rng(0).uniform(0.1, 0.9, size=zeros.shape)
    return rows.astype(input_type(net, zeros.dtype))


def materialize(net: NeuralNet, example: np.ndarray, seed: int) -> None:
    """Let lazy layers take their shapes from rows (2, ...), and draw their weights from a seed."""
    if any(map(torch.nn.parameter.is_lazy, net.module_.parameters())):
        net.module_.eval()  # or the rows would move running statistics
        forward_pass(net, example, seed)
        net.module_.train()


def fewest_rows(net: NeuralNet) -> int:
    """Rows that a net can predict for at least: two, if a layer takes its statistics from them."""
    norms = (layer for layer in net.module_.modules() if isinstance(layer, _NormBase))
    return 1 + any(not layer.track_running_stats for layer in norms)


def why_not_one_row(net: NeuralNet, example: np.ndarray) -> str:
    """Why a network cannot be trained on one row, the first of an `example`; "" if it can."""
    trial = twin(net)
    trial.module_.train()
    try:
        forward_pass(trial, example[:1], 0)
    except ValueError as error:
        return first_line(error.__cause__)
    return ""


def forward_pass(net, rows, seed):
    """Outputs of a network for rows, and whether it drew random numbers.

    Raises ValueError if the module refuses the rows.
    """
    device = torch.device(net.device)
    with seeded(seed, device), torch.no_grad():
        state = torch.random.get_rng_state()
        try:
            outputs = net.infer(torch.as_tensor(rows, device=device))
        except Exception as error:
            raise ValueError(
                f"the module of the net refuses rows of shape {rows.shape[1:]} and type "
                f"{rows.dtype}: {error}"
            ) from error
        return outputs, not torch.equal(state, torch.random.get_rng_state())


def probe(net: NeuralNet, example: np.ndarray) -> tuple[tuple[int, ...], bool, tuple[str, ...]]:
    """Pass rows (2, ...) through a copy of an initialized network, and note what happens.

    Returns the shape of a row's output, whether training draws random numbers, and the names of the
    buffers that training moves.

    Raises ValueError if the module cannot be copied, or refuses them.
    """
    _check_copies(net)
    trial = twin(net)
    trial.module_.train()
    before = {name: values.clone() for name, values in trial.module_.named_buffers()}
    outputs, random = forward_pass(trial, example, 0)
    statistics = running_statistics(trial.module_)
    moving = tuple(  # counters of batches are integers: averages of them mean nothing
        name
        for name, values in trial.module_.named_buffers()
        if _is_like(values, before.get(name))
        and (name in statistics or not torch.equal(values, before[name]))
    )
    if not isinstance(outputs, torch.Tensor):
        raise ValueError(
            f"the module of the net gives a {type(outputs).__name__}; expected one tensor."
        )
    _check_probabilities_of(net, outputs)
    return tuple(outputs.shape[1:]), random, moving


def _is_like(values, before):
    """Whether a buffer is one of floating-point numbers, of the shape that it had `before`."""
    return before is not None and values.is_floating_point() and values.shape == before.shape


def running_statistics(module):
    """Names of running statistics, which rows that a layer before cuts to 0 leave as they were."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase) and layer.track_running_stats
        for buffer, _ in layer.named_buffers(recurse=False)
    }


def _check_copies(net):
    """Raise ValueError if the module cannot be copied or pickled, as every client's has to be."""
    for name, layer in net.module_.named_modules():
        if is_parametrized(layer):  # such modules can be copied, but no worker could get one
            raise ValueError(
                f"the module of the net has parametrizations, such as weight_norm, in its layer "
                f"{name!r}, and torch cannot pickle such modules. Give a module without them."
            )
    try:
        copy.deepcopy(net.module_)
    except Exception as error:
        raise ValueError(
            "the module of the net cannot be copied, and every client has to have its own (the "
            f"old torch.nn.utils.weight_norm is one reason): {first_line(error)}"
        ) from error


def _check_probabilities_of(net, outputs):
    """Raise ValueError if the criterion takes outputs (2, n_classes) for what they are not."""
    if not isinstance(net.criterion_, torch.nn.NLLLoss) or outputs.ndim != 2:
        return
    # skorch takes the logarithm itself, so the usual LogSoftmax before an NLLLoss is wrong here.
    if (outputs < 0).any() or ((outputs.sum(dim=1) - 1).abs() > _NOT_ONE).any():
        first = [round(value, 3) for value in outputs[0].tolist()]
        raise ValueError(
            "criterion=NLLLoss of the net takes the module's outputs for probabilities, but those "
            f"of a trial row are {first}; give criterion=torch.nn.CrossEntropyLoss if they are "
            "logits."
        )


def check_keeps_nothing_else(net: NeuralNet, example: np.ndarray, moving: tuple[str, ...]) -> None:
    """Raise ValueError if predictions follow more of what training changed than rounds average.

    These are parameters, and the buffers that are `moving`.
    """
    kinds = {type(layer).__module__ for layer in net.module_.modules()}
    if all(kind.startswith(("torch.nn.", "pfl_sklearn.")) for kind in kinds):
        return  # such layers keep nothing else
    fresh, used = twin(net), twin(net)
    used.module_.train()
    for _ in range(_PASSES):
        forward_pass(used, example, 0)
    # As rounds hand a network on: with these buffers, and all else as it was drawn.
    latest = dict(used.module_.named_buffers())
    for name, values in fresh.module_.named_buffers():
        if name in moving:
            values.copy_(latest[name])
    outputs = []
    for trial in (fresh, used):
        trial.module_.eval()
        outputs.append(forward_pass(trial, example, 0)[0])
    if not torch.allclose(outputs[0], outputs[1], rtol=_RTOL, atol=_ATOL, equal_nan=True):
        raise ValueError(
            "the module of the net predicts otherwise after training passes that left its "
            "parameters as they were: it keeps something of the rows in an attribute or in a "
            "buffer of integers, which rounds do not average. Keep it in a buffer of "
            "floating-point numbers (register_buffer) of a fixed shape, or use another module."
        )


# The last linear layer ----------------------------------------------------------------------------


class LastLayer(NamedTuple):
    """A linear layer with d inputs and K outputs: its name, and places among the parameters."""

    name: str
    weight: slice
    bias: slice | None
    shape: tuple[int, int]  # (K, d)

    @property
    def head_shape(self) -> tuple[int, int]:
        """Shape (K, d) or, with a bias, (K, d + 1) of the layer's parameters; the bias is last."""
        return self.shape[0], self.shape[1] + (self.bias is not None)

    def with_deviation(self, vector: Floats, deviation: Floats) -> Floats:
        """Vector (p,) in which the layer's parameters differ by a deviation of `head_shape`."""
        shifted = vector.copy()
        shifted[self.weight] += deviation[:, : self.shape[1]].ravel()
        if self.bias is not None:
            shifted[self.bias] += deviation[:, -1]
        return shifted

    def inputs_and_outputs(
        self, engine: Any, vector: Floats, X: Any
    ) -> tuple[Floats, Floats, frozenset[str]]:
        """What the layer reads (g, n, d) and gives (g, n, K) for rows (g, n, ...) of clients.

        The network is in evaluation mode, and rows are as training takes them. In a protected fit a
        client whose rows the network refuses gets NaN, and does not end the fit. The third value
        holds the names of the classes of such exceptions.
        """
        passes = [self._passed_by_one(engine, vector, rows) for rows in X]
        inputs, outputs, failures = zip(*passes, strict=True)
        return np.stack(inputs), np.stack(outputs), frozenset().union(*failures)

    def _passed_by_one(self, engine, vector, rows):
        """What the layer of one client's network, which may remember its rows, reads and gives."""
        net, rows = _evaluating(engine, vector, rows)
        try:
            calls, _ = _calls(net, [net.module_.get_submodule(self.name)], rows)
        except Exception as error:
            if not engine.protected:
                raise
            nothing = (np.full((len(rows), n), np.nan) for n in reversed(self.shape))
            return *nothing, {type(error).__name__}
        ((_, (inputs,), outputs),) = calls
        return _double(inputs), _double(outputs), set()


def last_layer_of(engine: Any) -> LastLayer:
    """The linear layer whose outputs are the logits of an engine's network.

    Raises ValueError if there is none.
    """
    start = engine.start()
    # Other weights than a network of zeros has, and rows that differ: all logits would look the
    # same.
    start[: engine.n_trained] += 0.1 * np.cos(np.arange(engine.n_trained))
    rows = engine.example
    if not engine.whole:  # codes of an embedding have to stay codes
        rows = rows + np.cos(np.arange(rows.size)).reshape(rows.shape)
    net, rows = _evaluating(engine, start, rows)
    layers = {
        layer: name for name, layer in net.module_.named_modules() if type(layer) is nn.Linear
    }
    calls, outputs = _calls(net, layers, rows)
    places = {part.name: part.place for part in engine.parts}
    if calls and _are_logits(net, calls[-1][2], outputs):
        layer = calls[-1][0]
        names = [f"{layers[layer]}.{name}" for name, _ in layer.named_parameters()]
        once = sum(call[0] is layer for call in calls) == 1
        # Tied weights would move the layer that shares them, too.
        all_named = net.module_.named_parameters(remove_duplicate=False)
        used = [id(values) for _, values in all_named]
        tied = any(used.count(id(values)) > 1 for values in layer.parameters())
        if once and not tied and places.keys() >= set(names):
            bias = places[names[1]] if len(names) > 1 else None
            return LastLayer(layers[layer], places[names[0]], bias, tuple(layer.weight.shape))
    raise NoLastLayer(
        "head needs a module that ends with a trainable torch.nn.Linear, used once, whose outputs "
        "are the logits of the classes (followed by a softmax for NLLLoss); the module of the net "
        "has another end. Give another module, or head=None."
    )


def _evaluating(engine, vector, X):
    """Net in evaluation mode, but for units, since X is in those of training; and X as a tensor."""
    net, kind = engine.evaluating(vector)
    evaluate(net.module_)
    return net, align(torch.from_numpy(X.astype(kind, copy=False)).to(engine.device))


def _calls(net, layers, rows):
    """Calls (layer, inputs, outputs) of some layers, in order, and the outputs of the network."""
    calls = []
    hooks = [layer.register_forward_hook(lambda *call: calls.append(call)) for layer in layers]
    with torch.no_grad():
        outputs = net.infer(rows)
    for hook in hooks:
        hook.remove()
    return calls, outputs


def _are_logits(net, logits, outputs):
    """Whether the probabilities that outputs stand for are the softmax of logits.

    A regression's outputs may have other units than its last layer's.
    """
    if isinstance(net, NeuralNetRegressor):
        return logits.numel() == outputs.numel()
    expected = log_probabilities(net.criterion_, outputs).exp()
    same = logits.shape == expected.shape
    return same and torch.allclose(
        torch.softmax(logits, dim=-1), expected, rtol=0, atol=_SAME_PROBABILITY
    )


def _double(tensor):
    return tensor.double().numpy(force=True)
