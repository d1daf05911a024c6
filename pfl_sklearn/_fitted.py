"""The only writer of fitted attributes, and what ties a privacy report to the values it covers."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from pfl_sklearn._columns import validate_data
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import innermost_estimator, is_package_class

# Fitted attributes that describe the columns of `X`.
COLUMNS = ("n_features_in_", "feature_names_in_")
_RECORD = "_last_fit"


@dataclass(frozen=True)
class FitRecord:
    """What a fit set: the names of all attributes, and what ties the report to their values."""

    names: tuple[str, ...]
    fingerprint: str | None  # None if the report promises nothing


_NO_FIT = FitRecord((), None)


class FittedMixin:
    """Mixin of whatever is fitted: nothing but ``_set_fitted`` writes fitted attributes."""

    _fits_a_copy = False  # whether its fits go by the parameters that they began with

    def _set_fitted(
        self, attributes: dict[str, Any], dropped: Collection[str] | None = None
    ) -> None:
        """Replace the attributes of the last fit: all of them, or those of these names alone."""
        # A fit computes all attributes first, the report included, and sets them in one step. An
        # interruption leaves the old fit or the new one, never a mixture, in which values without
        # noise could be published under the report of an earlier private fit.
        remaining = {} if dropped is None else fitted_attributes(self)
        remaining = {
            name: value for name, value in remaining.items() if name not in (dropped or ())
        }
        attributes = {**remaining, **attributes}
        _replace(self, attributes, fingerprint_of(self, attributes))

    def _set_from_copy(self, fitted: FittedMixin) -> None:
        """Replace the attributes of the last fit by those of a copy that was fitted."""
        set_copied(self, fitted_attributes(fitted), fitted)

    def _column_attributes(self, X: TableLike, reset: bool = True) -> dict[str, Any]:
        """Fitted attributes that describe the columns of `X`; the model stays as it is."""
        probe = copy.copy(self)  # validation records what it sees in the model that it is given
        validate_data(probe, X, skip_check_array=True, reset=reset)
        return column_attributes(probe)


def column_attributes(estimator: Any) -> dict[str, Any]:
    """Fitted attributes of an estimator that describe the columns of `X`."""
    return {name: getattr(estimator, name) for name in COLUMNS if hasattr(estimator, name)}


def fitted_attributes(estimator: Any) -> dict[str, Any]:
    """The attributes that the last fit set."""
    names = _record_of(estimator).names
    return {name: value for name, value in vars(estimator).items() if name in names}


def set_copied(estimator: Any, attributes: dict[str, Any], original: Any) -> None:
    """Set copies of attributes, with the fingerprint of the original: it shows if that changed."""
    _replace(estimator, attributes, _record_of(original).fingerprint)


def _replace(estimator: Any, attributes: dict[str, Any], fingerprint: str | None) -> None:
    last = _record_of(estimator).names
    others = {name: value for name, value in vars(estimator).items() if name not in last}
    record = FitRecord(tuple(attributes), fingerprint)
    # Python handles signals between steps, and this is one. Updating the dict in place would take
    # a second one, for the attributes that the new fit lacks.
    estimator.__dict__ = {**others, **attributes, _RECORD: record}


def _record_of(estimator: Any) -> FitRecord:
    record: FitRecord = getattr(estimator, _RECORD, _NO_FIT)
    return record


def fingerprint_of(estimator: Any, attributes: Mapping[str, Any]) -> str | None:
    """Digest of a report and of the values that it covers; None if it promises nothing."""
    report = attributes.get("privacy_")
    if report is None or math.isinf(report.epsilon):
        return None
    wraps = getattr(type(estimator), "_wraps", None)  # a report may be of the estimator inside
    names = [*getattr(estimator, "_population_attributes", ()), *((wraps.fitted,) if wraps else ())]
    if report.unit != "client" and not report.not_released:  # all clients are covered as well
        names += ["clients_", *getattr(estimator, "_client_attributes", ())]
    digest = hashlib.sha256(report.to_json().encode())
    _add_to_digest(digest, {name: attributes[name] for name in names if name in attributes})
    return digest.hexdigest()


def has_own_report(estimator: Any) -> bool:
    """Whether a report that promises privacy is that of the fitted values."""
    found = fingerprint_of(estimator, vars(estimator))
    return found is None or found == _record_of(estimator).fingerprint


def check_report(estimator: Any) -> None:
    """Raise ValueError if a report promises privacy for other values than the fitted ones."""
    if not has_own_report(estimator):
        raise ValueError(
            f"privacy_ of this {type(estimator).__name__} is not the report of its fitted values, "
            "which nothing protects then; expected both as one fit set them. Fit again."
        )


def _add_to_digest(digest: Any, value: Any) -> None:
    """Feed plain values, at any depth, to a digest; of other objects only their class."""
    digest.update(f"<{type(value).__name__}>".encode())
    if isinstance(value, Mapping):
        for name, inner in value.items():
            digest.update(f"{name!r}:".encode())
            _add_to_digest(digest, inner)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}:".encode())
        for inner in value:
            _add_to_digest(digest, inner)
    elif isinstance(value, np.ndarray) and value.dtype == object:  # such as ids of strings
        _add_to_digest(digest, value.tolist())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, str | bytes | Real):
        digest.update(repr(value).encode())
    elif hasattr(value, "get_params"):
        # A fitted model has a fingerprint of its own, while its parameters may still be set.
        inner = innermost_estimator(value)
        if hasattr(inner, "privacy_"):
            _add_to_digest(digest, _record_of(inner).fingerprint)
        elif is_package_class(value):  # a fitted prior is its parameters
            _add_to_digest(digest, value.get_params(deep=False))
