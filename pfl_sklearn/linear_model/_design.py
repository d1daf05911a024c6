"""Columns of a design matrix: which coefficients vary by client, and which all clients share.

The design has the intercept first, if there is one, and then the features. Priors describe the
coefficients that vary by client, in the order of the design.
"""

from numbers import Integral
from typing import NamedTuple

import numpy as np

from pfl_sklearn._columns import column_labels

INTERCEPT = "intercept"
KEYWORDS = ("all", "auto")  # of `random`, for all coefficients unless the fit decides otherwise
_NAMELESS = (
    " X came without column names; give indices, or let the steps of a pipeline keep the names: "
    "set_output(transform='pandas')."
)


class Design(NamedTuple):
    """Positions of the random and the fixed coefficients among the columns of a design."""

    names: tuple  # names of all p columns
    random: np.ndarray  # (q,), sorted positions
    fixed: np.ndarray  # (p - q,), sorted positions
    fit_intercept: bool
    all_random: bool = False  # whether "all" was asked for, and not certain columns

    @property
    def order(self):
        """Positions (p,) of the columns, the random ones first."""
        return np.concatenate([self.random, self.fixed])

    @property
    def random_names(self):
        """Names of the q coefficients that vary."""
        return [self.names[k] for k in self.random]

    @property
    def intercept_only(self):
        """The same design with a random intercept alone."""
        every = np.arange(len(self.names))
        return self._replace(random=every[:1], fixed=every[1:], all_random=False)

    def named(self, features):
        """The same design with other names of the features (d,); None keeps them."""
        if features is None:
            return self
        features = tuple(str(name) for name in features)
        d = len(self.names) - self.fit_intercept
        if len(features) != d:
            raise ValueError(f"feature_names must name {d} features; got {len(features)} names.")
        return self._replace(names=(INTERCEPT, *features) if self.fit_intercept else features)

    def matrix(self, X):
        """Design matrix (..., p) of features (..., d)."""
        return self.vectors(X, np.ones(X.shape[:-1]))

    def coefficients(self, values):
        """Coefficients (..., d) and intercepts (...,) of vectors (..., p); 0 if not fitted."""
        if self.fit_intercept:
            return values[..., 1:], values[..., 0]
        return values, np.zeros(values.shape[:-1])  # as scikit-learn's intercept_

    def vectors(self, coef, intercept):
        """Vectors (..., p) of coefficients (..., d) and intercepts (...,)."""
        if not self.fit_intercept:
            return coef
        return np.concatenate([np.expand_dims(intercept, -1), coef], axis=-1)

    def random_block(self, matrix):
        """The part (q, q) of a matrix (p, p) that belongs to the random coefficients."""
        return matrix[np.ix_(self.random, self.random)]

    def embedded(self, covariance):
        """Covariance (p, p) of all coefficients, from that of the random ones (q, q)."""
        full = np.zeros((len(self.names), len(self.names)))
        full[np.ix_(self.random, self.random)] = covariance
        return full


def resolve_design(random, n_features, fit_intercept, feature_names=None, keywords=KEYWORDS):
    """Design from an estimator's parameter `random`; `keywords` of it stand for all coefficients.

    A keyword takes precedence over a feature of that name. Raises ValueError if `random` names no
    column, an unknown or ambiguous one, or an intercept that is not fitted.
    """
    named = feature_names is not None
    features = list(feature_names) if named else [f"x{k}" for k in range(n_features)]
    names = (INTERCEPT, *features) if fit_intercept else tuple(features)
    every = np.arange(len(names))
    if isinstance(random, str) and random in keywords:
        # A keyword takes precedence over features: as a default, nobody may have given it.
        if random == "all" and random in features:
            raise ValueError(
                "random='all' is ambiguous, as X has a feature of that name; give ['all'] for that "
                "feature alone, or rename it."
            )
        return Design(names, every, every[:0], fit_intercept, True)
    listed = [random] if isinstance(random, str | Integral) else list(random)
    if not listed:
        raise ValueError("random must name at least one coefficient; got an empty list.")
    positions = [_column_position(name, features, fit_intercept, named) for name in listed]
    chosen = np.unique(positions).astype(np.intp)
    return Design(names, chosen, np.setdiff1d(every, chosen), fit_intercept)


def _column_position(name, features, fit_intercept, named):
    """Position among the columns of the design; `named` if the names of the features are given."""
    # True would be column 1: a mask of columns is no list of positions.
    if isinstance(name, Integral) and not isinstance(name, bool | np.bool_):
        if not 0 <= int(name) < len(features):
            raise ValueError(f"random holds the index {name}, but X has {len(features)} features.")
        return int(name) + fit_intercept
    # A column name takes precedence: X may have a column "intercept".
    if name in features:
        if name == INTERCEPT and fit_intercept:
            raise ValueError(
                f"random={name!r} is ambiguous, as X has a feature of that name; give the "
                "feature's index, or rename it."
            )
        return features.index(name) + fit_intercept
    if name == INTERCEPT:
        if not fit_intercept:
            raise ValueError("random has 'intercept', but fit_intercept=False.")
        return 0
    raise ValueError(
        f"random holds {name!r}, which is neither 'intercept' nor one of the features "
        f"{features[:20]}.{'' if named else _NAMELESS}"
    )


def column_names(X):
    """Column names of a data frame as strings, or None; TypeError if only some are strings."""
    labels = column_labels(X)
    if labels is None:
        return None
    # scikit-learn ignores names that are not all strings; then random would silently miss them.
    if len({isinstance(label, str) for label in labels}) > 1:
        raise TypeError(
            f"only some column names of X are strings: {labels[:20]}; use strings for "
            "all of them, or give an array."
        )
    return [str(label) for label in labels]
