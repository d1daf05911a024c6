"""Summaries of a mixed model: its population, intervals of variance components, criteria."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pandas import DataFrame, Series
from scipy.special import ndtri
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import SummaryTable, class_quantity
from pfl_sklearn.base import check_level
from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._mixed._identifiability import variance_shares

CLIENT = "client"  # name of the clients' grouping
_AT_CENTRE = "response at the features' means"
_INFORMATION_CELLS = 1 << 22  # numbers of a block of clients; products take a few times that


class PopulationSummaryMixin:
    """Mixin of the mixed models: tables of population and variance components, and criteria.

    Parameters and fitted attributes are those of the models, which `self: Any` stands for.
    """

    def summary(
        self: Any, feature_names: Sequence[str] | None = None, *, tests: bool = False
    ) -> DataFrame:
        """Table of the population: fixed effects and variance components.

        Parameters
        ----------
        feature_names : array-like of str, shape (d,), default=None
            Names of the features, such as ``pipeline[:-1].get_feature_names_out()``. None: those of
            `X` in ``fit``, or x0, x1, ... A :class:`~pfl_sklearn.compose.ClientColumn` knows them.
        tests : bool, default=False
            Whether to add the tests of the fixed effects by :meth:`contrast`: columns statistic, df
            and p_value, and its std_error.

        Returns
        -------
        DataFrame
            Indexed by part and term. The parts are "fixed", "between" (clients) and, for a linear
            model, one like "between movie" for each of `groupings`, and "within" (clients and
            levels). With two classes ``columns.name`` says of which class
            the log odds are ("log odds of yes"); with K > 2 a fixed effect is called "class: term".
            The columns are estimate, std_error (of the fixed effects), sd and correlation
            (of the variance components), and with groupings n_levels, the number of clients or
            levels. All are in the units of the data. Under a prior for
            centred columns a row gives the variance between clients of the response at the
            features' means; with "diag" slopes are independent of that, not of the intercept. The
            part "fit" holds the marginal and the conditional R2 (not of K > 2 classes), and for
            classes and counts the sums of the responses and of their predictions over the rows of
            ``fit``, which should agree to about 1 %. Private models do not have it.
        """
        check_is_fitted(self)
        design, groupings = self._named_design(feature_names), getattr(self, "_levels", ())
        names, estimates = self._population_terms(design)
        errors = design.vectors(self.population_coef_std_, self.population_intercept_std_).ravel()
        rows = [
            {"part": "fixed", "term": name, "estimate": estimate, "std_error": error}
            for name, estimate, error in zip(names, estimates, errors, strict=True)
        ]
        centre = getattr(self, "_centre", None)
        mean_row = None if centre is None else np.concatenate([[1.0], centre[1:]])
        covariance = design.random_block(self._between)
        between = covariance_rows("between", design.random_names, covariance)
        between += rows_at_means("between", mean_row, self._between)
        rows += [{**row, "n_levels": self.privacy_.n_clients} for row in between]
        for levels in groupings:
            between = covariance_rows(levels.part, levels.terms(design), levels.covariance)
            between += rows_at_means(levels.part, levels.mean_row, levels.covariance)
            rows += [{**row, "n_levels": len(levels.levels)} for row in between]
        if hasattr(self, "noise_variance_"):
            rows.append(variance_row("within", "residual", self.noise_variance_))
        elif self._row_family.has_dispersion:
            rows.append({"part": "within", "term": "dispersion", "estimate": self.dispersion_})
        fit = self._fit_terms().items()
        rows += [{"part": "fit", "term": term, "estimate": value} for term, value in fit]
        columns = ["part", "term", "estimate", "std_error", "sd", "correlation", "n_levels"]
        # Columns that do not apply to a row are NaN.
        table = SummaryTable(rows, columns=columns).set_index(["part", "term"]).astype(float)
        if tests:
            self._add_tests(table, len(names))
        n_levels = table.pop("n_levels")
        if groupings:
            table["n_levels"] = n_levels.astype("Int64")
        table.columns.name = class_quantity(self, "log odds")
        return table

    def conf_int(
        self: Any, level: float = 0.95, feature_names: Sequence[str] | None = None
    ) -> DataFrame:
        """Confidence intervals of population coefficients and variance components.

        Where errors are averaged over the variances (`uncertainty` of the linear model), bounds are
        quantiles of the averages, moved to the estimate where that lies outside. Such quantiles are
        always above 0, so a variance that a likelihood ratio test at 1 - `level` does not
        distinguish from 0 gets the lower bound 0. For classes and counts, the interval of the
        variance of a single coefficient holds the values that a likelihood ratio test does not
        reject, with the population integrated out. Otherwise bounds are normal, from the expected
        information, with variances cut at 0 and the noise variance on the logarithmic scale.

        With `groupings`, the interval of a variance holds the values that a likelihood ratio test
        does not reject, unless the covariance is full or levels have more than 500 effects. The
        other intervals rest on average information. They are normal, for variances on the
        logarithmic scale; that of the noise variance is a likelihood interval of a scaled
        chi-square. A variance that is estimated as 0 has the lower bound 0.

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
        knowing = ("whitened", "plug_in", "inverse_root")
        if not any(hasattr(self._posterior, name) for name in knowing):
            raise ValueError(
                "conf_int needs clients that share a population; got "
                f"prior={self.prior!r}, whose variances are infinite or as good as that."
            )
        design = self._named_design(feature_names)
        names, estimates = self._population_terms(design)
        fixed = self._errors.interval(estimates, level)
        components, noise = self._bounds_by_grouping(design, level)
        table = intervals_table(names, fixed, components, noise)
        table.columns.name = class_quantity(self, "log odds")
        return table

    @property
    def aic_(self: Any) -> float:
        """Akaike's information criterion: twice the parameters less twice `log_likelihood_`.

        The parameters are the estimated population coefficients (as far as they are identified),
        the free parameters of the covariance or the mixture, and an estimated noise variance. The
        smaller value is better. As in lme4, the log-likelihood is the restricted one after fits by
        REML; compare these only between models with the same population columns.
        """
        return 2.0 * (self._n_parameters("aic_") - self.log_likelihood_)

    @property
    def bic_(self: Any) -> float:
        """Bayesian information criterion: as `aic_`, with log(n) instead of 2 per parameter.

        n is the number of rows of positive weight in linear regression, where a weight is the
        precision of its row and a row stays one observation. For classes and counts n is the sum of
        the weights, as these say how often a row counts: a table with repeated rows has the same
        criterion.
        """
        n_parameters = self._n_parameters("bic_")
        return float(np.log(self._n_observations()) * n_parameters - 2 * self.log_likelihood_)

    def _n_observations(self: Any):
        """Number of observations behind the fit, for information criteria."""
        return self._evidence.moments.n_rows

    @property
    def icc_(self: Any) -> float:
        """Intraclass correlation: share of the variance given the features between clients.

        The variance between clients is averaged over the rows if slopes vary. The variances
        between levels of `groupings` count in the total.
        """
        return self._intraclass_correlations("icc_")[0]

    @property
    def iccs_(self: Any) -> Series:
        """Shares of the variance given the features: of "client" (`icc_`), and of each grouping.

        Every variance is averaged over the rows if slopes vary.
        """
        names = [CLIENT, *(levels.name for levels in getattr(self, "_levels", ()))]
        return Series(self._intraclass_correlations("iccs_"), index=names, name="icc")

    def _intraclass_correlations(self: Any, name):
        """Shares of the variance given the features of the clients and of every grouping."""
        check_is_fitted(self)
        within = self._variance_within(name)  # first: it raises for more than two classes
        variances = self._variances_between(name)
        total = sum(variances)
        return [variance_shares(0.0, v, total - v + within)[1] for v in variances]

    @property
    def marginal_r2_(self: Any) -> float:
        """Share of the response's variance that the population coefficients explain.

        With a link it is the response on the scale of the predictors, where a row's variance given
        its client is pi^2 / 3 for two classes, and log(1 + 1 / m + dispersion) for counts with the
        mean m.
        """
        return self._explained("marginal_r2_")[0]

    @property
    def conditional_r2_(self: Any) -> float:
        """Share of the response's variance that population, clients and `groupings` explain.

        With a link on the scale of the predictors, as :attr:`marginal_r2_`.
        """
        return self._explained("conditional_r2_")[1]

    def _population_terms(self: Any, design):
        """Names and values of the population coefficients, class by class."""
        names = list(design.names)
        if np.ndim(self.population_coef_) == 2:
            names = [f"{label}: {name}" for label in self.classes_ for name in design.names]
        return names, design.vectors(self.population_coef_, self.population_intercept_).ravel()

    def _fit_terms(self: Any):
        """Terms of the part "fit" of the summary."""
        # Logits of K > 2 classes have no common scale, so no share of variance.
        if not hasattr(self, "_evidence") or np.ndim(self.population_coef_) == 2:
            return {}
        marginal, conditional = self._explained("summary")
        if not np.isfinite(marginal + conditional):
            return {}
        return {"marginal R2": marginal, "conditional R2": conditional}

    def _n_parameters(self: Any, name):
        """Number of estimated parameters, for the property `name`."""
        n_parameters = self._evidence_for(name).n_parameters
        if n_parameters is None:  # a mode or the printed algorithms: nothing to be penalized
            raise AttributeError(
                f"{name} needs a likelihood; a fit with {self._parameter_text()} has none. Take a "
                "GaussianPrior or a mixture prior with method='reml' or 'ml'."
            )
        return n_parameters

    def _evidence_for(self: Any, name):
        """Evidence of the fit, which the property `name` needs."""
        check_is_fitted(self)
        if not hasattr(self, "_evidence"):
            raise AttributeError(
                f"{name} needs a fit of all clients without privacy; got the "
                f"{type(self).__name__} that a fit with a finite epsilon, release() or "
                "for_client() gave."
            )
        return self._evidence

    def _variances_between(self: Any, name):
        """Means over the rows of the variances of their predictors, by client and by level."""
        # A random intercept varies alike in all rows, so private models know it without moments.
        if self._design.fit_intercept and self._design.random.tolist() == [0]:
            variances = [float(self._between[0, 0])]
        else:
            variances = [self._evidence_for(name).moments.mean_square(self._between)]
        for levels in getattr(self, "_levels", ()):
            covariance = levels.embedded_covariance(self._design)
            variances.append(self._evidence_for(name).moments.mean_square(covariance))
        return variances

    def _explained(self: Any, name):
        """Marginal and conditional R2, for the property `name`."""
        evidence, noise = self._evidence_for(name), self._variance_within(name)
        population = self._design.vectors(self.population_coef_, self.population_intercept_)
        fixed = evidence.moments.variance(population)
        return variance_shares(fixed, sum(self._variances_between(name)), noise)

    def _bounds_by_grouping(self: Any, design, level):
        """Part, terms and bounds of the covariance of clients and levels, and bounds of the noise.

        Bounds are None where that was given.
        """
        if not hasattr(self, "_component_variances"):
            covariance, noise = self._component_bounds(level)
            return [("between", design.random_names, covariance)], noise
        covariances, noise = self._component_variances.bounds(level)
        parts = [("between", design.random_names)]
        parts += [(levels.part, levels.terms(design)) for levels in self._levels]
        return [(*part, each) for part, each in zip(parts, covariances, strict=True)], noise

    def _component_bounds(self: Any, level):
        """Bounds of the covariance between clients and of the noise variance; None where given."""
        shape, free_noise = self._shape
        covariance = self._design.random_block(self._between)
        if self._errors.averaged is not None:
            noise = self.noise_variance_ if free_noise else np.nan
            components, noise = self._errors.averaged.component_bounds(level, covariance, noise)
            return components, noise if free_noise else None
        if shape is None and not free_noise:
            return None, None
        q = len(covariance)
        # The directions of loadings and ridge overlap, so entries have no bounds of their own.
        if shape == "low_rank" and q > 1:
            return np.full((2, q, q), np.nan), None
        posterior = getattr(self._posterior, "plug_in", self._posterior)
        ratio = covariance / posterior.noise  # an exact fit leaves a noise whose squares underflow
        n_rows, n_outputs = self.n_samples_per_client_.sum(), np.size(self.population_intercept_)
        steps = self._covariance_directions(posterior.noise)
        free = np.eye(len(steps) + 1)
        if shape is None:  # the ratio to the noise variance falls as that rises
            free = np.array([[-1.0], [1.0]])
        elif not free_noise:
            free = free[:, :-1]
        bounds, noise = component_bounds(posterior, ratio, steps, free, n_rows, n_outputs, level)
        return None if shape is None else bounds, noise if free_noise else None

    def _covariance_directions(self: Any, noise):
        """Directions (a, q, q) in which the clients' covariance over the noise may move."""
        shape, covariance = self._shape[0], self._design.random_block(self._between)
        back = np.eye(len(covariance))
        # Full covariances are the same set at every centre.
        if self._centre is not None and shape != "full":
            back[0] -= self._centre[self._design.random]
            back[0, 0] = 1.0
        return directions(shape, covariance / noise, back)


def component_terms(names, shown):
    """Names and positions of variances, and of the covariances that are `shown` (q, q)."""
    for j, name in enumerate(names):
        yield name, j, j
        for k in np.flatnonzero(shown[j, :j]):
            yield f"{names[k]}, {name}", j, k


def covariance_rows(part, names, covariance):
    """Rows of a summary, as dicts, of a covariance (q, q) between clients or levels."""
    rows, sds = [], np.sqrt(np.diag(covariance))
    for term, j, k in component_terms(names, covariance != 0):
        row = {"part": part, "term": term, "estimate": covariance[j, k]}
        if j == k:
            row["sd"] = sds[j]
        else:  # a variance may underflow to 0 where the covariance does not
            product = sds[j] * sds[k]
            row["correlation"] = covariance[j, k] / product if product > 0 else np.nan
        rows.append(row)
    return rows


def rows_at_means(part, mean_row, covariance):
    """Row of a summary of the variance of the response at the columns' means; none if unknown."""
    if mean_row is None:
        return []
    # There intercepts and slopes are independent, if the shape is "diag".
    variance = max(float(mean_row @ covariance @ mean_row), 0.0)  # rounding may leave less
    return [variance_row(part, _AT_CENTRE, variance)]


def variance_row(part, term, variance):
    """Row of a summary, as a dict."""
    return {"part": part, "term": term, "estimate": variance, "sd": np.sqrt(variance)}


def intervals_table(names, fixed, components, noise):
    """DataFrame of bounds, indexed by part ("fixed", "between", ..., "within") and term.

    `fixed` is a pair of (p,), `components` have a part, its terms and a pair of (q, q) or None (a
    given covariance), `noise` is a pair of floats or None.
    """
    rows = [("fixed", name, *bounds) for name, *bounds in zip(names, *fixed, strict=True)]
    for part, random_names, bounds in components:
        if bounds is None:
            continue
        lower, upper = bounds
        # A covariance that its shape fixes at 0 has bounds without length, and no row.
        terms = component_terms(random_names, np.isfinite(lower) & (upper != lower))
        rows += [(part, term, lower[j, k], upper[j, k]) for term, j, k in terms]
    if noise is not None:
        rows.append(("within", "residual", *noise))
    table = SummaryTable(rows, columns=["part", "term", "lower", "upper"])
    return table.set_index(["part", "term"])


def directions(shape, ratio, back):
    """Directions (a, q, q) in which its shape lets a covariance (q, q) move.

    A given covariance moves as a whole, as its ratio to the noise variance does. `back` (q, q)
    leads from the columns of that shape to those of the data.
    """
    q = len(ratio)
    if shape is None:
        return ratio[None]
    # Without a variance the direction is that of the shape itself.
    if shape == "spherical" or q == 1:
        size = np.trace(ratio)
        return (ratio / size if size > 0 else back @ back.T / q)[None]
    if shape == "diag":
        return back.T[:, :, None] * back.T[:, None, :]
    rows, columns = np.tril_indices(q)
    entries, k = np.zeros((len(rows), q, q)), np.arange(len(rows))
    entries[k, rows, columns] = entries[k, columns, rows] = 1.0
    return entries


def component_bounds(posterior, ratio, steps, free, n_rows, n_outputs, level):
    """Normal bounds of a covariance (q, q) and of the noise variance, from expected information.

    `ratio` (q, q) is the covariance over the noise variance, `steps` (a, q, q) are the directions
    in which it may move, and `free` (a + 1, f) expresses the estimated parameters in these steps
    and the log of the noise variance. All `n_outputs` predictors have the same distribution of
    deviations.
    """
    z, unit = ndtri(0.5 + level / 2), posterior.noise
    information = _expected_information(posterior, steps, n_rows, n_outputs)
    # Directions that no row informs on leave the information singular.
    errors = free @ np.linalg.pinv(free.T @ information @ free, hermitian=True) @ free.T
    # The covariance is the product of ratio and noise variance, so the noise's error counts.
    gradient = np.column_stack([steps.reshape(len(steps), -1).T, ratio.ravel()])
    variances = np.einsum("ka,ab,kb->k", gradient, errors, gradient)
    half = z * np.sqrt(np.maximum(variances, 0.0)).reshape(ratio.shape)
    lower, upper = unit * (ratio - half), unit * (ratio + half)
    # Covariances may be negative, variances may not.
    np.fill_diagonal(lower, np.maximum(np.diag(lower), 0.0))
    # Symmetric on the logarithmic scale, which keeps a noise variance above 0.
    return (lower, upper), unit * np.exp(np.array([-z, z]) * np.sqrt(errors[-1, -1]))


def _expected_information(posterior, directions, n_rows, n_outputs):
    """Expected information (a + 1, a + 1) on the directions and the log of the noise variance."""
    # The directions are those of the covariance over the noise variance.
    p, q = len(posterior.scale) // n_outputs, directions.shape[1]
    at = (np.arange(n_outputs)[:, None] * p + np.arange(q)).ravel()
    scale = posterior.scale[at]
    steps = np.array([np.kron(np.eye(n_outputs), step) for step in directions])
    steps /= np.multiply.outer(scale, scale)
    a = len(steps)
    information = np.zeros((a + 1, a + 1))
    information[a, a] = n_rows / 2  # of a log variance: 1/2 per row, whatever the covariance
    for part in row_slices(len(posterior.rows), len(at) ** 2 * a, _INFORMATION_CELLS):
        rows = posterior.whitened(part)[:, :, at]
        pulled = np.einsum("bij,ajk->abik", rows.transpose(0, 2, 1) @ rows, steps)
        information[a, :a] += 0.5 * np.einsum("abii->a", pulled)
        information[:a, :a] += 0.5 * np.einsum("abij,cbji->ac", pulled, pulled, optimize=True)
    information[:a, a] = information[a, :a]
    return information
