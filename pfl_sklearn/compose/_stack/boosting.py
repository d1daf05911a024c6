"""Default base estimators of stacks, of boosted trees of three libraries."""

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from pfl_sklearn.compose._client_feature import ClientAsFeature
from pfl_sklearn.compose._stack.residual import ResidualRegressor
from pfl_sklearn.linear_model import PersonalizedLinearRegression


class _Library(NamedTuple):
    name: str  # of the base estimators
    module: str
    title: str  # of the class, without its kind
    params: dict[str, Any]
    # Trees that know no clients are there for new ones, where large ones memorize the known. On
    # small tables large ones lose, too: 8 tables, out of fold and new clients, log ratio of losses
    # -0.1.
    small: dict[str, Any]


_LIBRARIES = {
    None: _Library(
        "hgb",
        "sklearn.ensemble",
        "HistGradientBoosting",
        {},
        {"learning_rate": 0.05, "max_iter": 150, "max_leaf_nodes": 8, "min_samples_leaf": 10},
    ),
    "lightgbm": _Library(
        "lightgbm",
        "lightgbm",
        "LGBM",
        # Else it times the ways to fill histograms, and the faster one decides on rounding errors.
        {"n_jobs": 1, "verbosity": -1, "deterministic": True, "force_col_wise": True},
        {"learning_rate": 0.05, "n_estimators": 150, "num_leaves": 8, "min_child_samples": 10},
    ),
    "catboost": _Library(
        "catboost",
        "catboost",
        "CatBoost",
        # Its default of 1000 takes three times as long; 5 of 7 tables changed by under 1 %.
        {"iterations": 300, "thread_count": 1, "verbose": 0, "allow_writing_files": False},
        {"learning_rate": 0.05, "iterations": 150, "depth": 3},
    ),
}
LIBRARIES = {name for name in _LIBRARIES if name}
_PARTS = {"Regressor": ("", "_client", "_residual"), "Classifier": ("", "_client")}


def default_names(kind):
    """Names of the default base estimators of a stack, with each library."""
    return [[each.name + part for part in _PARTS[kind]] for each in _LIBRARIES.values()]


def default_estimators(library, kind):
    """Default base estimators of a stack of this kind, "Regressor" or "Classifier", by name.

    Raises
    ------
    ImportError
        If the library is missing.
    """
    own = _LIBRARIES[library]
    try:
        boosted = getattr(import_module(own.module), own.title + kind)
    except ImportError as error:
        raise ImportError(
            f"estimators={library!r} needs {own.module}: pip install {own.module}."
        ) from error
    trees = partial(boosted, **own.params)
    estimators = [trees(**own.small), ClientAsFeature(trees())]
    if kind == "Regressor":  # leverages are given the variances, too
        line = PersonalizedLinearRegression(uncertainty="plug_in")
        estimators.append(ResidualRegressor(line, trees()))
    return [(own.name + part, each) for part, each in zip(_PARTS[kind], estimators, strict=True)]
