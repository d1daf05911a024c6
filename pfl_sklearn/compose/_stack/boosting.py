"""Default base estimators of stacks: boosted trees of three libraries."""

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from sklearn.base import clone

from pfl_sklearn.compose._client_feature import ClientAsFeature
from pfl_sklearn.compose._stack.residual import ResidualRegressor
from pfl_sklearn.linear_model import PersonalizedLinearRegression


class _ForTwoClasses(int):
    """Number of iterations for two classes, which more of them divide among themselves.

    A number that a user gives is a plain int, even the same one, and is not divided.
    Each of several classes has trees of its own. In 7 tables of 3 to 6 classes half of the
    iterations changed losses of new clients by -12 to +3 %, in the median by -6 %.
    """


class _Boosting(NamedTuple):
    name: str  # first part of the names of base estimators
    module: str
    class_name: str  # without "Regressor" or "Classifier"
    params: dict[str, Any]
    # Of the trees without clients, which serve new clients: large trees memorize known ones. Small
    # trees had 10 % lower losses for new clients, out of fold, in 8 small tables.
    small: dict[str, Any]
    # Whether trees of classes are small with clients, too. Large ones had higher log-losses in 12
    # tables of two classes, by 1 to 41 %, and stacks with them were no better and took longer.
    is_small_for_classes: bool = True


# Of columns among which the small trees choose at a split: a few that identify clients would make
# most splits. It changed losses for new clients by -48 to +1 % in 16 tables, in the median by -1 %.
_SHARE_OF_COLUMNS = 0.3
_FEWEST_ITERATIONS = 30  # for ten classes and more
_BOOSTING = {
    None: _Boosting(
        "hgb",
        "sklearn.ensemble",
        "HistGradientBoosting",
        {},
        {
            "learning_rate": 0.05,
            "max_iter": _ForTwoClasses(150),
            "max_leaf_nodes": 8,
            "min_samples_leaf": 10,
            "max_features": _SHARE_OF_COLUMNS,
        },
    ),
    "lightgbm": _Boosting(
        "lightgbm",
        "lightgbm",
        "LGBM",
        # Otherwise it times two ways to fill histograms, which differ in rounding errors.
        {"n_jobs": 1, "verbosity": -1, "deterministic": True, "force_col_wise": True},
        {
            "learning_rate": 0.05,
            "n_estimators": _ForTwoClasses(150),
            "num_leaves": 8,
            "min_child_samples": 10,
            "feature_fraction_bynode": _SHARE_OF_COLUMNS,
        },
    ),
    "catboost": _Boosting(
        "catboost",
        "catboost",
        "CatBoost",
        # Its default of 1000 takes three times as long and changed 5 of 7 tables by under 1 %.
        {"iterations": 300, "thread_count": 1, "verbose": 0, "allow_writing_files": False},
        {"learning_rate": 0.05, "iterations": 150, "depth": 3, "rsm": _SHARE_OF_COLUMNS},
        is_small_for_classes=False,
    ),
}
LIBRARIES = {name for name in _BOOSTING if name}
_SUFFIXES = {"Regressor": ("", "_client", "_residual"), "Classifier": ("", "_client")}


def default_names(kind):
    """Names of the default base estimators of a stack, with each library."""
    return [[boosting.name + end for end in _SUFFIXES[kind]] for boosting in _BOOSTING.values()]


def default_estimators(library, kind):
    """Default base estimators of a stack of this kind, "Regressor" or "Classifier", by name."""
    # ImportError names a missing library.
    boosting = _BOOSTING[library]
    try:
        estimator_class = getattr(import_module(boosting.module), boosting.class_name + kind)
    except ImportError as error:
        raise ImportError(
            f"estimators={library!r} needs {boosting.module}: pip install {boosting.module}."
        ) from error
    trees = partial(estimator_class, **boosting.params)
    of_known = boosting.small if kind == "Classifier" and boosting.is_small_for_classes else {}
    estimators = [trees(**boosting.small), ClientAsFeature(trees(**of_known))]
    if kind == "Regressor":  # residuals use leverages given the variances, hence "plug_in"
        line = PersonalizedLinearRegression(uncertainty="plug_in")
        estimators.append(ResidualRegressor(line, trees()))
    names = [boosting.name + end for end in _SUFFIXES[kind]]
    return list(zip(names, estimators, strict=True))


def for_classes(estimators, classes):
    """The named estimators for these classes (K,), or None: default iterations are shared out."""
    if classes is None or len(classes) <= 2:
        return estimators
    return [(name, _with_shares(estimator, len(classes))) for name, estimator in estimators]


def _with_shares(estimator, n_classes):
    params = estimator.get_params() if hasattr(estimator, "get_params") else {}
    shares = {
        name: max(2 * value // n_classes, _FEWEST_ITERATIONS)
        for name, value in params.items()
        if isinstance(value, _ForTwoClasses)
    }
    return clone(estimator).set_params(**shares) if shares else estimator
