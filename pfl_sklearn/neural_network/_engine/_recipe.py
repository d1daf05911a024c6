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

from pfl_sklearn._columns import check_float_range
from pfl_sklearn._rounds.out_of_core import StoredRows, blocks_of
from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._mlp import MLP

if TYPE_CHECKING:
    from pfl_sklearn._rounds.run import CheckedTable
    from pfl_sklearn.neural_network._engine._engine import Engine

_READABLE = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.BCEWithLogitsLoss)
_MEANS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.MSELoss, torch.nn.L1Loss)
_CONSTANT_FEATURE = 1e-12  # of its mean: a smaller standard deviation is rounding, not spread
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_RANDOM = threading.Lock()  # torch's global generator serves one thread at a time
WITHOUT: dict[str, Any] = {"train_split": None, "verbose": 0, "callbacks": "disable"}  # in rounds


def without_names(callbacks: Any) -> list[Any]:
    """Callbacks without their names."""
    several = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    return [callback[1] if isinstance(callback, tuple) else callback for callback in several]


def learning_rate(recipe: NeuralNet) -> float:
    """Learning rate that a recipe has before any scheduler changes it."""
    return float(recipe.get_params().get("optimizer__lr", recipe.lr))


def learning_rates(recipe: NeuralNet, n_rounds: int) -> Floats:
    """Learning rate of every round (n_rounds + 1,), the last one for what follows the rounds.

    Raises ValueError if a scheduler cannot be stepped as often.
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
    pairs = ((callback.gradient_clip_value, callback.gradient_clip_norm_type) for callback in clips)
    return tuple((float(bound), float(order)) for bound, order in pairs if bound is not None)


def _callbacks_of(recipe, kind):
    """Callbacks of a recipe of one kind, in their order."""
    if recipe.callbacks is None or isinstance(recipe.callbacks, str):
        return []
    return [callback for callback in without_names(recipe.callbacks) if isinstance(callback, kind)]


# From a recipe to a network -----------------------------------------------------------------------


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw what torch draws inside from a seed; its global generators stay as they were."""
    with _RANDOM:
        # By themselves: torch.manual_seed would set those of all other accelerators as well.
        generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # there are none before
            number = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[number])
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def has_units(recipe: NeuralNet) -> bool:
    """Whether the network of a recipe can take units from the data."""
    return recipe.module is MLP


def fill_recipe(recipe: NeuralNet, table: CheckedTable, looks: bool) -> NeuralNet:
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

    Raises ValueError if values are too large for that type, and the fit is not `private`: there one
    client may not end it, and they are cut to the largest ones.
    """
    units = net.module_.input_units if isinstance(net.module_, MLP) else None
    kind = input_type(net, np.dtype(np.float64) if units else features.dtype)
    if units is None and np.can_cast(features.dtype, kind):
        return features
    # Without the network: stored rows take this along to workers, who may not know the network's
    # class.
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


def input_type(net: NeuralNet, kind: np.dtype) -> np.dtype:
    """Type of the rows of a batch: the parameters', or integers if an embedding is given them."""
    embeds = any(isinstance(layer, _EMBEDDINGS) for layer in net.module_.modules())
    return np.dtype(np.int64) if embeds and kind.kind in "iu" else parameter_type(net)


def as_targets(net: NeuralNet, y: np.ndarray, private: bool, shape: tuple[int, ...]) -> np.ndarray:
    """Targets in the type that the criterion takes.

    Columns of responses are as outputs of a row, of a `shape`, have them: () if there is one.
    """
    if isinstance(net.module_, MLP):
        y = net.module_.standardized_outputs(y)
    if y.ndim > 1:
        y = y.reshape(len(y), *shape)
    if y.dtype.kind == "f" or isinstance(net, NeuralNetBinaryClassifier):
        return _in_range("y", y, parameter_type(net), private)
    return y.astype(np.int64)


def _in_range(name, values, kind, private):
    """Values as a contiguous array of a floating-point type."""
    largest = np.finfo(kind).max
    if private:  # an error would reveal that some client has such a value
        values = np.clip(values, -largest, largest)
    elif max(-float(values.min(initial=0)), float(values.max(initial=0))) > largest:
        raise ValueError(f"{name} holds values that are too large for the net's type, {kind}.")
    return np.ascontiguousarray(values, dtype=kind)


def parameter_type(net: NeuralNet) -> np.dtype:
    """Type of the trained parameters of an initialized network, as numpy's.

    Raises ValueError if there is none, or not one that numpy has.
    """
    kinds = {values.dtype for values in net.module_.parameters() if values.requires_grad}
    if not kinds:
        raise ValueError("the module of the net has no parameter that can be trained.")
    # Clients' parameters are rows of one array.
    if len(kinds) > 1 or not kinds <= {torch.float16, torch.float32, torch.float64}:
        names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ValueError(
            f"the module of the net has parameters of type {names}; expected one type for all, "
            "float32, float64 or float16: call its method float() or double()."
        )
    return torch.empty(0, dtype=kinds.pop()).numpy().dtype


def columns_for(net: NeuralNet, shape: tuple[int, ...], table: CheckedTable) -> np.ndarray | None:
    """Which outputs, of a `shape`, are those of a table's classes; None: all, or responses.

    Raises ValueError if they, or the criterion, do not go with the table's targets.
    """
    check_outputs(shape, table.n_outputs, net)
    y = np.zeros((2, *table.y.shape[1:]), table.y.dtype)
    check_loss(net, shape, as_targets(net, y, True, shape))
    classes = table.attributes.get("classes_")
    return None if classes is None else outputs_of_classes(net, shape, classes)


def check_outputs(shape: tuple[int, ...], n_outputs: int, net: NeuralNet) -> None:
    """Raise ValueError if a row's output (a shape) does not go with the targets."""
    binary = isinstance(net, NeuralNetBinaryClassifier)
    if binary and n_outputs != 2:
        raise ValueError(f"NeuralNetBinaryClassifier has two classes; y has {n_outputs}.")
    single = binary or (n_outputs == 1 and not is_classifier(net))
    fits = shape == (n_outputs,) * (not binary) or (single and shape == ())
    # A fold may lack a rare class: outputs that no label belongs to do no harm.
    spare = is_classifier(net) and not binary and len(shape) == 1 and shape[0] > n_outputs
    if not (fits or spare):
        raise ValueError(
            f"the module of the net gives an output of shape {shape} for a row; y needs "
            f"{n_outputs} outputs ({'classes' if is_classifier(net) else 'columns'})."
        )


def outputs_of_classes(
    net: NeuralNet, shape: tuple[int, ...], classes: np.ndarray
) -> np.ndarray | None:
    """Which outputs of a row, of a `shape`, are those of the sorted classes; None: all, in order.

    Classes that are listed by the network have the outputs of their places there. If there are more
    outputs than classes, and these are positions among the outputs, they have these.
    """
    if shape == ():
        return None
    (n_outputs,), listed = shape, getattr(net, "classes", None)
    columns = np.arange(len(classes))
    if listed is not None:
        columns = np.argsort(listed)
    elif classes.dtype.kind in "iuf" and np.isin(classes, np.arange(n_outputs)).all():
        columns = classes.astype(np.intp)
    return None if np.array_equal(columns, np.arange(n_outputs)) else columns


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
    """Give a network the parameters and buffers of the network of earlier rounds.

    Raises ValueError if the two have other parameters.
    """
    shapes = [
        {name: tuple(values.shape) for name, values in network.module_.state_dict().items()}
        for network in (net, earlier)
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
        net.classes_inferred_ = np.arange(max(len(classes), *engine.output_shape, 0))
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


def shift_log_probabilities(
    criterion: Any, outputs: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Outputs (..., n_classes) whose log probabilities, up to a constant, are moved by `offsets`.

    Raises ValueError if the criterion does not say what outputs are.
    """
    if isinstance(criterion, torch.nn.CrossEntropyLoss):
        return outputs + offsets
    if isinstance(criterion, torch.nn.NLLLoss):
        return torch.softmax(log_probabilities(criterion, outputs) + offsets, dim=-1)
    if isinstance(criterion, torch.nn.BCEWithLogitsLoss):
        return outputs + (offsets[..., 1] - offsets[..., 0])
    raise unknown_outputs(type(criterion))


def select_outputs(criterion: Any, outputs: torch.Tensor, columns: np.ndarray) -> torch.Tensor:
    """Those outputs (n, n_outputs) that are of classes, as if the network had no others."""
    outputs = outputs[:, columns]
    if isinstance(criterion, torch.nn.NLLLoss):  # of probabilities
        return outputs / outputs.sum(dim=1, keepdim=True).clamp_min(torch.finfo(outputs.dtype).tiny)
    return outputs


def log_probabilities(criterion: Any, outputs: torch.Tensor) -> torch.Tensor:
    """Logarithms (..., n_classes) of the probabilities that outputs (..., n_classes) stand for.

    Raises ValueError if the criterion does not say what outputs are.
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
    """Whether a criterion's class says what a network's outputs are."""
    return issubclass(kind, _READABLE)
