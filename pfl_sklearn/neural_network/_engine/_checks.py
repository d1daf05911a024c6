"""Checks of a skorch net: settings that rounds cannot use are refused before data are read."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from operator import not_
from typing import Any, TypeAlias

import numpy as np
import torch
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import EarlyStopping, GradientNormClipping, LRScheduler, lr_scheduler
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _WeightedLoss
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pfl_sklearn.neural_network._engine._mlp import MLP
from pfl_sklearn.neural_network._engine._probe import why_not_one_row
from pfl_sklearn.neural_network._engine._recipe import (
    WITHOUT,
    first_line,
    initialized,
    is_mean,
    is_readable,
    reads_plainly,
    unknown_outputs,
    without_names,
)

# skorch runs these in its own loop; rounds have another, so an override would silently do nothing.
_NOT_CALLED = ["train_step", "train_step_single", "run_single_epoch", "fit_loop"]
_NOT_CALLED += ["evaluation_step", "predict_proba"]
_WEIGHTED = (_WeightedLoss, torch.nn.BCEWithLogitsLoss)
_SHOWN_OPTION = 60  # characters of a value in a message: modules print a page
_NO_EFFECT = "has no effect on rounds, so it is refused; leave its default"
_UNUSED = ["max_epochs", "verbose", "train_split", "warm_start", "compile", "dataset"]
_UNUSED += ["iterator_train", "iterator_valid", "threshold"]  # the last one of binary networks


# An option's name, which values rounds accept, and what to do instead. A name that ends with "__"
# stands for all options that begin with it.
Option: TypeAlias = tuple[str, Callable[[Any], bool], str]


def _never(value: Any) -> bool:
    return False


def _is_rate(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


def _is_size(value: Any) -> bool:
    number = isinstance(value, Integral) and not isinstance(value, bool)
    return number and (value >= 1 or value == -1)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, str | torch.device) and bool(torch.device(value))
    except RuntimeError:  # whose text lists all devices
        return False


def _is_here(device: Any) -> bool:
    # torch raises if this machine lacks it, or it lacks the double precision of predictions.
    return torch.zeros(1, dtype=torch.float64, device=device).cpu() is not None


def _are_labels(value: Any) -> bool:
    return value is None or len(set(value)) == len(value) >= 2


def _is_followed(callback: Any) -> bool:
    # Rounds clip by themselves, so a subclass with a clip of its own would silently do nothing.
    return isinstance(callback, LRScheduler) or type(callback) is GradientNormClipping


def _is_known(policy: Any) -> bool:
    return not isinstance(policy, str) or hasattr(lr_scheduler, policy)


def _is_order(value: Any) -> bool:
    return isinstance(value, Real) and float(value) > 0


def _is_bound(value: Any) -> bool:
    return value is None or _is_order(value)


def _is_tensor(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)


_BY_SCORE = ("ReduceLROnPlateau", ReduceLROnPlateau)
_NO_SCORE = "follows a score, and rounds have none; give one that depends on the round alone"
_NO_NAME = (
    "is no scheduler that skorch has by this name; give its class of torch.optim.lr_scheduler"
)
_ONCE_A_ROUND = "is not followed: it is stepped once a round; leave 'epoch', and count in rounds"
_DEVICE = "must be a torch.device or the name of one, such as 'cpu' or 'cuda'"
_OPTIMIZER = "must be a class of torch.optim, such as torch.optim.SGD"
_SEVERAL = "computes the loss several times in a step; give torch.optim.SGD or torch.optim.Adam"
_SPARSE = "takes sparse gradients only; give torch.optim.SGD or torch.optim.Adam"
_OWN_GRADIENTS = "is not used: the method takes its own gradient steps; give torch.optim.SGD"
_TENSOR_WEIGHTS = "must be a tensor, such as torch.tensor([1.0, 2.0]), with classes in sorted order"
_SCHEDULER = (
    "is not called by rounds, which follow LRScheduler and GradientNormClipping alone; "
    "set_callbacks of the estimator takes scikit-learn's callbacks"
)
_STOPS = (
    "ends no rounds: its scores are of rows that one machine holds; give ClientMonitor(X, y, "
    "groups, scoring=..., patience=...), from pfl_sklearn.metrics, to set_callbacks of the "
    "estimator, or n_rounds=None"
)
_NOT_PLAIN = (
    "is no plain gradient step, for which noise='per_step' is certified; give torch.optim.SGD "
    "without momentum, or use noise='per_round'"
)
_CLIPS_BY_ITSELF = (
    "is not used with noise='per_step', which clips every gradient to clip_norm; leave it out"
)
_WOULD_START_ALIKE = (
    "is an instance, from which all components would start alike and never differ; give the "
    "module's class, or n_components=1"
)
_MIXED = "would mix gradients of clients' adapted nets with those of the global one; leave it out"

# What rounds refuse in any network and, by a name, in a network for some methods or criteria alone.
# A later row may rely on an earlier one: an optimizer is a class before it is a subclass.
_OPTIONS: dict[str, tuple[Option, ...]] = {
    "any net": (
        ("iterator_train__", _never, _NO_EFFECT),
        ("iterator_valid__", _never, _NO_EFFECT),
        ("dataset__", _never, _NO_EFFECT),
        ("optimizer__param_groups", _never, _NO_EFFECT),
        ("optimizer__maximize", not_, "would raise the loss; leave it out"),
        ("callbacks", lambda value: not isinstance(value, EarlyStopping), _STOPS),
        ("callbacks", _is_followed, _SCHEDULER),
        ("callbacks__gradient_clip_value", _is_bound, "must be above 0, or None for no clip"),
        ("callbacks__gradient_clip_norm_type", _is_order, "must be above 0, such as 2 or inf"),
        ("callbacks__policy", lambda value: value not in _BY_SCORE, _NO_SCORE),
        ("callbacks__policy", _is_known, _NO_NAME),
        ("callbacks__step_every", lambda value: value == "epoch", _ONCE_A_ROUND),
        ("device", _is_device, _DEVICE),
        ("device", _is_here, "cannot be used on this machine"),
        ("classes", _are_labels, "must be None or a list of two or more labels, each once"),
        ("lr", _is_rate, "must be a finite number that is not negative"),
        ("optimizer__lr", _is_rate, "must be a finite number that is not negative"),
        ("batch_size", _is_size, "must be a whole number above 0, or -1 for all rows of a client"),
        ("optimizer", lambda value: isinstance(value, type), _OPTIMIZER),
        ("optimizer", lambda kind: issubclass(kind, torch.optim.Optimizer), _OPTIMIZER),
        ("optimizer", lambda kind: not issubclass(kind, torch.optim.LBFGS), _SEVERAL),
        ("optimizer", lambda kind: not issubclass(kind, torch.optim.SparseAdam), _SPARSE),
    ),
    # If the criterion is torch's: one of the user's may take anything under these names.
    "class weights": (
        ("criterion__weight", _is_tensor, _TENSOR_WEIGHTS),
        ("criterion__pos_weight", _is_tensor, _TENSOR_WEIGHTS),
    ),
    # Methods that update parameters by themselves take no steps of the network's optimizer.
    "own steps": (("optimizer", lambda kind: issubclass(kind, torch.optim.SGD), _OWN_GRADIENTS),),
    # Momentum carries a gradient on into steps in which it is not clipped.
    "plain steps": (
        ("optimizer", lambda kind: kind is torch.optim.SGD, _NOT_PLAIN),
        ("optimizer__momentum", not_, _NOT_PLAIN),
        ("callbacks", lambda value: type(value) is not GradientNormClipping, _CLIPS_BY_ITSELF),
    ),
    "no momentum": (("optimizer__momentum", not_, _MIXED),),
    "draws": (
        ("module", lambda value: not isinstance(value, torch.nn.Module), _WOULD_START_ALIKE),
    ),
}


def check_options(recipe: NeuralNet, rows: str) -> None:
    """Raise ValueError if some rows of the table of options do not accept a value of a network."""
    values = list(_option_values(recipe))
    for option, accepts, advice in _OPTIONS[rows]:
        for name, value in values:
            if name != option and not (option.endswith("__") and name.startswith(option)):
                continue
            reason = ""
            try:
                if accepts(value):
                    continue
            except NotImplementedError:  # whose text lists kernels
                reason = ": this build of torch has no kernels for it"
            # Without support for CUDA an AssertionError, without double precision a TypeError.
            except (RuntimeError, AssertionError, TypeError) as error:
                reason = f": {first_line(error).rstrip('.')}"
            raise ValueError(f"{name}={_option_text(value)} of the net {advice}{reason}.")


def _option_values(recipe: NeuralNet) -> Iterator[tuple[str, Any]]:
    """Names and values of what was given to a network, callbacks one by one."""
    params = recipe.get_params(deep=False)
    callbacks = params.pop("callbacks", None)
    yield from params.items()
    for callback in () if callbacks in (None, "disable") else without_names(callbacks):
        yield "callbacks", callback
        if isinstance(callback, LRScheduler):
            yield "callbacks__policy", callback.policy
            yield "callbacks__step_every", callback.step_every
        if isinstance(callback, GradientNormClipping):
            yield "callbacks__gradient_clip_value", callback.gradient_clip_value
            yield "callbacks__gradient_clip_norm_type", callback.gradient_clip_norm_type


def _option_text(value: Any) -> str:
    """Short text of a value: a class by its name, a long value by the name of its class."""
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= _SHOWN_OPTION else type(value).__name__


def _check_defaults(recipe: NeuralNet) -> None:
    """Raise ValueError if an option without effect has neither its default nor what rounds use."""
    params = recipe.get_params(deep=False)
    for name in params.keys() & set(_UNUSED):
        value, default = params[name], _default(recipe, name)
        if not (_same(value, default) or _same(value, WITHOUT.get(name, default))):
            raise ValueError(f"{name}={_option_text(value)} of the net {_NO_EFFECT}.")


def _default(recipe: NeuralNet, name: str) -> Any:
    """Default of a parameter in the signatures of a network's class and its bases."""
    for kind in type(recipe).__mro__:
        init = vars(kind).get("__init__")
        parameter = init and inspect.signature(init).parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty:
            return parameter.default
    return None


def _same(value: Any, default: Any) -> bool:
    """Whether two values are equal, or one is a copy of the other: clones copy the defaults."""
    if type(value) is not type(default):
        return isinstance(value, bool) and isinstance(default, int) and value == default
    return bool(value == default) or (hasattr(value, "__dict__") and vars(value) == vars(default))


def check_recipe(recipe: Any, for_classifier: bool, own_steps: bool, name: str) -> None:
    """Raise ValueError if an estimator cannot follow a recipe, which its parameter `name` holds.

    With `own_steps` the method updates parameters by itself, which only plain gradient steps allow.
    """
    kind = "NeuralNetClassifier" if for_classifier else "NeuralNetRegressor"
    if not isinstance(recipe, NeuralNet):
        raise ValueError(
            f"{name} must be a skorch net, such as skorch.{kind}(MyModule); got {recipe!r}."
        )
    other = (
        NeuralNetRegressor if for_classifier else NeuralNetClassifier | NeuralNetBinaryClassifier
    )
    if isinstance(recipe, other):
        raise ValueError(f"{name} must be a skorch.{kind}; got {type(recipe).__name__}.")
    if getattr(recipe, "initialized_", False):
        raise ValueError(
            f"{name} is a net that was initialized or fitted before, but it must be a recipe: "
            "its weights would not be used. Give a new net. To start from certain weights, pass a "
            "module instance that has them."
        )
    for method in _NOT_CALLED:
        if not getattr(type(recipe), method).__module__.startswith("skorch."):
            raise ValueError(
                f"{type(recipe).__name__} has a {method} of its own, which rounds do not call; "
                "override get_loss or infer, or put it into the module or the criterion."
            )
    _check_defaults(recipe)
    check_options(recipe, "any net")
    if own_steps:
        check_options(recipe, "own steps")
    if issubclass(_class_of(recipe.criterion), _WEIGHTED):
        check_options(recipe, "class weights")
    if isinstance(recipe, NeuralNetBinaryClassifier):  # not even predict knows how to read others
        check_readable(recipe)


def check_probabilities(recipe: NeuralNet) -> None:
    """Raise ValueError if the criterion does not say what a network's outputs are."""
    if not is_readable(_class_of(recipe.criterion)):
        raise unknown_outputs(_class_of(recipe.criterion))


def check_readable(recipe: NeuralNet) -> None:
    """Raise ValueError if nothing says how probabilities are read off a network's outputs."""
    how = recipe.predict_nonlinearity
    by_criterion = isinstance(how, str) and how == "auto"
    # With BCELoss skorch takes the outputs for probabilities as they are.
    if by_criterion and not issubclass(_class_of(recipe.criterion), torch.nn.BCELoss):
        check_probabilities(recipe)


def _class_of(criterion: Any) -> type:
    """Class of a criterion, which may be given as one."""
    return criterion if isinstance(criterion, type) else type(criterion)


def check_no_statistics(recipe: NeuralNet) -> None:
    """Raise ValueError if the module keeps statistics of rows, which noise does not cover."""
    if recipe.module is MLP:
        return  # it keeps none, and may still lack its sizes
    net = initialized(recipe, 0)
    for layer in net.module_.modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            raise ValueError(
                f"the module of the net has {type(layer).__name__}, whose running statistics are "
                "means of the clients' rows: without noise they would leak, and with "
                "it they are of no use. Use torch.nn.GroupNorm or LayerNorm, or fit without noise."
            )


def check_layers(recipe: NeuralNet, names: Sequence[str]) -> None:
    """Raise ValueError if the module has no such layers; those of the default net depend on X."""
    if recipe.module is not MLP:
        trained = [name for name, _ in initialized(recipe, 0).module_.named_parameters()]
        parameters_in(names, trained)


def parameters_in(names: Sequence[str], known: Sequence[str]) -> tuple[list[str], bool]:
    """Names, among the `known` ones, of parameters in layers, and whether "last" is no such layer.

    It then stands for the last one, whichever this is.

    Raises ValueError if a layer has no parameter.
    """
    chosen, last = [], False
    for name in names:
        # With the dot, layer "1" does not take the parameters of layer "10".
        matches = [parameter for parameter in known if f"{parameter}.".startswith(f"{name}.")]
        last |= name == "last" and not matches
        if not matches and name != "last":
            raise ValueError(
                f"personal_layers has {name!r}, which is no trained layer or parameter of the "
                f"module; its parameters are {', '.join(known)}."
            )
        chosen += matches
    return chosen, last


def check_losses_of_rows(recipe: NeuralNet) -> None:
    """Raise ValueError if a recipe's loss is not known to be a mean of losses of rows."""
    net = initialized(recipe, 0)
    if not (reads_plainly(net) and is_mean(net.criterion_)):
        raise ValueError(
            f"criterion={type(net.criterion_).__name__} of the net is not known to be a mean of "
            "losses of rows, which every component weighs by itself; give CrossEntropyLoss, "
            "NLLLoss, MSELoss or L1Loss, with reduction='mean' and without class weights."
        )


def check_is_table(X: Any) -> None:
    """Raise ValueError if rows are given as a torch data set, or as dicts."""
    if isinstance(X, list | tuple) and X and isinstance(X[0], Mapping):
        raise ValueError(
            f"rows of X are of type {type(X[0]).__name__}; expected one array (n_rows, ...)."
        )
    if isinstance(X, torch.utils.data.Dataset):
        raise ValueError(
            f"X is a torch data set ({type(X).__name__}); expected an array (n_rows, ...). If it "
            "holds pairs, give X=numpy.stack([x for x, _ in dataset]) and "
            "y=numpy.array([y for _, y in dataset])."
        )


def check_same_outputs(client: Any, population: Any) -> None:
    """Raise ValueError if two engines' networks have outputs of other numbers of classes."""
    # One logit stands for two classes.
    shapes = [engine.output_shape or (2,) for engine in (client, population)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the net of estimator has outputs of shape {shapes[0]} and that of global_estimator "
            f"of shape {shapes[1]}; give both the same."
        )


def check_single_rows(engines: Any, ids: Any, codes: Any, batch_size: Any, private: bool) -> None:
    """Raise ValueError if a client has batches of one row, and a network cannot be trained on them.

    In a `private` fit any client may have: how many rows they have is not looked at.
    """
    who = _owners_of_single_rows(ids, codes, batch_size, private)
    if who is None:
        return
    for engine in engines.trained:
        reason = why_not_one_row(engine.net, engine.example)
        if reason:
            raise ValueError(
                f"{who}, and the module of the net cannot be trained on one row (torch says: "
                f"{reason}). Use torch.nn.GroupNorm or LayerNorm rather than BatchNorm"
                f"{'' if private else ', or larger batches of clients with more rows'}."
            )


def _owners_of_single_rows(ids, codes, batch_size, private):
    """Clients with batches of one row, as the subject of a message; None if there are none."""
    if private:
        return "with noise, any client may have one row"
    if batch_size == 1:
        return "batch_size is 1"
    single = ids[np.bincount(codes) == 1]
    if len(single) > 1:
        return f"{len(single)} clients, the first of them {single[0]}, have one row to train on"
    return f"client {single[0]} has one row to train on" if len(single) else None
