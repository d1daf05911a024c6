"""skorch nets as recipes: what is taken from them, and how outputs are read."""

import copy
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import clone, is_classifier
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from pfl_sklearn._float_range import check_float_range
from pfl_sklearn.neural_network._mlp import MLP

READABLE = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.BCEWithLogitsLoss)
_MEANS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.MSELoss, torch.nn.L1Loss)
_ATOMS = (bool, int, float, str, type(None))
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_RANDOM = threading.Lock()  # torch's global generator serves one thread at a time
WITHOUT = {"train_split": None, "verbose": 0, "callbacks": "disable"}  # what rounds do


def bare(callbacks):
    """Callbacks without their names."""
    given = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    return [each[1] if isinstance(each, tuple) else each for each in given]


def learning_rates(recipe, n_rounds):
    """Learning rate of every round (n_rounds + 1,), the last one for what follows the rounds."""
    rate = recipe.get_params().get("optimizer__lr", recipe.lr)
    rates = np.full(n_rounds + 1, float(rate))
    if recipe.callbacks is None or isinstance(recipe.callbacks, str):
        return rates
    for callback in bare(recipe.callbacks):
        rates *= callback.simulate(n_rounds + 1, 1.0)
    return rates


# From a recipe to a net ---------------------------------------------------------------------------


@contextmanager
def seeded(seed, device):
    """Draws of torch from a seed; its global generators are left as they were."""
    on_gpu = device.type == "cuda"
    with _RANDOM, torch.random.fork_rng([device] if on_gpu else []):
        if on_gpu:
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)  # without a look for accelerators
        yield


def has_units(recipe):
    """Whether the net of a recipe can take units from the data."""
    return recipe.module is MLP


def fitted_to(recipe, table, looks):
    """The recipe, with what its :class:`MLP` is to take from the data if it is not given.

    That is the sizes and, where it `looks` at the data, the units.
    """
    if not has_units(recipe):
        return recipe
    X, y = table.features, table.y
    found = {"n_inputs": math.prod(X.shape[1:]), "n_outputs": table.details}
    if looks:
        found["center"], found["scale"] = standard_units("X", X)
        if y.dtype.kind == "f":
            found["output_center"], found["output_scale"] = standard_units("y", y)
    given = recipe.get_params(deep=False)
    missing = {f"module__{name}": value for name, value in found.items()}
    return clone(recipe).set_params(**{k: v for k, v in missing.items() if k not in given})


def standard_units(name, values):
    """Means and standard deviations of columns of an array (n, ...), as tuples; 1 for constants."""
    values = values.astype(np.float64)
    check_float_range(name, values, smallest=0.0)
    flat = values.reshape(len(values), -1)
    center, scale = flat.mean(axis=0), flat.std(axis=0)
    scale[scale <= 1e-12 * np.abs(center)] = 1.0
    return tuple(center.tolist()), tuple(np.where(scale > 0, scale, 1.0).tolist())


def as_input(net, features, private):
    """Rows in the type that training takes: the parameters', or integers for embeddings.

    Raises
    ------
    ValueError
        If values are too large for that type, and the fit is not `private`: there one client may
        not end it, and they are cut to the largest ones.
    """
    if isinstance(net.module_, MLP):
        features = net.module_.standardized_inputs(features)
    if features.dtype.kind in "iu" and embeds(net):
        return np.ascontiguousarray(features, dtype=np.int64)
    return _in_range("X", features, _type_of(net), private)


def as_targets(net, y, private, shape):
    """Targets in the type that the criterion takes.

    Columns of responses are as outputs of a row, of a `shape`, have them: () if there is one.
    """
    if isinstance(net.module_, MLP):
        y = net.module_.standardized_outputs(y)
    if y.ndim > 1:
        y = y.reshape(len(y), *shape)
    if y.dtype.kind == "f" or isinstance(net, NeuralNetBinaryClassifier):
        return _in_range("y", y, _type_of(net), private)
    return y.astype(np.int64)


def embeds(net):
    """Whether integers stay integers."""
    return any(isinstance(layer, _EMBEDDINGS) for layer in net.module_.modules())


def _in_range(name, values, kind, private):
    """Values as a contiguous array of a floating-point type."""
    most = np.finfo(kind).max
    if private:
        values = np.clip(values, -most, most)
    elif np.abs(values).max(initial=0) > most:
        raise ValueError(f"{name} holds values that are too large for the net's type, {kind}.")
    return np.ascontiguousarray(values, dtype=kind)


def _type_of(net):
    """Type of the parameters of an initialized net, as numpy's."""
    return torch.empty(0, dtype=next(net.module_.parameters()).dtype).numpy().dtype


def check_outputs(shape, n_outputs, net):
    """Raise ValueError if a row's output (a shape) does not go with the targets."""
    binary = isinstance(net, NeuralNetBinaryClassifier)
    if binary and n_outputs != 2:
        raise ValueError(f"NeuralNetBinaryClassifier has two classes; y has {n_outputs}.")
    allowed = {()} if binary else {(n_outputs,)}
    if n_outputs == 1 and not is_classifier(net):
        allowed.add(())
    if shape not in allowed:
        raise ValueError(
            f"the module of the net gives an output of shape {shape} for a row; y needs "
            f"{n_outputs} outputs ({'classes' if is_classifier(net) else 'columns'})."
        )


def check_loss(net, shape, y):
    """Raise ValueError if the criterion gives no number for outputs of a `shape` and targets y.

    Targets (n, ...) are enough whose values do not matter; the first of them stands for all.
    """
    trial, device = twin(net), torch.device(net.device)
    kind, n_rows = type(net.criterion_).__name__, 3 if shape == (2,) else 2
    y = y[:1].repeat(n_rows, axis=0)  # as many targets as outputs of a row would be broadcast
    outputs = torch.zeros(
        (n_rows, *shape), dtype=next(net.module_.parameters()).dtype, device=device
    )
    with seeded(0, device):
        try:
            targets = torch.from_numpy(y).to(device)
            loss = trial.get_loss(outputs, targets, X=None, training=True)
        except Exception as error:
            raise ValueError(
                f"criterion={kind} of the net does not take outputs of shape "
                f"{tuple(outputs.shape)} with targets of shape {y.shape} and type {y.dtype}: "
                f"{_first_line(error)}"
            ) from error
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ValueError(
            f"criterion={kind} of the net gives a loss of {found} for {n_rows} rows; expected "
            "one number, as reduction='mean' gives."
        )


def _first_line(error):
    return str(error).partition("\n")[0]


def take_over(net, earlier):
    """Give a net what the net of earlier rounds had and rounds do not change.

    Raises
    ------
    ValueError
        If the two have other parameters.
    """
    shapes = [
        {name: tuple(values.shape) for name, values in each.module_.state_dict().items()}
        for each in (net, earlier)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "the module of the net has other parameters than in the rounds before, which these "
            "rounds continue; fit anew, with warm_start=False."
        )
    net.module_.load_state_dict(earlier.module_.state_dict())


def twin(net):
    """A net of its own: whatever it remembers, in whatever it holds, stays with it.

    Its history, too: a loss that is the user's may write a client's labels there. skorch's copies
    go through a pickle.
    """
    found = object.__new__(type(net))
    memo = {id(net): found}
    vars(found).update({name: copied(value, memo) for name, value in vars(net).items()})
    return found


def copied(value, memo):
    """What ``copy.deepcopy(value, memo)`` gives, three times as fast for modules.

    Most of a module's attributes are empty dictionaries of hooks.
    """
    kind = type(value)
    if kind in _ATOMS or (kind is tuple and all(type(each) in _ATOMS for each in value)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in (dict, OrderedDict, set):
        memo[id(value)] = found = kind()
        if kind is set:
            found.update(copied(each, memo) for each in value)
        elif value:
            found.update((copied(key, memo), copied(each, memo)) for key, each in value.items())
        return found
    if not (isinstance(value, torch.nn.Module) and _copies_plainly(kind)):
        return copy.deepcopy(value, memo)
    memo[id(value)] = found = object.__new__(kind)
    vars(found).update({name: copied(each, memo) for name, each in vars(value).items()})
    return found


@lru_cache(maxsize=1024)
def _copies_plainly(kind):
    """Whether copies of modules of a class are those of their attributes.

    What torch's own layers do when they are copied is for pickles of its earlier versions.
    """
    given = {name: getattr(kind, name) for name in ("__reduce__", "__reduce_ex__", "__getstate__")}
    same = all(method is getattr(torch.nn.Module, name) for name, method in given.items())
    said = any("__deepcopy__" in vars(base) for base in kind.__mro__)
    return same and not said and kind.__setstate__.__module__.startswith("torch.nn.modules.")


def as_fitted(engine, vector, classes):
    """Net with a vector of parameters, as skorch leaves it after a fit."""
    net = engine.fitted_net(engine.models(vector, 1).values[0])
    if classes is not None:
        net.classes_inferred_ = np.arange(len(classes))
    net.initialize_history()
    net.initialize_optimizer()  # so that skorch can go on with these parameters
    net.module_.eval()
    return net


def initialized(recipe, seed):
    """Net with weights drawn from a seed (a module instance keeps its own); the recipe stays."""
    net = clone(recipe)
    vars(net).update(WITHOUT)  # skorch's set_params fails on callbacks that are disabled already
    with seeded(seed, torch.device(net.device)):
        net.initialize()
    net.module_.train()
    return net


def materialize(net, example, seed):
    """Settle the shapes of lazy layers on rows (2, ...), and draw their weights from a seed."""
    if any(map(torch.nn.parameter.is_lazy, net.module_.parameters())):
        net.module_.eval()
        _passed(net, example, seed)
        net.module_.train()


def refusal_of_one_row(net, example):
    """Why a net cannot be trained on one row, the first of an `example`; "" if it can."""
    trial = twin(net)
    trial.module_.train()
    try:
        _passed(trial, example[:1], 0)
    except ValueError as error:
        return _first_line(error.__cause__)
    return ""


def _passed(net, rows, seed):
    """Outputs of a net for rows, and whether it drew random numbers.

    Raises
    ------
    ValueError
        If the module refuses the rows.
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


class Probed(NamedTuple):
    """What one forward pass of a net shows.

    The shape of a row's output, whether training draws random numbers, and the names of the buffers
    that training moves.
    """

    output_shape: tuple[int, ...]
    random: bool
    moving: tuple[str, ...]


def probe(net, example):
    """Pass rows (2, ...) through a copy of an initialized net.

    Raises
    ------
    ValueError
        If the module cannot be copied, or refuses them.
    """
    _check_copies(net)
    trial = twin(net)
    trial.module_.train()
    before = {name: values.clone() for name, values in trial.module_.named_buffers()}
    outputs, random = _passed(trial, example, 0)
    known = _running(trial.module_)
    moving = tuple(
        name
        for name, values in trial.module_.named_buffers()
        if values.is_floating_point() and (name in known or not torch.equal(values, before[name]))
    )
    if not isinstance(outputs, torch.Tensor):
        raise ValueError(
            f"the module of the net gives a {type(outputs).__name__}; expected one tensor."
        )
    _check_probabilities_of(net, outputs)
    return Probed(tuple(outputs.shape[1:]), random, moving)


def _running(module):
    """Names of running statistics; what the example moves depends on its values."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase) and layer.track_running_stats
        for buffer, _ in layer.named_buffers(recurse=False)
    }


def _check_copies(net):
    """Raise ValueError if the module cannot be copied or pickled, as every client's has to be."""
    for name, layer in net.module_.named_modules():
        if is_parametrized(layer):
            raise ValueError(
                f"the module of the net has parametrizations, such as weight_norm, in its layer "
                f"{name!r}, and torch cannot pickle such modules. Give a module without them."
            )
    try:
        copy.deepcopy(net.module_)
    except Exception as error:
        raise ValueError(
            "the module of the net cannot be copied, and every client has to have its own (the "
            f"old torch.nn.utils.weight_norm is one reason): {_first_line(error)}"
        ) from error


def _check_probabilities_of(net, outputs):
    """Raise ValueError if the criterion takes outputs (2, n_classes) for what they are not."""
    if not isinstance(net.criterion_, torch.nn.NLLLoss) or outputs.ndim != 2:
        return
    if (outputs < 0).any() or ((outputs.sum(dim=1) - 1).abs() > 1e-3).any():
        first = [round(value, 3) for value in outputs[0].tolist()]
        raise ValueError(
            "criterion=NLLLoss of the net takes the module's outputs for probabilities, but those "
            f"of a row of zeros are {first}; give criterion=torch.nn.CrossEntropyLoss if they are "
            "logits."
        )


class Optimizer(NamedTuple):
    """The net's optimizer: its class, and its parameters besides the learning rate."""

    kind: type
    given: dict[str, Any]

    @property
    def is_sgd(self):
        return self.kind is torch.optim.SGD

    @property
    def weight_decay(self):
        return self.given.get("weight_decay", 0.0)

    @property
    def momentum(self):
        return self.given.get("momentum", 0.0)

    def step(self, parameters, slopes, speed, rate):
        """Step of stochastic gradient descent, in place; returns what it remembers."""
        slopes = list(slopes)
        if self.weight_decay:
            torch._foreach_add_(slopes, parameters, alpha=self.weight_decay)
        if self.momentum:
            if speed is None:
                speed = [values.clone() for values in slopes]
            else:
                torch._foreach_mul_(speed, self.momentum)
                torch._foreach_add_(speed, slopes, alpha=1 - self.given.get("dampening", 0.0))
            if self.given.get("nesterov", False):
                torch._foreach_add_(slopes, speed, alpha=self.momentum)
            else:
                slopes = speed
        torch._foreach_add_(parameters, slopes, alpha=-rate)
        return speed


def optimizer_of(net):
    """Optimizer of an initialized net."""
    _, given = net.get_params_for_optimizer("optimizer", net.module_.named_parameters())
    return Optimizer(net.optimizer, {name: v for name, v in given.items() if name != "lr"})


# How outputs are read -----------------------------------------------------------------------------


def reads_plainly(net):
    """Whether losses and outputs are skorch's own, so that rows of clients may be put together."""
    losses = (NeuralNet.get_loss, NeuralNetClassifier.get_loss)
    return type(net).infer is NeuralNet.infer and type(net).get_loss in losses


def is_mean(criterion):
    """Whether a client's loss is the mean of losses of its rows."""
    weighted = getattr(criterion, "weight", None) is not None
    known = type(criterion) in _MEANS and criterion.reduction == "mean"
    return known and not weighted and getattr(criterion, "ignore_index", -100) == -100


def readout(net, outputs):
    """What skorch's ``predict_proba`` makes of outputs."""
    return net._get_predict_nonlinearity()(outputs.double())


def shifted(net, outputs, offsets):
    """Outputs (..., n_classes) whose log probabilities, up to a constant, are moved by `offsets`.

    Raises
    ------
    ValueError
        If the criterion does not say what outputs are.
    """
    if isinstance(net.criterion_, torch.nn.CrossEntropyLoss):
        return outputs + offsets
    if isinstance(net.criterion_, torch.nn.NLLLoss):
        return torch.softmax(log_probabilities(net, outputs) + offsets, dim=-1)
    if isinstance(net.criterion_, torch.nn.BCEWithLogitsLoss):
        return outputs + (offsets[..., 1] - offsets[..., 0])
    raise unknown_outputs(type(net.criterion_))


def log_probabilities(net, outputs):
    """Logarithms (..., n_classes) of the probabilities that outputs (..., n_classes) stand for.

    Raises
    ------
    ValueError
        If the criterion does not say what outputs are.
    """
    criterion = net.criterion_
    if isinstance(criterion, torch.nn.CrossEntropyLoss):
        return F.log_softmax(outputs, dim=-1)
    if isinstance(criterion, torch.nn.NLLLoss):
        return torch.log(outputs + torch.finfo(outputs.dtype).eps)
    if isinstance(criterion, torch.nn.BCEWithLogitsLoss):
        return F.logsigmoid(torch.stack([-outputs, outputs], dim=-1))
    raise unknown_outputs(type(net.criterion_))


def unknown_outputs(criterion):
    return ValueError(
        f"criterion={criterion.__name__} of the net does not say what probabilities its outputs "
        "stand for; give CrossEntropyLoss (logits), NLLLoss (probabilities) or BCEWithLogitsLoss "
        "(one logit)."
    )


def is_readable(kind):
    """Whether a criterion's class says what a net's outputs are."""
    return issubclass(kind, READABLE)
