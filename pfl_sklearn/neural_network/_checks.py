"""What rounds refuse in a skorch net, before any data are touched."""

import inspect
import math
from numbers import Integral, Real

import torch
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import LRScheduler
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _WeightedLoss

from pfl_sklearn.neural_network._mlp import MLP
from pfl_sklearn.neural_network._recipe import (
    WITHOUT,
    bare,
    initialized,
    is_mean,
    is_readable,
    reads_plainly,
    unknown_outputs,
)

_UNUSED = ("max_epochs", "verbose", "train_split", "warm_start", "compile", "dataset")
_UNUSED += ("iterator_train", "iterator_valid", "threshold")  # the last one of binary nets
_ITERATORS = ("iterator_train__", "iterator_valid__", "dataset__", "optimizer__param_groups")
_NOT_CALLED = ("train_step", "train_step_single", "run_single_epoch", "fit_loop")
_NOT_CALLED += ("evaluation_step", "predict_proba")
_OTHER_STEPS = {
    torch.optim.LBFGS: "computes the loss several times in a step",
    torch.optim.SparseAdam: "takes sparse gradients only",
}
_CLASS_WEIGHTS = ("criterion__weight", "criterion__pos_weight")
_WEIGHTED = (_WeightedLoss, torch.nn.BCEWithLogitsLoss)


class NoLastLayer(ValueError):
    """The module of a net does not end with a linear layer."""


def check_recipe(recipe, for_classifier, own_steps, name):
    """Raise ValueError if an estimator cannot follow a recipe.

    Parameters
    ----------
    recipe : object
    for_classifier : bool
    own_steps : bool
        Whether the method updates parameters by itself, which only plain gradient steps allow.
    name : str
        Parameter that holds it.
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
    _check_methods(recipe)
    _check_unused(recipe)
    _check_callbacks(recipe)
    _check_device(recipe)
    _check_numbers(recipe)
    _check_optimizer(recipe, own_steps)
    _check_class_weights(recipe)
    if isinstance(recipe, NeuralNetBinaryClassifier):  # not even predict knows how to read others
        check_readable(recipe)


def _check_methods(recipe):
    """Raise ValueError if the net's class has a training or a prediction of its own."""
    kind = type(recipe)
    for name in _NOT_CALLED:
        if not getattr(kind, name).__module__.startswith("skorch."):
            raise ValueError(
                f"{kind.__name__} has a {name} of its own, which rounds do not call; override "
                "get_loss or infer, or put it into the module or the criterion."
            )


def _check_unused(recipe):
    """Raise ValueError if a parameter that rounds have no use for was set."""
    given = recipe.get_params(deep=False)
    for name in given.keys() & set(_UNUSED):
        value, default = given[name], _default(recipe, name)
        if not (_same(value, default) or (name in WITHOUT and _same(value, WITHOUT[name]))):
            raise ValueError(
                f"{name}={value!r} of the net has no effect on rounds, so it is refused; leave its "
                "default."
            )
    for name in given:
        if name.startswith(_ITERATORS):
            raise ValueError(f"{name} of the net has no effect on rounds, so it is refused.")
    if given.get("optimizer__maximize", False):
        raise ValueError("optimizer__maximize=True of the net would raise the loss; leave it out.")


def _default(recipe, name):
    """Default of a parameter in the signatures of a net's class."""
    for kind in type(recipe).__mro__:
        if not inspect.isfunction(kind.__init__):  # a text to parse, of object
            continue
        found = inspect.signature(kind.__init__).parameters.get(name)
        if found is not None and found.default is not found.empty:
            return found.default
    return None


def _same(value, default):
    """Whether a parameter has its default value; copies of an object are the same."""
    if type(value) is not type(default):
        return False
    if value is default or isinstance(value, str | int | float | bool):
        return bool(value == default)
    return hasattr(value, "__dict__") and vars(value) == vars(default)


def _check_callbacks(recipe):
    callbacks = recipe.callbacks
    if callbacks is None or (isinstance(callbacks, str) and callbacks == "disable"):
        return
    for callback in bare(callbacks):
        if not isinstance(callback, LRScheduler):
            raise ValueError(
                f"callbacks of the net holds {type(callback).__name__}, which rounds do not call; "
                "LRScheduler is the only one that they follow, and scikit-learn's callbacks go on "
                "the estimator itself (set_callbacks)."
            )
        if callback.policy in ("ReduceLROnPlateau", torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "the LRScheduler of the net has policy='ReduceLROnPlateau', which follows a score; "
                "rounds have none. Give a policy that depends on the number of rounds alone."
            )
        if callback.step_every != "epoch":
            raise ValueError(
                f"the LRScheduler of the net has step_every={callback.step_every!r}, but it is "
                "stepped once a round; leave the default, 'epoch', and count its steps in rounds."
            )


def _check_device(recipe):
    if not isinstance(recipe.device, str | torch.device):
        raise ValueError(
            f"device={recipe.device!r} of the net must be the name of a device, such as 'cpu' or "
            "'cuda', or a torch.device."
        )
    try:
        torch.empty(0, device=recipe.device)
    except (RuntimeError, AssertionError) as error:  # the latter without support for CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={recipe.device!r} of the net cannot be used: {reason}") from error


def _check_numbers(recipe):
    """Raise ValueError if the learning rate or the size of a batch is out of range."""
    given = recipe.get_params(deep=False)
    for name in ("lr", "optimizer__lr"):
        rate = given.get(name, 0.0)
        if not _is_number(rate, Real) or not 0 <= rate < math.inf:
            raise ValueError(
                f"{name}={rate!r} of the net must be a finite number that is not negative."
            )
    size = recipe.batch_size
    if not _is_number(size, Integral) or (size < 1 and size != -1):
        raise ValueError(
            f"batch_size={size!r} of the net must be a whole number above 0, or -1 for all rows of "
            "a client."
        )


def _is_number(value, kind):
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_optimizer(recipe, own_steps):
    optimizer = recipe.optimizer
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer={optimizer!r} of the net must be a class of torch.optim, such as "
            "torch.optim.SGD."
        )
    if own_steps and not issubclass(optimizer, torch.optim.SGD):
        raise ValueError(
            f"optimizer={optimizer.__name__} of the net is not used: this method takes its "
            "own gradient steps. Give torch.optim.SGD."
        )
    for kind, what in _OTHER_STEPS.items():
        if issubclass(optimizer, kind):
            raise ValueError(
                f"optimizer={optimizer.__name__} of the net {what}, which rounds do not do; give "
                "torch.optim.SGD or torch.optim.Adam."
            )


def _check_class_weights(recipe):
    """Raise ValueError if weights of a criterion of torch are no tensor."""
    if not issubclass(_kind_of(recipe.criterion), _WEIGHTED):
        return
    given = recipe.get_params(deep=False)
    for name in _CLASS_WEIGHTS:
        value = given.get(name)
        if not (value is None or isinstance(value, torch.Tensor)):
            raise ValueError(
                f"{name} of the net must be a tensor, such as torch.tensor([1.0, 2.0]), with "
                f"classes in sorted order; got {value!r}."
            )


def check_probabilities(recipe):
    """Raise ValueError if the criterion does not say what a net's outputs are."""
    if not is_readable(_kind_of(recipe.criterion)):
        raise unknown_outputs(_kind_of(recipe.criterion))


def check_readable(recipe):
    """Raise ValueError if nothing says how probabilities are read off a net's outputs."""
    how = recipe.predict_nonlinearity
    by_criterion = isinstance(how, str) and how == "auto"
    if by_criterion and not issubclass(_kind_of(recipe.criterion), torch.nn.BCELoss):
        check_probabilities(recipe)


def _kind_of(criterion):
    """Class of a criterion, which may be given as one."""
    return criterion if isinstance(criterion, type) else type(criterion)


def check_no_statistics(recipe):
    """Raise ValueError if the module keeps statistics of rows, which noise does not cover."""
    if recipe.module is MLP:
        return
    net = initialized(recipe, 0)
    for layer in net.module_.modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            raise ValueError(
                f"the module of the net has {type(layer).__name__}, whose running statistics are "
                "means of the clients' rows: without noise they would leak, and with "
                "it they are of no use. Use torch.nn.GroupNorm or LayerNorm, or fit without noise."
            )


def check_plain_steps(recipe):
    """Raise ValueError if a step of the net may add up gradients of several."""
    momentum = recipe.get_params().get("optimizer__momentum", 0.0)
    if recipe.optimizer is not torch.optim.SGD or momentum:
        raise ValueError(
            "noise='per_step' is certified for plain gradient steps; the net has "
            f"optimizer={recipe.optimizer.__name__} with momentum={momentum!r}. Give "
            "torch.optim.SGD without momentum, or use noise='per_round'."
        )


def check_layers(recipe, names):
    """Raise ValueError if the module has no such layers; those of the default net depend on X."""
    if recipe.module is not MLP:
        known = [name for name, _ in initialized(recipe, 0).module_.named_parameters()]
        last = stands_for_last(names, known)
        parameters_in([name for name in names if not last or name != "last"], known)


def stands_for_last(names, known):
    """Whether "last" among names means the last layer, since no parameter's name begins so."""
    return "last" in names and not any(f"{each}.".startswith("last.") for each in known)


def parameters_in(names, known):
    """Those of the known parameters' names that belong to layers, or parameters, with some names.

    Raises
    ------
    ValueError
        If there is none with a name.
    """
    found = []
    for name in names:
        own = [each for each in known if f"{each}.".startswith(f"{name}.")]
        if not own:
            raise ValueError(
                f"personal_layers has {name!r}, which is no trained layer or parameter of the "
                f"module; its parameters are {', '.join(known)}."
            )
        found += own
    return found


def check_no_momentum(recipe):
    """Raise ValueError if a step of the net would remember gradients of other nets."""
    momentum = recipe.get_params().get("optimizer__momentum", 0.0)
    if momentum:
        raise ValueError(
            f"optimizer__momentum={momentum!r} of the net would mix the gradients of clients' "
            "adapted nets with those of the global one; leave it out."
        )


def check_losses_of_rows(recipe):
    """Raise ValueError if a recipe's loss is not known to be a mean of losses of rows."""
    net = initialized(recipe, 0)
    if not (reads_plainly(net) and is_mean(net.criterion_)):
        raise ValueError(
            f"criterion={type(net.criterion_).__name__} of the net is not known to be a mean of "
            "losses of rows, which every component weighs by itself; give CrossEntropyLoss, "
            "NLLLoss, MSELoss or L1Loss, with reduction='mean' and without class weights."
        )


def check_draws(recipe):
    """Raise ValueError if a recipe gives the same weights every time."""
    if isinstance(recipe.module, torch.nn.Module):
        raise ValueError(
            "module of the net is an instance, from which all components would start alike and "
            "never differ; give the module's class, or n_components=1."
        )


def n_components_for(given, n_clients, n_before):
    """Number of components: the one given, or that of the rounds before, or two of two clients.

    Raises
    ------
    ValueError
        If there are more components than clients, or the rounds before had another number.
    """
    if given is None:
        return min(2, n_clients) if n_before is None else n_before
    if given > n_clients:
        raise ValueError(
            f"n_components={given} is more than the number of clients, {n_clients}; expected at "
            "most one component for each client."
        )
    if n_before not in (None, given):
        raise ValueError(
            f"the rounds before had {n_before} components, and these would have {given}; fit anew."
        )
    return given
