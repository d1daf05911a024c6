"""skorch nets as recipes: what is taken from them, and how outputs are read."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import clone, is_classifier
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier
from skorch.callbacks import GradientNormClipping, LRScheduler
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from pfl_sklearn._float_range import check_float_range
from pfl_sklearn._rounds.stored import StoredRows, blocks_of
from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._mlp import MLP

if TYPE_CHECKING:
    from pfl_sklearn._rounds.run import CheckedTable
    from pfl_sklearn.neural_network._engine._engine import Engine

_READABLE = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.BCEWithLogitsLoss)
_MEANS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.MSELoss, torch.nn.L1Loss)
_NOT_ONE = 1e-3  # distance of a sum of probabilities from 1 that is no rounding
_CONSTANT_FEATURE = 1e-12  # of its mean: a smaller standard deviation is rounding, not spread
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_RANDOM = threading.Lock()  # torch's global generator serves one thread at a time
WITHOUT: dict[str, Any] = {"train_split": None, "verbose": 0, "callbacks": "disable"}  # in rounds


def bare(callbacks: Any) -> list[Any]:
    """Callbacks without their names."""
    several = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    return [each[1] if isinstance(each, tuple) else each for each in several]


def learning_rate(recipe: NeuralNet) -> float:
    """Learning rate that a recipe has before any scheduler changes it."""
    return float(recipe.get_params().get("optimizer__lr", recipe.lr))


def learning_rates(recipe: NeuralNet, n_rounds: int) -> Floats:
    """Learning rate of every round (n_rounds + 1,), the last one for what follows the rounds.

    Raises
    ------
    ValueError
        If a scheduler cannot be stepped as often.
    """
    rate = learning_rate(recipe)
    rates = np.full(n_rounds + 1, rate)
    for callback in _callbacks_of(recipe, LRScheduler):
        # From the recipe's own rate: bounds such as eta_min and max_lr are rates, not shares of it.
        scheduled = _scheduled(callback, n_rounds, rate)
        rates = rates * (scheduled / rate) if rate else scheduled
    return rates


def _scheduled(scheduler, n_rounds, rate):
    """Learning rates (n_rounds + 1,) that a scheduler alone makes of one."""
    try:
        return scheduler.simulate(n_rounds + 1, rate)
    except ValueError:  # OneCycleLR of as many steps as there are rounds ends with the last of them
        pass
    try:
        rates = scheduler.simulate(n_rounds, rate)
    except ValueError as error:
        policy = getattr(scheduler.policy, "__name__", scheduler.policy)
        raise ValueError(
            f"{policy} of the net cannot be stepped once in each of {n_rounds} rounds: {error}"
        ) from error
    return np.append(rates, rates[-1])


def gradient_clips(recipe: NeuralNet) -> tuple[tuple[float, float], ...]:
    """Bounds on the norm of a step's gradient, one after the other, and the orders of the norms."""
    clips = _callbacks_of(recipe, GradientNormClipping)
    pairs = ((each.gradient_clip_value, each.gradient_clip_norm_type) for each in clips)
    return tuple((float(bound), float(order)) for bound, order in pairs if bound is not None)


def _callbacks_of(recipe, kind):
    """Callbacks of a recipe of one kind, in their order."""
    if recipe.callbacks is None or isinstance(recipe.callbacks, str):
        return []
    return [callback for callback in bare(recipe.callbacks) if isinstance(callback, kind)]


# From a recipe to a net ---------------------------------------------------------------------------


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw what torch draws inside from a seed; its global generators stay as they were."""
    on_gpu = device.type == "cuda"
    with _RANDOM, torch.random.fork_rng([device] if on_gpu else []):
        if on_gpu:
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)  # without a look for accelerators
        yield


def has_units(recipe: NeuralNet) -> bool:
    """Whether the net of a recipe can take units from the data."""
    return recipe.module is MLP


def fitted_to(recipe: NeuralNet, table: CheckedTable, looks: bool) -> NeuralNet:
    """The recipe, with what its :class:`MLP` is to take from the data if it is not given.

    That is the sizes and, where it `looks` at the data, the units.
    """
    if not has_units(recipe):
        return recipe
    X, y = table.features, table.y
    params = {"n_inputs": math.prod(X.shape[1:]), "n_outputs": table.n_outputs}
    if looks:  # never with noise: means and standard deviations are of the clients' rows
        params["center"], params["scale"] = standard_units("X", X)
        if y.dtype.kind == "f":
            params["output_center"], params["output_scale"] = standard_units("y", y)
    users = recipe.get_params(deep=False)
    params = {f"module__{name}": value for name, value in params.items()}
    return clone(recipe).set_params(**{k: v for k, v in params.items() if k not in users})


def standard_units(name: str, values: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and standard deviations of columns of an array (n, ...), as tuples; 1 for constants."""
    width, n = math.prod(values.shape[1:]), len(values)

    def flat():
        return (rows.astype(np.float64).reshape(-1, width) for _, rows in blocks_of(values))

    for rows in flat():
        check_float_range(name, rows, smallest=0.0)
    center = sum(rows.sum(axis=0) for rows in flat()) / n
    scale = np.sqrt(sum(np.square(rows - center).sum(axis=0) for rows in flat()) / n)
    scale[scale <= _CONSTANT_FEATURE * np.abs(center)] = 1.0
    return tuple(center.tolist()), tuple(np.where(scale > 0, scale, 1.0).tolist())


def as_input(net: NeuralNet, features: Any, private: bool) -> Any:
    """Rows in a type all of whose values :func:`input_type`'s has, so that a batch can follow it.

    Rows that have such a type stay as they are.

    Raises
    ------
    ValueError
        If values are too large for that type, and the fit is not `private`: there one client may
        not end it, and they are cut to the largest ones.
    """
    units = net.module_.input_units if isinstance(net.module_, MLP) else None
    kind = input_type(net, np.dtype(np.float64) if units else features.dtype)
    if units is None and np.can_cast(features.dtype, kind):
        return features
    # Without the net: stored rows take this along to workers, who may not know the net's class.
    step = partial(_converted, units, kind, private)
    if not isinstance(features, StoredRows):
        return step(features)
    for _, rows in blocks_of(features):
        step(rows)  # raises now, not in the middle of a round
    return features.changed(step)


def _converted(units, kind, private, rows):
    """Rows in units, if there are any, and of a type."""
    if units is not None:
        rows = units.standardized(rows)
    if kind.kind == "i":
        return np.ascontiguousarray(rows, dtype=kind)
    return _in_range("X", rows, kind, private)


def input_type(net: NeuralNet, given: np.dtype) -> np.dtype:
    """Type of the rows of a batch: the parameters', or integers if an embedding is given them."""
    embeds = any(isinstance(layer, _EMBEDDINGS) for layer in net.module_.modules())
    return np.dtype(np.int64) if embeds and given.kind in "iu" else _type_of(net)


def as_targets(net: NeuralNet, y: np.ndarray, private: bool, shape: tuple[int, ...]) -> np.ndarray:
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


def _in_range(name, values, kind, private):
    """Values as a contiguous array of a floating-point type."""
    largest = np.finfo(kind).max
    if private:  # an error would reveal that some client has such a value
        values = np.clip(values, -largest, largest)
    elif max(-float(values.min(initial=0)), float(values.max(initial=0))) > largest:
        raise ValueError(f"{name} holds values that are too large for the net's type, {kind}.")
    return np.ascontiguousarray(values, dtype=kind)


def _type_of(net):
    """Type of the parameters of an initialized net, as numpy's."""
    return torch.empty(0, dtype=next(net.module_.parameters()).dtype).numpy().dtype


def check_outputs(shape: tuple[int, ...], n_outputs: int, net: NeuralNet) -> None:
    """Raise ValueError if a row's output (a shape) does not go with the targets."""
    binary = isinstance(net, NeuralNetBinaryClassifier)
    if binary and n_outputs != 2:
        raise ValueError(f"NeuralNetBinaryClassifier has two classes; y has {n_outputs}.")
    single = binary or (n_outputs == 1 and not is_classifier(net))
    if shape != (n_outputs,) * (not binary) and not (single and shape == ()):
        raise ValueError(
            f"the module of the net gives an output of shape {shape} for a row; y needs "
            f"{n_outputs} outputs ({'classes' if is_classifier(net) else 'columns'})."
        )


def check_loss(net: NeuralNet, shape: tuple[int, ...], y: np.ndarray) -> None:
    """Raise ValueError if the criterion gives no number for outputs of a `shape` and targets y.

    Targets (n, ...) are enough whose values do not matter; the first of them stands for all.
    """
    trial, device = twin(net), torch.device(net.device)
    # As many targets as outputs of a row would be broadcast, so that a wrong shape would pass.
    kind, n_rows = type(net.criterion_).__name__, 3 if shape == (2,) else 2
    y = y[:1].repeat(n_rows, axis=0)
    outputs = next(net.module_.parameters()).new_zeros((n_rows, *shape)).detach()
    with seeded(0, device):
        try:
            targets = torch.from_numpy(y).to(device)
            loss = trial.get_loss(outputs, targets, X=None, training=True)
        except Exception as error:
            raise ValueError(
                f"criterion={kind} of the net does not take outputs of shape "
                f"{tuple(outputs.shape)} with targets of shape {y.shape} and type {y.dtype}: "
                f"{first_line(error)}"
            ) from error
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ValueError(
            f"criterion={kind} of the net gives a loss of {got} for {n_rows} rows; expected "
            "one number, as reduction='mean' gives."
        )


def first_line(error: BaseException | None) -> str:
    """First line of an exception's text: torch's texts go on for pages."""
    return str(error).partition("\n")[0]


def take_over(net: NeuralNet, earlier: NeuralNet) -> None:
    """Give a net the parameters and buffers of the net of earlier rounds.

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


def twin(net: NeuralNet) -> NeuralNet:
    """A copy of a net that shares nothing with it, so that nothing of one client is seen by others.

    Not even the history: a loss of the user's may write a client's labels there.
    """
    other = object.__new__(type(net))
    # skorch's own copies go through a pickle, which a class of a script may not survive.
    vars(other).update(copy.deepcopy(vars(net), {id(net): other}))
    return other


def as_fitted(engine: Engine, vector: np.ndarray, classes: np.ndarray | None) -> NeuralNet:
    """Net with parameters (p,), as skorch leaves it after a fit."""
    net = engine.fitted_net(engine.models(vector, 1).values[0])
    if classes is not None:
        net.classes_inferred_ = np.arange(len(classes))
    net.initialize_history()
    net.initialize_optimizer()  # so that skorch can go on with these parameters
    net.module_.eval()
    return net


def initialized(recipe: NeuralNet, seed: int) -> NeuralNet:
    """Net of a recipe with weights drawn from a seed; an instance of a module keeps its own."""
    net = clone(recipe)
    vars(net).update(WITHOUT)  # skorch's set_params fails on callbacks that are disabled already
    with seeded(seed, torch.device(net.device)):
        net.initialize()
    net.module_.train()
    return net


def materialize(net: NeuralNet, example: np.ndarray, seed: int) -> None:
    """Let lazy layers take their shapes from rows (2, ...), and draw their weights from a seed."""
    if any(map(torch.nn.parameter.is_lazy, net.module_.parameters())):
        net.module_.eval()  # or the rows would move running statistics
        _passed(net, example, seed)
        net.module_.train()


def refusal_of_one_row(net: NeuralNet, example: np.ndarray) -> str:
    """Why a net cannot be trained on one row, the first of an `example`; "" if it can."""
    trial = twin(net)
    trial.module_.train()
    try:
        _passed(trial, example[:1], 0)
    except ValueError as error:
        return first_line(error.__cause__)
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


def probe(net: NeuralNet, example: np.ndarray) -> tuple[tuple[int, ...], bool, tuple[str, ...]]:
    """Pass rows (2, ...) through a copy of an initialized net, and note what happens.

    Returns the shape of a row's output, whether training draws random numbers, and the names of the
    buffers that training moves.

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
    statistics = _running(trial.module_)
    moving = tuple(  # counters of batches are integers: averages of them mean nothing
        name
        for name, values in trial.module_.named_buffers()
        if values.is_floating_point()
        and (name in statistics or not torch.equal(values, before[name]))
    )
    if not isinstance(outputs, torch.Tensor):
        raise ValueError(
            f"the module of the net gives a {type(outputs).__name__}; expected one tensor."
        )
    _check_probabilities_of(net, outputs)
    return tuple(outputs.shape[1:]), random, moving


def _running(module):
    """Names of running statistics, which a pass of zeros may leave as they were."""
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
            f"of a row of zeros are {first}; give criterion=torch.nn.CrossEntropyLoss if they are "
            "logits."
        )


# How outputs are read -----------------------------------------------------------------------------


def reads_plainly(net: NeuralNet) -> bool:
    """Whether losses and outputs are skorch's own, so that rows of clients may be put together."""
    losses = (NeuralNet.get_loss, NeuralNetClassifier.get_loss)
    return type(net).infer is NeuralNet.infer and type(net).get_loss in losses


def is_mean(criterion: torch.nn.Module) -> bool:
    """Whether a client's loss is the mean of losses of its rows.

    With class weights or rows that are ignored, torch divides by what is left of the batch.
    """
    weighted = getattr(criterion, "weight", None) is not None
    averages = type(criterion) in _MEANS and criterion.reduction == "mean"
    return averages and not weighted and getattr(criterion, "ignore_index", -100) == -100


def shifted(criterion: Any, outputs: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Outputs (..., n_classes) whose log probabilities, up to a constant, are moved by `offsets`.

    Raises
    ------
    ValueError
        If the criterion does not say what outputs are.
    """
    if isinstance(criterion, torch.nn.CrossEntropyLoss):
        return outputs + offsets
    if isinstance(criterion, torch.nn.NLLLoss):
        return torch.softmax(log_probabilities(criterion, outputs) + offsets, dim=-1)
    if isinstance(criterion, torch.nn.BCEWithLogitsLoss):
        return outputs + (offsets[..., 1] - offsets[..., 0])
    raise unknown_outputs(type(criterion))


def log_probabilities(criterion: Any, outputs: torch.Tensor) -> torch.Tensor:
    """Logarithms (..., n_classes) of the probabilities that outputs (..., n_classes) stand for.

    Raises
    ------
    ValueError
        If the criterion does not say what outputs are.
    """
    if isinstance(criterion, torch.nn.CrossEntropyLoss):
        return F.log_softmax(outputs, dim=-1)
    if isinstance(criterion, torch.nn.NLLLoss):
        return torch.log(outputs + torch.finfo(outputs.dtype).eps)  # as skorch does
    if isinstance(criterion, torch.nn.BCEWithLogitsLoss):
        return F.logsigmoid(torch.stack([-outputs, outputs], dim=-1))
    raise unknown_outputs(type(criterion))


def unknown_outputs(criterion: type) -> ValueError:
    """The error to raise for a criterion whose class does not say what outputs are."""
    return ValueError(
        f"criterion={criterion.__name__} of the net does not say what probabilities its outputs "
        "stand for; give CrossEntropyLoss (logits), NLLLoss (probabilities) or BCEWithLogitsLoss "
        "(one logit)."
    )


def is_readable(kind: type) -> bool:
    """Whether a criterion's class says what a net's outputs are."""
    return issubclass(kind, _READABLE)
