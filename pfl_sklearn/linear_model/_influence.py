"""Influence of single clients on a mixed model's population."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame

from pfl_sklearn._client_tables import SummaryTable
from pfl_sklearn._typing import TableLike
from pfl_sklearn.linear_model._contrasts import systems_of_fit
from pfl_sklearn.priors._resolve import resolve_prior

_ZERO = 1e-10  # share of the information that other clients have, below which it is none


class InfluenceMixin:
    """Mixin of the mixed models for linear responses."""

    def influence(
        self: Any,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike,
        sample_weight: TableLike = None,
        feature_names: Sequence[str] | None = None,
    ) -> DataFrame:
        """What the population's coefficients would be without each of the clients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            The rows of ``fit``.
        y : array-like of shape (n_rows,)
            Their responses.
        groups : array-like of shape (n_rows,)
            Client id of every row.
        sample_weight : array-like of shape (n_rows,), default=None
            As in ``fit``.
        feature_names : array-like of str, shape (d,), default=None
            Names of the features, as for :meth:`summary`.

        Returns
        -------
        DataFrame
            Indexed by client, the most influential first: n_rows, cooks_distance, and a column for
            each of the population's coefficients with its estimate from all other clients, at the
            variances of the fit. NaN for a client without which a coefficient is not estimable.

        Raises
        ------
        ValueError
            For other rows than those of ``fit``, fewer than two clients, a known population mean, a
            finite `epsilon`, models with `groupings`, and fits without a common population.

        Notes
        -----
        With :math:`A_i = X_i^\\top V_i^{-1} X_i`, :math:`A = \\sum_i A_i` and the score
        :math:`s_i = X_i^\\top V_i^{-1} (y_i - X_i \\hat\\beta)`, the estimate without client i is
        :math:`\\hat\\beta - (A - A_i)^{-1} s_i`. That is exact at the variances of the fit. To see
        what a client does to the variances, fit without its rows. Cook's distance is the change
        :math:`\\delta` as :math:`\\delta^\\top A\\, \\delta / p` (Cook, 1977; Nieuwenhuis et al.,
        2012, for clients): above 4 over the number of clients it is worth a look.

        References
        ----------
        Cook, R. D. (1977). Detection of influential observation in linear regression.
        Technometrics. Nieuwenhuis, R., te Grotenhuis, M. and Pelzer, B. (2012). influence.ME: tools
        for detecting influential data in mixed effects models. The R Journal.
        """
        self._require_fitted("clients_")
        self._check_influence()
        design = self._named_design(feature_names)
        for name in ("n_rows", "cooks_distance"):
            if name in design.names:
                raise ValueError(
                    f"two columns of the table would be called {name!r}; give other feature_names."
                )
        systems = systems_of_fit(self, "influence", X, y, groups, sample_weight)
        # In a basis where the information of all clients is the identity.
        identity, changes = np.eye(len(systems.scores.T)), np.full(systems.scores.shape, np.nan)
        for at, (information, score) in enumerate(
            zip(systems.informations, systems.scores, strict=True)
        ):
            rest = identity - information
            if np.linalg.eigvalsh(rest)[0] > _ZERO:
                changes[at] = np.linalg.solve(rest, score)
        estimates = design.vectors(self.population_coef_, self.population_intercept_)
        estimates = estimates - changes @ systems.basis.T
        columns = {
            "n_rows": self.n_samples_per_client_,
            "cooks_distance": np.sum(changes**2, axis=1) / len(identity),
            **dict(
                zip(design.names, np.where(self._errors.is_open, np.nan, estimates).T, strict=True)
            ),
        }
        table = SummaryTable(columns, index=pd.Index(self.clients_, name="client"))
        return table.sort_values("cooks_distance", ascending=False)

    def _check_influence(self: Any):
        """Raise ValueError for a fit that has no influences."""
        posterior = getattr(self, "_posterior", None)
        plug_in = getattr(posterior, "plug_in", posterior)
        reason = None
        if np.isfinite(self.epsilon):
            reason = "a fit without privacy, whose estimates are those of the rows"
        elif getattr(self, "_levels", ()):
            reason = "a single grouping of the rows; this fit has groupings"
        elif len(self.clients_) != self.privacy_.n_clients:
            reason = "the fit of all clients, not a model of for_client()"
        elif len(self.clients_) < 2:
            reason = "several clients"
        elif not hasattr(plug_in, "error_root") or resolve_prior(self).mean is not None:
            reason = "clients that share an estimated population"
        if reason is not None:
            raise ValueError(f"influence needs {reason}.")
