"""What a fitted estimator shows, and which of it is not finite."""

import inspect

import numpy as np
import pandas as pd


def not_finite(model, X, groups):
    """Names of public attributes, predictions, intervals and tables that hold NaN or infinity."""
    return sorted({name for name, values in _shown(model, X, groups) if not _is_finite(values)})


def _shown(model, X, groups):
    for name in dir(model):
        if name.endswith("_") and not name.startswith("_") and name != "privacy_":
            try:
                values = getattr(model, name)
            except AttributeError:  # of another prior
                continue
            yield from _named(name, values)
    for rows, ids in (("known", groups), ("unseen", np.full(len(X), groups.max() + 1))):
        for method in ("predict", "predict_proba", "decision_function"):
            if hasattr(model, method):
                yield f"{method} of {rows}", getattr(model, method)(X, groups=ids)
        has_std = "return_std" in inspect.signature(model.predict).parameters
        if has_std and (rows == "unseen" or hasattr(model, "stds_") or hasattr(model, "coef_std_")):
            yield f"std of {rows}", model.predict(X, groups=ids, return_std=True)[1]
    for method in ("credible_interval", "summary"):
        try:
            table = getattr(model, method)()
        except AttributeError:  # of another estimator or prior
            continue
        yield from _named(method, table)


def _named(name, values):
    """Pairs of a name and an array or a number, of nested values."""
    if hasattr(values, "get_params"):
        values = values.get_params(deep=False)
    if isinstance(values, pd.DataFrame):
        values = {column: values[column].to_numpy() for column in values}
    if isinstance(values, dict):
        for inner, value in values.items():
            yield from _named(f"{name}.{inner}", value)
    else:
        yield name, values


def _is_finite(values):
    values = np.asarray(values.toarray() if hasattr(values, "toarray") else values)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
