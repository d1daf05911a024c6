"""Table of effects: deviations of clients and levels from the population, with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from pfl_sklearn._client_tables import mark_coverage
from pfl_sklearn.base import check_level
from pfl_sklearn.linear_model._summary_tables import CLIENT

_ERRORS = ("conditional", "total")


class EffectTableMixin:
    """Mixin of the mixed models: their effects as a table."""

    def effects(
        self: Any,
        grouping: Any = None,
        level: float = 0.95,
        errors: str = "conditional",
        feature_names: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Table of the effects of clients and levels, with intervals.

        An effect is a deviation from the population's coefficient, as in lme4's ``ranef``. The
        `coef_` of a client is the sum of both.

        Parameters
        ----------
        grouping : "client" or the name of a grouping column, default=None
            Whose effects to list. None: those of the clients, then of the levels of each grouping.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        errors : {"conditional", "total"}, default="conditional"
            "conditional": given the population's coefficients and the variances, as with lme4's
            ``condVar = TRUE``; to compare clients, or levels, with one another. "total": how far
            the estimate may be off. The population's error counts, and where `uncertainty` is
            "full" so does that of the variances, of which plausible ones may also be smaller (for
            classes and counts with groupings, only in the population's error). With more than 4,000
            effects of levels, both have a Monte Carlo error of up to 5 %.
        feature_names : array-like of str, shape (d,), default=None
            Names of the features, as for :meth:`summary`.

        Returns
        -------
        DataFrame
            One row per effect with the columns grouping, level (the client's id or the level), term
            (the coefficient; "class: coefficient" with K > 2 classes), estimate, sd, lower, upper
            and n_rows, the number of rows of the client or level in ``fit``. Bounds are normal
            quantiles. Total errors are NaN for coefficients that are not identified.

        Raises
        ------
        ValueError
            For an unknown `grouping` or kind of `errors`, and a `level` that is not in (0, 1).
        AttributeError
            If the model has no clients (:meth:`release`), or no Gaussian posterior of effects:
            under a prior that is not Gaussian, for the published algorithms, or without pooling.
        """
        self._require_fitted("clients_")
        check_level(level)
        if errors not in _ERRORS:
            raise ValueError(f"errors must be 'conditional' or 'total'; got {errors!r}.")
        posterior: Any = getattr(self, "_posterior", None)
        if not hasattr(posterior, "deviation_variances"):
            raise AttributeError(
                "effects() needs clients with Gaussian effects that share a population; got a fit "
                f"with {self._parameter_text()}."
            )
        fitted_levels = getattr(self, "_levels", [])
        names = [CLIENT, *(each.name for each in fitted_levels)]
        if grouping is not None and grouping not in names:
            raise ValueError(f"grouping must be one of {names}; got {grouping!r}.")
        design = self._named_design(feature_names)
        conditional, tables = errors == "conditional", []
        if grouping is None or grouping == CLIENT:
            tables.append(_client_effects(self, design, posterior, conditional))
        for k, each in enumerate(fitted_levels):
            if grouping is None or grouping == each.name:
                variances = posterior.level_variances(k + 1, conditional)
                terms = each.terms(design)
                tables.append(
                    _table(each.name, each.levels, terms, each.effects, variances, each.n_rows)
                )
        table = pd.concat(tables, ignore_index=True)
        half = ndtri(0.5 + level / 2) * table["sd"]
        table.insert(5, "lower", table["estimate"] - half)
        table.insert(6, "upper", table["estimate"] + half)
        return mark_coverage(table, self)


def _client_effects(model, design, posterior, conditional):
    """Rows of the clients, without bounds."""
    q, coef = len(design.random), np.asarray(model.coef_)
    values = design.vectors(coef, model.intercept_)
    values = values - design.vectors(model.population_coef_, model.population_intercept_)
    variances = posterior.deviation_variances(conditional).reshape(values.shape)[..., :q]
    if not conditional:
        is_open = model._errors.is_open.reshape(values.shape[1:])[..., design.random]
        variances = np.where(is_open, np.nan, variances)
    m, terms = len(values), np.array(design.random_names)
    if values.ndim == 3:
        terms = np.array([f"{label}: {name}" for label in model.classes_ for name in terms])
    values = values[..., design.random].reshape(m, -1)
    n_rows = model.n_samples_per_client_
    return _table(CLIENT, model.clients_, terms, values, variances.reshape(m, -1), n_rows)


def _table(name, levels, terms, values, variances, n_rows):
    """Rows of L levels with q terms each, from values and variances (L, q) and n_rows (L,)."""
    n, q = values.shape
    return pd.DataFrame({
        "grouping": pd.Series([name] * (n * q), dtype=object),
        # Ids of several groupings may be of several types.
        "level": pd.Series(np.repeat(np.asarray(levels, dtype=object), q), dtype=object),
        "term": np.tile(terms, n),
        "estimate": values.ravel(),
        "sd": np.sqrt(np.maximum(variances, 0.0)).ravel(),
        "n_rows": np.repeat(n_rows, q),
    })  # fmt: skip
