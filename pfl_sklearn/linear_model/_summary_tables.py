"""Tables of the population of a mixed model, and confidence intervals of its components."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pandas import DataFrame
from scipy.special import ndtri
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import SummaryTable, of_class
from pfl_sklearn._clients import Array
from pfl_sklearn.base import check_level
from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.privacy import PrivacyReport

_AT_CENTRE = "response at the features' means"
_BLOCK_CELLS = 1 << 22  # numbers of a block of clients, whose products are a few times as many


class PopulationTablesMixin:
    """Mixin of the mixed models: tables of the population and of the variance components."""

    # Parameters, fitted attributes and methods of the models.
    prior: Any
    clients_: Array
    classes_: Any
    privacy_: PrivacyReport
    noise_variance_: Any
    n_samples_per_client_: Array
    population_coef_: Any
    population_coef_std_: Any
    population_intercept_: Any
    population_intercept_std_: Any
    _design: Any
    _between: Any
    _errors: Any
    _shape: Any
    _posterior: Any
    _explained: Any

    def summary(self, feature_names: Sequence[str] | None = None) -> DataFrame:
        """Table of the population: fixed effects and variance components.

        Parameters
        ----------
        feature_names : array-like of str, shape (d,), default=None
            Names of the features, such as ``pipeline[:-1].get_feature_names_out()``. None: those of
            `X` in ``fit``, or x0, x1, ... A :class:`~pfl_sklearn.compose.ClientColumn` knows them.

        Returns
        -------
        DataFrame
            Indexed by part and term. The parts are "fixed", "between" (clients) and, for a linear
            model, "within" (clients). With two classes the name of the columns says of which the
            log odds are ("log odds of yes"); with K > 2 a fixed effect is called "class: term".
            The columns are estimate, std_error (of the fixed effects), sd and correlation (of the
            variance components). All are in the units of the data. Under a prior for
            centred columns a row gives the variance between clients of the response at the
            features' means; with "diag" slopes are independent of that, not of the intercept.
            The part "fit" holds the marginal and the conditional R2 (not of K > 2 classes), and for
            classes and counts the sums of the responses and of their predictions over the rows of
            ``fit``, which should agree to about 1 %. Private models do not have it.
        """
        check_is_fitted(self)
        design, random = self._design.named(feature_names), self._design.random
        names, estimates = self._population_terms(design)
        errors = design.vectors(self.population_coef_std_, self.population_intercept_std_).ravel()
        rows = [
            {"part": "fixed", "term": name, "estimate": estimate, "std_error": error}
            for name, estimate, error in zip(names, estimates, errors, strict=True)
        ]
        rows += covariance_rows(design.random_names, self._between[np.ix_(random, random)])
        centre = getattr(self, "_centre", None)
        # There intercepts and slopes are independent, if the shape is "diag".
        if centre is not None:
            row = np.concatenate([[1.0], centre[1:]])
            variance = max(float(row @ self._between @ row), 0.0)  # rounding may leave less
            rows.append(variance_row("between", _AT_CENTRE, variance))
        if hasattr(self, "noise_variance_"):
            rows.append(variance_row("within", "residual", self.noise_variance_))
        table = summary_table(rows + self._fit_rows())
        table.columns.name = of_class(self, "log odds")
        return table

    def conf_int(
        self, level: float = 0.95, feature_names: Sequence[str] | None = None
    ) -> DataFrame:
        """Confidence intervals of population coefficients and variance components.

        Where errors are averaged over the variances (`uncertainty` of the linear model), bounds are
        quantiles of the averages, moved to the estimate where that lies outside. They are above 0
        whatever the data, so a variance that a likelihood ratio test at 1 - `level` does not tell
        from 0 has the lower bound 0. For classes and counts, the variance of one coefficient has
        as its interval what a likelihood ratio test does not refuse, with the population integrated
        out. Otherwise bounds are normal, from the expected information, with variances cut at 0 and
        the noise variance on the logarithmic scale.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Nominal coverage.
        feature_names : array-like of str, shape (d,), default=None
            As for :meth:`summary`.

        Returns
        -------
        DataFrame
            Columns lower and upper, indexed by part and term as the :meth:`summary` is. Variances
            that were given have no row. NaN for coefficients that are not identified, and for the
            components of a low-rank covariance.

        Raises
        ------
        ValueError
            If this is a released model or that of one client, if the prior is not Gaussian or has
            infinite variances, or after a fit of one client.
        """
        check_is_fitted(self)
        check_level(level)
        # The information is a sum over all clients, of which these copies hold one or none.
        if len(getattr(self, "clients_", ())) != self.privacy_.n_clients:
            raise ValueError(
                f"conf_int needs the fit of all clients; got the {type(self).__name__} that was "
                "released or handed to one client. Call it before release() and for_client()."
            )
        if self._shape is None:
            raise ValueError(
                "conf_int needs a GaussianPrior, fitted to several clients by likelihood and "
                f"without privacy; got prior={self.prior!r}, {len(self.clients_)} clients and "
                f"epsilon={self.privacy_.epsilon:g}."
            )
        # Only posteriors in whitened rows know the information on the covariance.
        if not hasattr(self._posterior, "whitened") and not hasattr(self._posterior, "plug_in"):
            raise ValueError(
                "conf_int needs clients that share a population; got "
                f"prior={self.prior!r}, whose variances are infinite or as good as that."
            )
        design = self._design.named(feature_names)
        names, estimates = self._population_terms(design)
        fixed = self._population_bounds(estimates, level)
        covariance, noise = self._component_bounds(level)
        table = intervals_table(names, fixed, design.random_names, covariance, noise)
        table.columns.name = of_class(self, "log odds")
        return table

    def _population_terms(self, design):
        """Names and values of the population coefficients, class by class."""
        names = list(design.names)
        if np.ndim(self.population_coef_) == 2:
            names = [f"{label}: {name}" for label in self.classes_ for name in design.names]
        return names, design.vectors(self.population_coef_, self.population_intercept_).ravel()

    def _fit_rows(self):
        """What the summary says of the fit; [] if it says nothing."""
        # Logits of K > 2 classes have no common scale, so no share of variance.
        if not hasattr(self, "_evidence") or np.ndim(self.population_coef_) == 2:
            return []
        marginal, conditional = self._explained("summary")
        if not np.isfinite(marginal + conditional):
            return []
        shares = {"marginal R2": marginal, "conditional R2": conditional}
        return [{"part": "fit", "term": term, "estimate": share} for term, share in shares.items()]

    def _population_bounds(self, estimates, level):
        return self._errors.interval(estimates, level)

    def _component_bounds(self, level):
        """Bounds of the covariance between clients and of the noise variance; None where given."""
        shape, free_noise = self._shape
        random = self._design.random
        covariance = self._between[np.ix_(random, random)]
        if self._errors.averaged is not None:
            noise = self.noise_variance_ if free_noise else np.nan
            components, noise = self._errors.averaged.component_bounds(level, covariance, noise)
            return components, noise if free_noise else None
        if shape is None and not free_noise:
            return None, None
        q = len(random)
        # The directions of loadings and ridge overlap, so entries have no bounds of their own.
        if shape == "low_rank" and q > 1:
            unknown = np.full((q, q), np.nan)
            return (unknown, unknown), None
        back = np.eye(q)
        centre = getattr(self, "_centre", None)
        # Full covariances are the same set at every centre.
        if centre is not None and shape != "full":
            back[0] -= centre[random]
            back[0, 0] = 1.0
        return component_bounds(
            getattr(self._posterior, "plug_in", self._posterior),
            directions(shape, covariance, back),
            covariance,
            self.noise_variance_ if free_noise else None,
            int(np.sum(self.n_samples_per_client_)),
            len(np.atleast_2d(self.population_coef_)),
            level,
        )


def covariance_rows(names, covariance):
    """Rows of a summary, as dicts, of a covariance (q, q) between clients."""
    rows, sds = [], np.sqrt(np.diag(covariance))
    for j, name in enumerate(names):
        rows.append(variance_row("between", name, covariance[j, j]))
        for k in np.flatnonzero(covariance[j, :j]):
            # A variance may underflow to 0 where the covariance does not.
            product = sds[j] * sds[k]
            correlation = covariance[j, k] / product if product > 0 else np.nan
            row = {"part": "between", "term": f"{names[k]}, {name}"}
            rows.append({**row, "estimate": covariance[j, k], "correlation": correlation})
    return rows


def variance_row(part, term, variance):
    """Row of a summary, as a dict."""
    return {"part": part, "term": term, "estimate": variance, "sd": np.sqrt(variance)}


def summary_table(rows):
    """DataFrame of rows of a summary; what a row does not say is NaN."""
    columns = ["part", "term", "estimate", "std_error", "sd", "correlation"]
    return SummaryTable(rows, columns=columns).set_index(["part", "term"]).astype(float)


def intervals_table(names, fixed, random_names, components, noise):
    """DataFrame of bounds, indexed by part ("fixed", "between", "within") and term.

    Parameters
    ----------
    names : list of str
        Names of the population coefficients.
    fixed : pair of ndarrays of shape (p,)
    random_names : list of str
        Names of the q coefficients that vary.
    components : pair of ndarrays of shape (q, q), or None
        Bounds of the covariance between clients; None if it was given.
    noise : pair of floats, or None
    """
    rows = [("fixed", name, *bounds) for name, *bounds in zip(names, *fixed, strict=True)]
    if components is not None:
        lower, upper = components
        for j, name in enumerate(random_names):
            rows.append(("between", name, lower[j, j], upper[j, j]))
            # A covariance that its shape fixes at 0 has bounds without length, and no row.
            for k in np.flatnonzero(np.isfinite(lower[j, :j]) & (upper[j, :j] != lower[j, :j])):
                term = f"{random_names[k]}, {name}"
                rows.append(("between", term, lower[j, k], upper[j, k]))
    if noise is not None:
        rows.append(("within", "residual", *noise))
    table = SummaryTable(rows, columns=["part", "term", "lower", "upper"])
    return table.set_index(["part", "term"])


def directions(shape, covariance, back):
    """Symmetric matrices (a, q, q) along which its shape lets a covariance move; None if given.

    `back` (q, q) leads from deviations of the columns that have this shape to those of the
    data.
    """
    q = len(covariance)
    if shape is None:
        return None
    # Without a variance the direction is that of the shape itself.
    if shape == "spherical" or q == 1:
        size = np.trace(covariance)
        return (covariance / size if size > 0 else back @ back.T / q)[None]
    if shape == "diag":
        return back.T[:, :, None] * back.T[:, None, :]
    pairs = [(j, k) for j in range(q) for k in range(j + 1)]
    entries = np.zeros((len(pairs), q, q))
    for entry, (j, k) in zip(entries, pairs, strict=True):
        entry[j, k] = entry[k, j] = 1.0
    return entries


def component_bounds(posterior, moved, covariance, noise, n_rows, n_outputs, level):
    """Normal bounds of a covariance (q, q) and of the noise variance, from expected information.

    Parameters
    ----------
    posterior : RowPosterior
    moved : ndarray of shape (a, q, q) or None
        Directions of the shape; None if the covariance was given.
    covariance : ndarray of shape (q, q)
    noise : float or None
        Estimated noise variance; None if there is none, or if it was given.
    n_rows : int
    n_outputs : int
        Number of linear predictors, in which deviations are alike.
    level : float
    """
    q, z, unit = len(covariance), ndtri(0.5 + level / 2), posterior.noise
    covariance = covariance / unit  # an exact fit leaves a noise whose squares underflow
    steps = covariance[None] if moved is None else moved
    information = _expected_information(posterior, steps, n_rows, n_outputs)
    if moved is None:  # the ratio to the noise variance falls as that rises
        errors = 1 / (np.array([-1.0, 1.0]) @ information @ np.array([-1.0, 1.0]))
        return None, _around(noise, z * np.sqrt(errors))
    if noise is None:
        information = information[:-1, :-1]
    # Directions that no row informs on leave the information singular.
    errors = np.linalg.pinv(information, hermitian=True)
    gradient = moved.reshape(len(moved), -1).T
    # In the ratio to the noise variance the covariance is a product, so the noise's error counts.
    if noise is not None:
        gradient = np.column_stack([gradient, covariance.ravel()])
    stds = np.sqrt(np.maximum(np.einsum("ka,ab,kb->k", gradient, errors, gradient), 0.0))
    lower, upper = (unit * (covariance + sign * z * stds.reshape(q, q)) for sign in (-1, 1))
    # Covariances may be negative, variances may not.
    np.fill_diagonal(lower, np.maximum(np.diag(lower), 0.0))
    return (lower, upper), None if noise is None else _around(noise, z * np.sqrt(errors[-1, -1]))


def _around(noise, half):
    """Bounds of a noise variance, symmetric on the logarithmic scale, which keeps them above 0."""
    return noise * np.exp(-half), noise * np.exp(half)


def _expected_information(posterior, moved, n_rows, n_outputs):
    """Expected information (a + 1, a + 1) on the directions and on the log of the noise variance.

    The directions are those of the covariance over the noise variance.
    """
    p, q = len(posterior.scale) // n_outputs, moved.shape[1]
    at = (np.arange(n_outputs)[:, None] * p + np.arange(q)).ravel()
    scale = posterior.scale[at]
    steps = np.array([np.kron(np.eye(n_outputs), step) for step in moved])
    steps /= np.multiply.outer(scale, scale)
    a = len(steps)
    information = np.zeros((a + 1, a + 1))
    information[a, a] = n_rows / 2  # of a log variance: 1/2 per row, whatever the covariance
    for part in row_slices(len(posterior.rows), len(at) ** 2 * a, _BLOCK_CELLS):
        rows = posterior.whitened(part)[:, :, at]
        pulled = np.einsum("bij,ajk->abik", rows.transpose(0, 2, 1) @ rows, steps)
        information[a, :a] += 0.5 * np.einsum("abii->a", pulled)
        information[:a, :a] += 0.5 * np.einsum("abij,cbji->ac", pulled, pulled, optimize=True)
    information[:a, a] = information[a, :a]
    return information
