"""Responses and rankings simulated from a mixed model."""

from collections.abc import Iterator
from itertools import islice
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import mark_coverage, rank_table
from pfl_sklearn._clients import encode_clients
from pfl_sklearn._compat import check_sample_weight
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn.base import check_level
from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._totals import check_row_arguments
from pfl_sklearn.priors import GaussianPrior

_CLIENTS = ("same", "new")


class Draw(NamedTuple):
    """One simulated table."""

    predictors: Floats  # (n_rows,)
    responses: Any  # (n_rows,)


class SimulationMixin:
    """Mixin of the mixed models; a model has ``_rows_with`` and ``_drawn_responses``."""

    def simulate(
        self: Any,
        X: TableLike,
        *,
        groups: TableLike = None,
        n: int = 100,
        clients: str = "same",
        sample_weight: TableLike = None,
        random_state: RandomState = None,
        **known: TableLike,
    ) -> Any:
        """Responses of rows as the fitted model has them.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features of the rows, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row.
        n : int, default=100
            Number of responses of every row.
        clients : {"same", "new"}, default="same"
            "same": the clients of ``fit``, whose coefficients are drawn from their joint posterior,
            which has the population's errors; a predictive check compares such responses with the
            observed ones. An id that ``fit`` did not see is a new client (``unseen="population"``).
            "new": every id, and every level of `groupings`, has effects that are drawn anew from
            the fitted distribution, around the estimated population: a parametric bootstrap. So
            have levels that ``fit`` did not see.
        sample_weight : array-like of shape (n_rows,), default=None
            Precision weights of the rows, for linear models.
        random_state : int, RandomState instance or None, default=None
            Seed.
        **known : array-likes of shape (n_rows,)
            `offset`, or for counts `exposure`, as for ``predict``.

        Returns
        -------
        ndarray of shape (n, n_rows)
            Responses: labels of classes, counts, or numbers.

        Raises
        ------
        ValueError
            For the same clients after a private fit (its promise covers the population alone), or
            with `groupings`; for more than two classes, and a prior that is not Gaussian with a
            finite covariance.

        Notes
        -----
        Variances, and a dispersion, are those of the fit. Draws of the same clients have the
        population's errors, which averages such as ``predict_proba`` leave out: with few clients
        the means of simulated classes and counts lie a little above those of small predictions.
        """
        draws = self._draws(X, groups, n, clients, sample_weight, random_state, known)
        return np.stack([draw.responses for draw in draws])

    def ranks(
        self: Any,
        X: TableLike = None,
        *,
        level: float = 0.95,
        n_draws: int = 2000,
        random_state: RandomState = 0,
    ) -> pd.DataFrame:
        """Ranks of the clients, with intervals that say how little a ranking may tell.

        Parameters
        ----------
        X : array-like of shape (n_rows, d), default=None
            Rows on whose mean linear predictor clients are compared: the same for all, so that case
            mix plays no part. None: their intercepts.
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.
        n_draws : int, default=2000
            Draws from the joint posterior.
        random_state : int, RandomState instance or None, default=0
            Seed of the draws.

        Returns
        -------
        DataFrame
            Indexed by client and sorted: estimate (of the linear predictor), rank (its posterior
            mean; 1 is the largest estimate), lower and upper (quantiles), and probability_largest.

        Raises
        ------
        ValueError
            As :meth:`simulate`, and without `X` if there is no intercept.

        Notes
        -----
        The mean of a client's rank minimizes the expected squared error of ranks (Laird and Louis,
        1989). It lies nearer to the middle than the rank of its estimate, which claims too much.

        References
        ----------
        Laird, N. M. and Louis, T. A. (1989). Empirical Bayes ranking methods. Journal of
        Educational Statistics, 14, 29-46.
        """
        check_level(level)
        x, draws = self._client_draws(X, n_draws, random_state, "ranks")
        row = x.mean(axis=0)
        estimates = self._design.vectors(self.coef_, self.intercept_) @ row
        drawn = np.array([estimates + each @ row for each in draws])
        table = rank_table(drawn, estimates, self.clients_, level)
        return mark_coverage(table, self)

    def exceedance(
        self: Any,
        threshold: float,
        X: TableLike = None,
        *,
        n_draws: int = 2000,
        random_state: RandomState = 0,
    ) -> pd.Series:
        """Posterior probability that a client's mean response is above a threshold.

        Parameters
        ----------
        threshold : float
            In units of the mean response: for classes a probability of the second, for counts a
            rate per unit of exposure.
        X : array-like of shape (n_rows, d), default=None
            Rows over which the mean is taken: the same for all clients. None: one row of zeros, so
            that the intercepts decide.
        n_draws : int, default=2000
            Draws from the joint posterior; a probability of .5 then has an error of .01.
        random_state : int, RandomState instance or None, default=0
            Seed of the draws.

        Returns
        -------
        Series
            Probabilities indexed by client.

        Raises
        ------
        ValueError
            As :meth:`ranks`, and for a threshold that no mean can have.
        """
        low, high = self._range_of_means
        if not (isinstance(threshold, Real) and low < threshold < high):
            raise ValueError(
                f"threshold must be a number between {low:g} and {high:g}; got {threshold!r}."
            )
        x, draws = self._client_draws(X, n_draws, random_state, "exceedance")
        estimates = self._design.vectors(self.coef_, self.intercept_)
        above = [
            self._mean_responses((estimates + each) @ x.T).mean(axis=1) > threshold
            for each in draws
        ]
        index = pd.Index(self.clients_, name="client")
        return pd.Series(np.mean(above, axis=0), index, name="exceedance")

    def _client_draws(self: Any, X, n_draws, random_state, name):
        """Rows (k, p) of the design, and draws (m, p) of clients' deviations from their estimates.

        Without `X` the row is that of the intercept.
        """
        self._require_fitted("clients_")
        self._check_simulates("same", name)
        n = check_scalar(n_draws, "n_draws", Integral, min_val=1)
        design, rng = self._design, check_random_state(random_state)
        if X is None and not design.fit_intercept:
            raise ValueError(
                f"{name} needs X, rows on which clients compare: there is no intercept."
            )
        x = np.eye(len(design.names))[:1] if X is None else design.matrix(self._checked_features(X))
        if not self._estimable_rows(x).all():
            raise ValueError(
                f"{name} needs rows X whose predictors the rows of fit determine; columns that are "
                "combinations of others in fit are not in X."
            )
        clients, none = np.arange(len(self.clients_)), np.zeros(0, dtype=np.intp)
        return x, islice(self._posterior_effects(clients, none, rng), n)

    def _draws(self: Any, X, groups, n, clients, weights, random_state, known) -> Iterator[Draw]:
        """Simulated tables, one by one."""
        check_is_fitted(self)
        self._check_simulates(clients, "simulate")
        n = check_scalar(n, "n", Integral, min_val=1)
        rng = check_random_state(random_state)
        model = self if clients == "same" else self._population_copy()
        check_row_arguments(self, "simulate", known)
        predictors, x, codes, levels = model._rows_with(X, groups, **known)
        weights = self._checked_precision(weights, x)
        ids, at = self._ids(codes, groups)
        if clients == "same":
            effects = self._posterior_effects(ids[ids >= 0], ids[ids < 0], rng)
        else:
            if levels:
                predictors = predictors - model._level_predictors(x, levels, "effects")
            effects = self._prior_effects(len(ids), rng)
        levels, fitted = self._with_new_levels(X, levels), getattr(self, "_levels", ())
        roots = [square_root(each.embedded_covariance(self._design)) for each in fitted]
        for _ in range(n):
            drawn = predictors + np.einsum("np,np->n", x, next(effects)[at])
            for root, level in zip(roots, levels, strict=True):
                of_levels = rng.normal(size=(level.max() + 1, len(root))) @ root.T
                drawn += np.einsum("np,np->n", x, of_levels[level])
            yield Draw(drawn, self._drawn_responses(drawn, weights, rng))

    def _check_simulates(self: Any, clients, name):
        """Raise ValueError if the fit has no such draws."""
        if clients not in _CLIENTS:
            raise ValueError(f"clients must be 'same' or 'new'; got {clients!r}.")
        if np.size(self.population_intercept_) > 1:
            raise ValueError(f"{name} needs two classes; got a model of {len(self.classes_)}.")
        if type(self.prior_) is not GaussianPrior or not np.isfinite(self._between_clients()).all():
            raise ValueError(
                f"{name} needs a Gaussian prior with a finite covariance; got a fit with "
                f"{self._parameter_text()}."
            )
        if clients == "new":
            return
        instead = "take clients='new'" if name == "simulate" else "compare effects()"
        if not hasattr(self, "clients_"):
            raise ValueError(f"{name} of a released model has no clients of fit; {instead}.")
        if np.isfinite(self.epsilon):
            raise ValueError(
                f"{name} of the same clients would show what their exact rows say, which epsilon="
                f"{self.epsilon:g} does not cover; simulate(clients='new') draws from the "
                "population alone."
            )
        if getattr(self, "_levels", ()):
            raise ValueError(f"{name} of the same clients does not go with groupings; {instead}.")
        if not hasattr(self, "_posterior"):
            raise ValueError(
                f"{name} needs a posterior; a fit with {self._parameter_text()} gives its mode."
            )

    def _with_new_levels(self: Any, X, levels):
        """Codes (n_rows,) of the levels of each grouping, with numbers for those not seen."""
        if not levels:
            return []
        found, values = [], self._grouping_columns.split(X)[1]
        for level, column in zip(levels, values, strict=True):
            codes, new = np.array(level), level < 0
            # Rows without a level are of one.
            codes[new] = codes.max() + 1 + pd.factorize(column[new], use_na_sentinel=False)[0]
            found.append(codes)
        return found

    def _between_clients(self: Any):
        """Covariance (p, p) between clients; 0 where a single client is its own population."""
        return np.nan_to_num(self._between, nan=0.0, posinf=np.inf)

    def _ids(self: Any, codes, groups):
        """Codes (k,) of different clients, new ones below 0 at the end, and places (n_rows,)."""
        keys = codes.astype(np.int64)
        new = codes < 0
        if new.any():
            of_ids = np.zeros(len(codes), dtype=np.int64)
            if groups is not None:
                of_ids = encode_clients(groups, len(codes)).codes
            m = len(getattr(self, "clients_", ()))
            keys[new] = m + of_ids[new]
        _, first, at = np.unique(keys, return_index=True, return_inverse=True)
        return codes[first], at.ravel()

    def _prior_effects(self: Any, k, rng):
        """Endless deviations (k, p) of new clients from the population."""
        root = square_root(self._between_clients())
        while True:
            yield rng.normal(size=(k, len(root))) @ root.T

    def _posterior_effects(self: Any, known, new, rng):
        """Endless deviations (k, p) of clients from their estimates: known ones, then new ones."""
        design, p = self._design, len(self._design.names)
        back, posterior = np.argsort(design.order), getattr(self, "_posterior", None)
        plug_in: Any = getattr(posterior, "plug_in", posterior)
        has_shared = hasattr(plug_in, "error_root")  # else a single client
        error_root = (
            (plug_in.error_root * plug_in.scale[:, None])[back]
            if has_shared
            else self._errors.root()
        )
        own = _own_effects(self, plug_in, known, rng) if len(known) else None
        whitened = plug_in.whitened(known) if has_shared and len(known) else None
        prior = self._prior_effects(len(new), rng)
        while True:
            shared = rng.normal(size=error_root.shape[1])
            result = np.empty((len(known) + len(new), p))
            result[len(known) :] = error_root @ shared + next(prior)
            if own is not None:
                result[: len(known)] = next(own)
            if whitened is not None:
                # A client's own rows hold it back from moving with the population.
                moved = plug_in.error_root @ shared
                held = np.einsum("mkp,mk->mp", whitened, whitened @ moved) @ plug_in.ratio
                result[: len(known)] += ((moved - held) * plug_in.scale)[:, back]
            yield result

    def _checked_precision(self: Any, weights, x):
        """Precision weights (n_rows,) of rows to simulate."""
        if weights is None:
            return np.ones(len(x))
        if not hasattr(self, "noise_variance_"):
            raise ValueError(
                "sample_weight is for linear models, where it divides a row's variance; for "
                "classes and counts a weight repeats a row, so repeat the row."
            )
        weights = check_sample_weight(weights, x, dtype=np.float64)
        if not (weights > 0).all():
            raise ValueError(f"sample_weight must be above 0; got {weights.min():g}.")
        return weights


def _own_effects(model, plug_in, known, rng):
    """Endless deviations (m, p) of known clients from their modes, given the population."""
    design, p, m = model._design, len(model._design.names), len(known)
    effects, result, q = getattr(model, "_effects", None), np.zeros((m, p)), len(design.random)
    z, of_client = np.tile(np.eye(q), (m, 1)), np.repeat(known, q)
    if effects is not None and effects.has_nodes:
        nodes = effects.node_deviations(z, of_client)[..., 0].reshape(m, q, -1)
        chances = np.cumsum(effects.node_weights(known), axis=1)
        while True:
            drawn = rng.uniform(size=(m, 1)) * chances[:, -1:]
            at = np.minimum(np.sum(chances < drawn, axis=1), chances.shape[1] - 1)
            result[:, design.random] = nodes[np.arange(m), :, at]
            yield result
    shift = np.zeros((m, p))
    if effects is not None:
        shift[:, design.random] = effects.mean_shifts(z, of_client).reshape(m, -1)
    roots = _roots(plug_in, known, design)
    while True:
        yield shift + np.einsum("mpr,mr->mp", roots, rng.normal(size=(m, roots.shape[2])))


def _roots(plug_in, known, design):
    """Roots (m, p, p) of the clients' posterior covariances given the population."""
    p, back = len(design.names), np.argsort(design.order)
    if hasattr(plug_in, "given_population"):
        eye = np.broadcast_to(np.eye(p), (len(known), p, p))
        covariances = plug_in.given_population(eye, known)
    else:
        covariances = plug_in.covariances[known]
    return np.array([square_root(each[np.ix_(back, back)]) for each in covariances])
