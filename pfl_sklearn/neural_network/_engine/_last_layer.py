"""The last linear layer of a net: where its parameters are, and what it reads and gives."""

from typing import Any, NamedTuple

import numpy as np
import torch
from skorch import NeuralNetRegressor
from torch import nn

from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._chain import align
from pfl_sklearn.neural_network._engine._checks import NoLastLayer
from pfl_sklearn.neural_network._engine._mlp import evaluate
from pfl_sklearn.neural_network._engine._recipe import log_probabilities

_SAME_PROBABILITY = 1e-5  # in single precision; another readout is off by far more


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
        moved = vector.copy()
        moved[self.weight] += deviation[:, : self.shape[1]].ravel()
        if self.bias is not None:
            moved[self.bias] += deviation[:, -1]
        return moved

    def inputs_and_outputs(
        self, engine: Any, vector: Floats, X: Any
    ) -> tuple[Floats, Floats, frozenset[str]]:
        """What the layer reads (g, n, d) and gives (g, n, K) for rows (g, n, ...) of clients.

        The net is in evaluation mode, and rows are as training takes them. In a protected fit a
        client whose rows the net refuses gets NaN, and does not end the fit. The third value holds
        the names of the classes of such exceptions.
        """
        passes = [self._passed_by_one(engine, vector, rows) for rows in X]
        inputs, outputs, failures = zip(*passes, strict=True)
        return np.stack(inputs), np.stack(outputs), frozenset().union(*failures)

    def _passed_by_one(self, engine, vector, rows):
        """What the layer of one client's net, which may remember its rows, reads and gives."""
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
    """The linear layer whose outputs are the logits of an engine's net.

    Raises ValueError if there is none.
    """
    start = engine.start()
    # Other weights than a net of zeros has, and rows that differ: all logits would look the same.
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
        own = [f"{layers[layer]}.{name}" for name, _ in layer.named_parameters()]
        once = sum(call[0] is layer for call in calls) == 1
        # Tied weights would move the layer that shares them, too.
        all_named = net.module_.named_parameters(remove_duplicate=False)
        used = [id(values) for _, values in all_named]
        tied = any(used.count(id(values)) > 1 for values in layer.parameters())
        if once and not tied and places.keys() >= set(own):
            bias = places[own[1]] if len(own) > 1 else None
            return LastLayer(layers[layer], places[own[0]], bias, tuple(layer.weight.shape))
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
    """Calls (layer, inputs, outputs) of some layers, in order, and the outputs of the net."""
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
