"""Cost of a private selection, planned before any data are read."""

import contextlib
import math
from typing import Any, NamedTuple

from sklearn.base import is_classifier
from sklearn.metrics import get_scorer
from sklearn.model_selection import ParameterGrid
from sklearn.utils import check_consistent_length

from pfl_sklearn._compat import response_methods
from pfl_sklearn._unwrap import core_estimator, is_package_class, path_to_core
from pfl_sklearn.privacy import (
    GaussianEvent,
    GaussianMechanism,
    PrivacyLedger,
    selection_epsilon,
)
from pfl_sklearn.privacy._accounting._calibration import largest_affordable_rate
from pfl_sklearn.privacy._accounting._selection import check_distribution
from pfl_sklearn.privacy._pipeline_report import describe_leak
from pfl_sklearn.privacy._spending import relation_of, stated_cost, unit_of, with_params

# Parameters of a private estimator that the selection sets, or that would break its promise.
_RESERVED = ("epsilon", "noise_multiplier", "delta", "ledger", "checkpoint", "random_state")
# Smallest epsilon of a trial in the search, over the total. If a selection costs too much even
# there (it grows with the log of the number of trials), no useful trial fits.
_SMALLEST_TRIAL_SHARE = 1e-4
_RATES = 1e-4, 50.0  # smallest and largest inverse noise multiplier of a trial
_MOST_CHECKED = 500  # a grid of at most so many candidates is checked completely in advance
_SCORE_RANGES = dict.fromkeys(("accuracy", "balanced_accuracy", "f1", "roc_auc"), (0.0, 1.0))


class SelectionPlan(NamedTuple):
    """Everything about a selection that does not depend on the data."""

    params: dict[str, Any]  # set on the estimator of every trial
    total: float  # epsilon of the whole
    unit: str
    relation: str
    score_range: tuple[float, float] | None
    mechanism: GaussianMechanism | None  # on the sum over clients of scores from 0 to 1
    spending: tuple[Any, ...]  # cost of a trial that releases something
    events: tuple[Any, ...]  # of a trial, including its score
    seed_name: str | None  # parameter that takes a trial's seed


def plan_selection(select):
    """Check the parameters of a selection, or ValueError, and calibrate its trials to the total."""
    check_distribution(select.expected_trials, select.distribution)
    _check_holdout(select)
    core = core_estimator(select.estimator)
    prefix, steps = path_to_core(select.estimator)
    names = _params_by_name(core)
    _check_searched(select, prefix, names)
    seed_name = f"{prefix}random_state" if "random_state" in names else None
    unit, relation, bounds = unit_of(core), relation_of(core), _score_range(select)
    plan = SelectionPlan({}, math.inf, unit, relation, bounds, None, (), (), seed_name)
    if math.isinf(select.epsilon):  # a random search, whose trials keep their own epsilon
        return plan
    _check_private(select, core, steps, names, bounds)
    mechanism = None
    if select.holdout is None:  # public rows need no noise on their scores
        # Clients send scores from 0 to 1, so one of them moves the sum by 1 at most.
        mechanism = GaussianMechanism(1.0, select.score_share * select.epsilon, select.delta)
    # If an estimator takes its noise directly, the search need not calibrate it for each guess.
    by_noise = "noise_multiplier" in names
    point, spending = _costly_point(select, prefix, by_noise, unit, relation)
    params, events, total = _calibrate(select, prefix, by_noise, point, mechanism, relation)
    spending = spending and spending_of(select, {**point, **params}, relation)
    return plan._replace(
        params=params, total=total, mechanism=mechanism, spending=spending, events=events
    )


def client_scoring(select):
    """Name of the score, or the scorer, for one client's rows; it is inside a ClientScorer."""
    default = "accuracy" if is_classifier(select.estimator) else "neg_mean_squared_error"
    return getattr(select.scoring, "scoring", select.scoring) or default


def spending_of(select, params, relation):
    """Cost of a trial with these parameters, in a form that can be compared."""
    return tuple(event.spending(relation) for event in _events_of(select, params))


def distributions_of(select):
    """Dicts of lists and distributions to draw from, with equal probability."""
    spaces = select.param_distributions
    return [spaces] if hasattr(spaces, "items") else list(spaces)


def _check_holdout(select):
    """Refuse an invalid `holdout`, `scoring` or `score_range`."""
    holdout = select.holdout
    if holdout is not None and not (isinstance(holdout, tuple) and len(holdout) in (2, 3)):
        raise ValueError(
            "holdout must be a tuple (X, y) or (X, y, groups) of public rows, or None; got "
            f"{type(holdout).__name__}."
        )
    check_consistent_length(*(holdout or ()))
    get_scorer(select.scoring or client_scoring(select))  # raises if there is no such scorer
    bounds = select.score_range
    if bounds is not None and not (
        len(bounds) == 2 and -math.inf < bounds[0] < bounds[1] < math.inf
    ):
        raise ValueError(
            f"score_range must be a pair of finite numbers (lowest, highest); got {bounds!r}."
        )


def _check_searched(select, prefix, names):
    """Refuse empty lists and parameters that may not be varied."""
    params = select.estimator.get_params()
    for space in distributions_of(select):
        if not hasattr(space, "items"):
            raise ValueError(
                "param_distributions must be a dict of lists and distributions, or a list of such "
                f"dicts; got {select.param_distributions!r}."
            )
        for name, values in space.items():
            if name not in params and not _is_of_named_component(params, name):
                raise ValueError(
                    f"param_distributions names {name!r}, which is no parameter of "
                    f"{type(select.estimator).__name__}."
                )
            if name in {f"{prefix}{reserved}" for reserved in _RESERVED}:
                raise ValueError(
                    f"param_distributions may not contain {name!r}: the selection sets a trial's "
                    "privacy parameters, ledger and seed."
                )
            if not hasattr(values, "rvs") and not (hasattr(values, "__len__") and len(values)):
                raise ValueError(
                    f"param_distributions[{name!r}] must be a list with at least one value or "
                    f"have a method rvs; got {values!r}."
                )
    _check_independent(names)


def _is_of_named_component(params, name):
    """Whether this is a parameter of a component that is given as a string or None."""
    # ``set_params`` creates the component and refuses unknown parameters.
    outer = name.rpartition("__")[0]
    return outer in params and (params[outer] is None or isinstance(params[outer], str))


def _params_by_name(core):
    """Parameters of the private estimator by name."""
    return core.get_params(deep=False) if hasattr(core, "get_params") else {}


def _check_independent(names):
    """Refuse parameters that make a trial depend on other trials or fits."""
    if names.get("ledger") is not None:
        raise ValueError(
            "ledger of the estimator would count every trial; give it to PrivateSelectCV, which "
            "writes one entry for all of them."
        )
    if names.get("checkpoint") is not None:
        raise ValueError(
            "checkpoint of the estimator must be None, or a trial would continue another one; "
            f"got {names['checkpoint']!r}."
        )


def check_candidate(select, params):
    """Refuse, at a finite epsilon, a trial that could not be run or would reveal others.

    Raises ValueError if ``fit`` would refuse the parameters, and if the estimator has callbacks,
    because they would see all trials.
    """
    model = with_params(select.estimator, params)
    nested = [model, *model.get_params().values()]  # at any depth
    if any(getattr(value, "_skl_callbacks", None) for value in nested):
        raise ValueError(
            "callbacks of the estimator would see all trials and could stop them, which no "
            f"epsilon covers; remove them with set_callbacks(); got epsilon={select.epsilon!r}."
        )
    methods = response_methods(get_scorer(client_scoring(select)))
    if methods and not any(hasattr(model, method) for method in methods):
        raise ValueError(
            f"scoring={client_scoring(select)!r} needs {' or '.join(methods)}, which "
            f"{type(model).__name__} does not have."
        )
    core = core_estimator(model)
    _check_independent(_params_by_name(core))
    # Our fits refuse parameters before they are charged, so we run them up to there: an error of
    # one drawn trial would reveal something about the others. Other packages' fits may read data
    # first.
    if is_package_class(core) and hasattr(core, "ledger"):
        with contextlib.suppress(_ParametersAccepted, ArithmeticError):
            core.set_params(ledger=_StoppingLedger()).fit(None, None)


class _ParametersAccepted(Exception):
    """Raised when a fit would be charged."""


class _StoppingLedger(PrivacyLedger):
    """Ends a fit when it is charged: after it checks its parameters, before it reads data."""

    def __init__(self):
        pass

    def spend(self, *args, **kwargs):
        raise _ParametersAccepted


def _check_private(select, core, steps, names, bounds):
    """Refuse, at a finite epsilon, a selection that cannot keep it."""
    # An estimator that does not state its cost as events cannot be calibrated.
    if not hasattr(core, "_privacy_events") or not {"epsilon", "delta"} <= set(names):
        raise ValueError(
            f"{type(core).__name__} has no parameters epsilon and delta for a selection to set, so "
            f"epsilon must be inf; got epsilon={select.epsilon!r}."
        )
    for name, step in steps:
        if leak := describe_leak(name, step):
            raise ValueError(
                f"{leak}: no epsilon covers that; got epsilon={select.epsilon!r}. Use your own "
                "constants."
            )
    if select.delta == 0:  # Renyi divergences give an epsilon only for delta above 0
        raise ValueError("delta must be above 0 when epsilon is finite; got 0.")
    if select.holdout is None and bounds is None:
        raise ValueError(
            "scores of the clients' own rows need bounds: give score_range=(lowest, highest), not "
            f"taken from the data, for scoring={client_scoring(select)!r}, or holdout=(X, y) with "
            "public rows."
        )
    if select.holdout is None and relation_of(core) == "add_remove":
        raise ValueError(
            "relation='add_remove' needs holdout=(X, y) with public rows: the number of clients "
            "divides a score of the clients' own rows, and one more row changes which are held out."
        )


def _score_range(select):
    """Range of a client's score, given or implied by the metric, or None."""
    if select.score_range is not None:
        return tuple(float(bound) for bound in select.score_range)
    scoring = client_scoring(select)
    return _SCORE_RANGES.get(scoring) if isinstance(scoring, str) else None


def _events_of(select, params):
    """Accounting events of one trial."""
    stated = stated_cost(with_params(select.estimator, params))
    if stated.events is None or stated.n_fits > 1:
        reason = stated.reason or "a trial fits several times"
        raise ValueError(
            f"{reason}, whatever epsilon a trial is given, so epsilon of the selection must be "
            f"inf; got {select.epsilon!r}."
        )
    return stated.events


def _settings(select, prefix, by_noise, rate):
    """Parameters of a trial; a larger `rate` lets it spend more."""
    if by_noise:
        values = {"epsilon": math.inf, "noise_multiplier": 1 / rate, "delta": select.delta}
    else:
        values = {"epsilon": rate, "delta": select.delta}
    return {f"{prefix}{name}": value for name, value in values.items()}


def _rates(select, by_noise):
    """Smallest and largest rate between which that of a trial is searched."""
    return _RATES if by_noise else (_SMALLEST_TRIAL_SHARE * select.epsilon, select.epsilon)


def _costly_point(select, prefix, by_noise, unit, relation):
    """A candidate that releases something, and what it spends.

    All candidates must cost the same, or nothing.
    """
    fixed = _settings(select, prefix, by_noise, _rates(select, by_noise)[1])
    costly, cost = None, ()
    for point in _points(select):
        check_candidate(select, {**point, **fixed})
        core = core_estimator(with_params(select.estimator, point))
        spending = spending_of(select, {**point, **fixed}, relation)
        # The accounting assumes equal trials: the best one must not reveal what was spent.
        differs = (unit_of(core), relation_of(core)) != (unit, relation)
        if differs or (spending and costly is not None and spending != cost):
            raise different_costs(point)
        if spending and costly is None:
            costly, cost = point, spending
    return costly or next(iter(_points(select))), cost


def different_costs(point):
    """Error for a candidate that does not spend what the others do."""
    shown = ", ".join(f"{name}={value!r}" for name, value in point.items())
    return ValueError(
        "all candidates must spend the same, so param_distributions may not vary parameters that "
        f"change the cost (numbers of rounds, sampling, units); got {shown}."
    )


def _points(select):
    """All candidates by their listed values, with one value drawn from each distribution."""
    # A large grid gives only the first candidate, and those that differ from it in one value.
    for space in distributions_of(select):
        listed = {
            name: [values.rvs(random_state=0)] if hasattr(values, "rvs") else list(values)
            for name, values in space.items()
        }
        if len(grid := ParameterGrid(listed)) <= _MOST_CHECKED:
            yield from grid
            continue
        first = {name: values[0] for name, values in listed.items()}
        yield first
        for name, values in listed.items():
            yield from ({**first, name: value} for value in values[1:])


def _calibrate(select, prefix, by_noise, point, mechanism, relation):
    """Parameters of a trial within the total, its events, and the cost of the whole."""
    scores: tuple[GaussianEvent, ...] = ()
    if mechanism is not None:  # one client changes the sum by at most 1 under both relations
        mu = 1 / mechanism.noise_std
        scores = (GaussianEvent(None, mu, mu_zero_out=mu),)

    def events(rate):
        params = {**point, **_settings(select, prefix, by_noise, rate)}
        return (*_events_of(select, params), *scores)

    def spent(rate):
        return epsilon_of_trials(select, events(rate), relation)

    low, high = _rates(select, by_noise)
    guess = 1.0 if by_noise else 0.4 * select.epsilon  # only a starting value
    rate = largest_affordable_rate(select.epsilon, spent, low, high, guess)
    # The accounting needs Renyi divergences (Papernot and Steinke, 2022).
    if rate is None and math.isinf(spent(low)):
        raise ValueError(
            f"the Renyi divergence of a trial has no bound ({relation}), so the best of several "
            f"cannot keep epsilon={select.epsilon!r}. Use mechanism='gaussian' instead "
            "of 'discrete_gaussian'."
        )
    if rate is None:
        raise ValueError(
            f"epsilon={select.epsilon!r} is too small for expected_trials="
            f"{select.expected_trials!r} ({select.distribution}) at delta={select.delta!r}: even "
            f"trials that spend almost nothing cost {spent(low):.4g} together ({relation})."
        )
    return _settings(select, prefix, by_noise, rate), events(rate), spent(rate)


def epsilon_of_trials(select, events, relation):
    """Epsilon of all trials together, from the events of one."""
    return selection_epsilon(
        events,
        expected_trials=select.expected_trials,
        distribution=select.distribution,
        delta=select.delta,
        relation=relation,
    )
