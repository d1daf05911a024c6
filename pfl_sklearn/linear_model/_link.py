"""What the regressions with a link have in common: parameters, fit, warnings and predictors."""

import math
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import ClassVar

import numpy as np
from scipy.special import ndtri
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._columns import check_one_per_row, name_bad_columns
from pfl_sklearn._compat import Interval, StrOptions, num_samples
from pfl_sklearn._labels import class_weighted
from pfl_sklearn._parameters import (
    AT_LEAST_ONE,
    FIT_INTERCEPT,
    NOT_NEGATIVE,
    POSITIVE,
    UNSEEN,
    parameter,
    with_parameters,
)
from pfl_sklearn._variance_averaging import UNCERTAINTIES
from pfl_sklearn.linear_model._base import BasePersonalizedRegression, population_errors
from pfl_sklearn.linear_model._fit_warnings import warn_of_lost_accuracy, warn_of_separation
from pfl_sklearn.linear_model._mixed._fit import check_rows, fit_link
from pfl_sklearn.linear_model._mixed._identifiability import gaussian_evidence
from pfl_sklearn.linear_model._mixed._marginal_likelihood import n_points_of
from pfl_sklearn.linear_model._mixed._posterior import skewed_quantile
from pfl_sklearn.linear_model._mixed._predictions import PredictorLaw, combined, response_sums
from pfl_sklearn.linear_model._mixed._table import make_table
from pfl_sklearn.linear_model._private._checks import check_link_parameters, check_link_rows
from pfl_sklearn.linear_model._private._link_fit import fit_private_link
from pfl_sklearn.linear_model._private._messages import cut_features
from pfl_sklearn.linear_model._random_choice import choose_random
from pfl_sklearn.linear_model._row_space import find_row_space, warn_of_open_coefficients
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.priors._support import resolve_prior
from pfl_sklearn.privacy._spending import gaussian_events

_LARGEST_OFFSET = 250.0  # exponentials of 700 overflow, and predictors come on top


@with_parameters
class LinkRegression(BasePersonalizedRegression):
    """Base of the regressions with a link.

    A subclass has `_scale`, the name of its predictors, and `_separated`, what a feature may
    separate; for reports of private fits `_cut_to`, to what they cut values, and
    `_public_response`, what of the response is public. It implements ``_checked_response``,
    ``_family_of`` and ``_variance_within``, and with a private fit ``_cut_response`` and
    ``_private_start``:

    - ``_checked_response(y, with_offset)``: responses (n,), or an error that says what is wrong;
    - ``_cut_response(y)``: the same of a private fit, where numbers that are not allowed become the
      nearest that are;
    - ``_family_of(y)``: family, responses as it codes them, and fitted attributes that say what
      they were.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
    prior_ : GaussianPrior
        The prior with the mean and the covariance that the fit used.
    log_likelihood_ : float
        Approximate log marginal likelihood at the estimates, in nats, without penalties.
    random_losses_ : dict or None
        With ``random="auto"``: mean log-loss of the held-out rows, in nats, with "intercept" and
        with "all"; None where there was nothing to compare.
    n_iter_ : int
        Iterations of the search, or of Newton's method for a single client.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
    privacy_ : PrivacyReport
    """

    # An offset is routed without being asked for, as ids are: nothing else would be done with it.
    __metadata_request__fit = {"offset": True}
    __metadata_request__predict = {"offset": True}
    __metadata_request__score = {"offset": True}

    _cut_to = f"offsets to {_LARGEST_OFFSET:g} of either sign"
    _public_response = ""
    _population_attributes: ClassVar[tuple[str, ...]] = (
        *BasePersonalizedRegression._population_attributes,
        "random_losses_",
        "_row_family",
    )
    _check_private_rows = check_link_rows
    _random_words = ("all", "auto")

    prior: str | GaussianPrior = parameter(
        default="gaussian",
        kw_only=False,
        text="""
            "gaussian" or GaussianPrior
                Distribution of the q coefficients that vary by client: the intercept first, then
                the features in their order. Parameters that the prior leaves None are estimated,
                the others known; by default there is a variance for each coefficient ("diag") of
                centred columns.
        """,
    )
    random: str | Sequence[str | int] = parameter(
        default="auto",
        text="""
            "auto", "all", "intercept", the name of a feature, or list of str and int
                Coefficients that vary by client: names or indices of features, and "intercept".
                "auto" is "all" if held-out rows of the clients are predicted better with it than
                with "intercept", by at least 0.5 % of the log-loss in three folds, and "intercept"
                otherwise, or if `quadrature` is a number of points (see the user guide). It is
                "all" without an intercept, for a single client, and where the prior gives a mean, a
                covariance or a shape other than "diag". With "all" and the default prior a feature
                that is constant within every client has a common coefficient. With a finite
                `epsilon` "auto" is "intercept", as rows may not choose, and a list has to hold the
                intercept; do not name features that are constant within clients.
        """,
    )
    fit_intercept: bool = FIT_INTERCEPT
    population_penalty: float = parameter(
        default=0.0,
        ranges=[NOT_NEGATIVE],
        text="""
            float, >= 0
                L2 penalty on the population's slopes, per standard deviation of their features. For
                classes it is 1 / C of scikit-learn's LogisticRegression on standardized features.
                With few clients it keeps common slopes from fitting chance.
        """,
    )
    quadrature: str | int = parameter(
        default="auto",
        ranges=[Interval(Integral, 1, 100, closed="both"), StrOptions({"auto", "laplace"})],
        text="""
            {"auto", "laplace"} or int in [1, 100]
                How a client's effects are integrated out: by adaptive Gauss-Hermite quadrature with
                that many points, or by Laplace's approximation (one point). Quadrature needs one
                varying coefficient, and counts or two classes. "auto" then takes 15 points, 61 or
                121 where clients are further apart, and Laplace's approximation elsewhere.
                Predictions average over a client's posterior by quadrature up to six effects (K - 1
                for each coefficient of K > 2 classes). With more, means of clients with few events
                may be off by a tenth and more (see the user guide).
        """,
    )
    uncertainty: str = parameter(
        default="full",
        ranges=[StrOptions(UNCERTAINTIES)],
        text="""
            {"full", "plug_in"}
                Whether errors of population and clients count that the variance between clients was
                estimated. "full" averages them over it, where one coefficient varies (and with
                counts or two classes) and there are fewer than 1,000 clients (of classes: with
                several rows); the weight of the average falls from 1 at 100 of them to 0. The rest,
                and all where several coefficients vary, has the population's errors from the
                inverse observed information of the integrated likelihood in the population, the
                covariance and a dispersion; an estimated variance of 0 adds nothing. "plug_in"
                takes variances and dispersion as known: errors of the population are then too
                small for classes, however many clients there are, and all are with few clients.
        """,
    )
    max_iter: int = parameter(
        default=200,
        text="""
            int
                Largest number of iterations of the search for the population and the covariance.
        """,
    )
    tol: float = parameter(
        default=1e-4,
        text="""
            float
                The search ends when the gradient of the criterion is below `tol` nats per standard
                error in every direction. Estimates are then within about `tol` standard errors of
                the maximum.
        """,
    )
    unseen: str = UNSEEN
    n_jobs: int | None = parameter(
        default=None,
        text="""
            int or None
                Workers that evaluate the likelihood, each on its part of the clients; they get
                their rows once. Results are the same bits for any number. Two processes did not
                pay on a table of 400,000 rows.
        """,
    )
    epsilon = parameter(
        also="""
            It is that of one client whose data are all replaced, through the released population. A
            finite value needs an intercept that varies, and goes with two classes, or with Poisson
            counts. Slopes vary only if `random` says so, independently of each other, and if there
            are clients enough. `quadrature`, `uncertainty`, `max_iter` and `tol` then have no
            effect.
        """,
    )
    delta = parameter()
    feature_bound: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                About the largest L2 norm of a row of X, from 1e-6 to 1e6; required when `epsilon`
                is finite. It sets the scale of the messages and of the prior of the slopes, not the
                privacy. Features should have similar scales and means near 0, by public numbers.
        """,
    )
    max_rows_per_client: int | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int, >= 1, or None
                Rows up to which a client counts in full, about those of a typical client; required
                when `epsilon` is finite, and at most 1e6. What differs within a client counts less
                beyond it.
        """,
    )
    n_rounds: int = parameter(
        default=12,
        ranges=[Interval(Integral, 2, None, closed="left")],
        text="""
            int, >= 2
                Noisy sums of a private fit.
        """,
    )
    ledger = parameter()
    random_state = parameter()

    def _cut_response(self, y):
        return self._checked_response(y)

    def _fit_link(self, X, y, groups, sample_weight, offset_of):
        """Fit; `offset_of` checks the offset of rows, (n_rows,) or None, or cuts it."""
        prior, private = resolve_prior(self), math.isfinite(self.epsilon)
        self._admit(prior, X, groups, sample_weight)
        with name_bad_columns(X, private):
            features, y = self._checked_xy(X, y, groups, dtype=np.float64)
            known = offset_of(features, cut=private)
            if private:
                features, y = cut_features(features, self.feature_bound), self._cut_response(y)
            else:
                y = self._checked_response(y, known is not None)
        sample_weight = class_weighted(self, y, sample_weight)
        state, features, rows = self._read_rows(X, features, y, groups, sample_weight)
        family, response, attributes = self._family_of(rows.y)
        if known is not None and len(known) > len(rows.y):  # rows of weight 0 are absent
            known = known[np.asarray(sample_weight) > 0]
        check_one_predictor(known, family.n_outputs)
        table = make_table(state["_design"], features, rows._replace(y=response), offset=known)
        if not private:
            check_rows(table)
        design, options = state["_design"], self._fit_parameters()
        table, design, losses = choose_random(table, design, prior, family, options)
        state |= attributes | {
            "_design": design,
            "_row_family": family,
            "_with_offset": known is not None,
            "random_losses_": losses,
        }
        return self._fit_table(table, state, prior)

    def _fit_openly(self, table, prior, state):
        estimates = fit_link(table, prior, state["_row_family"], self._fit_parameters())
        first = 0 if prior.mean is None else table.n_random
        # None where a penalty identifies all coefficients.
        at = np.flatnonzero(~estimates.estimable.all(axis=0))
        estimates = estimates._replace(row_space=find_row_space(table, at, first))
        warn_of_separation(self, estimates, table, first)
        warn_of_lost_accuracy(self, estimates)
        warn_of_open_coefficients(estimates.row_space, table.names)
        return estimates

    def _fit_privately(self, table, prior, state):
        family, start = state["_row_family"], self._private_start()
        names = self._released, self._not_released
        return fit_private_link(table, prior, family, start, self, names)

    def _exact_state(self, table, prior, estimates, state):
        family = state["_row_family"]
        integration = partial(_integration, self.quadrature, family)
        # A family without a dispersion is one with a known dispersion of 0.
        noise = None if family.has_dispersion else 0.0
        design, c = state["_design"], family.n_outputs
        evidence = gaussian_evidence(table, design, prior, noise, integration, c)
        # Comparisons of fits check the mean and the mean square of the offset for equality.
        if table.offset is not None:
            powers = table.offset, table.offset**2
            moments = np.average(powers, axis=1, weights=table.weights)
            evidence = evidence._replace(offset=tuple(moments.tolist()))
        return {"_evidence": evidence, "_balance": response_sums(table, estimates)}

    def _unknown_variances(self, prior, n_clients):
        """Shape of an estimated covariance, without a noise variance; None without likelihood."""
        if n_clients == 1 or math.isfinite(self.epsilon):
            return None
        return prior.covariance_type if prior.covariance is None else None, False

    def _n_observations(self):
        return self._evidence.moments.weight  # a row counts as often as its weight says

    def _check_private(self, prior, sample_weight):
        """Raise ValueError if the parameters allow no private fit; no data is touched."""
        self._private_start()
        check_link_parameters(self, prior, sample_weight)

    def _private_start(self):
        """PrivateStart of a private fit, or an error if the parameters allow none."""
        raise ValueError(
            f"{type(self).__name__} has no private fit; expected epsilon=inf, got {self.epsilon}."
        )

    def _privacy_events(self):
        """Accounting events of a fit."""
        # A client that sends nothing moves the sums by half as much as one that is replaced.
        return gaussian_events(self.epsilon, self.delta, zero_out=0.5)

    def _fit_terms(self):
        losses = self.random_losses_ or {}
        terms = {f"held-out log-loss: {name}": loss for name, loss in losses.items()}
        # A released model, or one handed to a client, knows nothing of the rows.
        if hasattr(self, "_balance"):
            labels = [f": {label}" for label in getattr(self, "classes_", [])] or [""]
            sums = zip(labels, *self._balance, strict=True)
            # Two classes sum to the number of rows, so one says it all.
            for label, observed, expected in list(sums)[1 if len(labels) == 2 else 0 :]:
                terms |= {f"observed sum{label}": observed, f"expected sum{label}": expected}
        return super()._fit_terms() | terms

    def _fitted_state(self, state, table, estimates):
        """Fitted attributes, in the order of the features; two classes have no axis."""
        is_open = ~estimates.estimable.ravel()
        if len(estimates.population) == 1:
            population, coefficients = estimates.population[0], estimates.coefficients[:, 0]
            estimates = estimates._replace(population=population, coefficients=coefficients)
        fitted = super()._fitted_state(state, table, estimates)
        # The spread of a single client is NaN; it is its own population.
        between = np.nan_to_num(fitted["_between"])
        return fitted | {
            "_errors": population_errors(
                state["_design"], estimates, is_open, between, from_roots=True
            ),
            "_row_family": estimates.family,
            "_effects": estimates.effects,
        }

    def _predictors_with(self, X, groups, offset):
        """As `_predictors`, with a known `offset` (n_rows,) added, which has to be what fit got."""
        check_is_fitted(self)
        if self._with_offset and offset is None:
            raise ValueError(self._MISSING_OFFSET.format(name=type(self).__name__))
        predictors, X, codes = self._predictors(X, groups)
        known = checked_offset(offset, X)
        check_one_predictor(known, np.size(self.population_intercept_))
        return predictors if known is None else predictors + known, X, codes

    def _law(self, X, groups, offset):
        """PredictorLaw of rows, and their design matrix."""
        predictors, X, codes = self._predictors_with(X, groups, offset)
        x = self._design.matrix(X)
        law = PredictorLaw(
            predictors.reshape(len(x), -1),
            self._row_family.coding,
            getattr(self, "_effects", None),  # a released model has no clients
            x[:, self._design.random],
            codes,
            lambda rows, combinations: self._given_population(x[rows], codes[rows], combinations),
        )
        return law, x

    def _given_population(self, x, codes, combinations):
        """Covariances (n, a, a) of combinations (a, c) of predictors.

        They are by the curvature at the modes; population and spread count as known.
        """
        known, a = codes >= 0, len(combinations)
        result = np.zeros((len(x), a, a))
        result[~known] = self._errors.between_covariances(combined(combinations, x[~known]))
        # A single client without a prior is its own population.
        if known.any() and hasattr(self._posterior, "given_population"):
            ordered = combined(combinations, x[known][:, self._design.order])
            result[known] = self._posterior.given_population(ordered, codes[known])
        return result

    def _posterior_moments(self, x, codes, combination=(1.0,)):
        """Mean less the mode, variance and third central moment of a combination of predictors.

        Arrays (n,), for rows x (n, p) of the design. The variance counts all errors.
        """
        shift, third = np.zeros((2, len(x)))
        variance, known = self._variances(x, codes, combination), codes >= 0
        if known.any():
            z = x[known][:, self._design.random]
            coded = np.dot(combination, self._row_family.coding)
            shift[known], added, third[known] = self._effects.moments(z, codes[known], coded)
            variance[known] = np.maximum(variance[known] + added, 0.0)
        return np.array([shift, variance, third])

    def _coefficient_moments(self):
        """As `EffectPosterior.moments`, of all clients' coefficients: arrays (m, [K,] p)."""
        p, coding = len(self._design.names), self._row_family.coding
        m, c, random = len(self.clients_), len(coding), self._design.random
        result = np.zeros((3, m, c, p))
        for j, k in np.ndindex(len(random), c):
            z = np.tile(np.eye(len(random))[j], (m, 1))
            result[:, :, k, random[j]] = self._effects.moments(z, np.arange(m), coding[k])
        return result[:, :, 0] if c == 1 else result

    def _coefficient_bounds(self, level):
        lower, upper = super()._coefficient_bounds(level)
        modes = self._design.vectors(self.coef_, self.intercept_)
        shift, added, third = self._coefficient_moments()
        quantile = ndtri(0.5 + level / 2)
        bounds = []
        for bound, sign in ((lower, -1), (upper, 1)):
            # What the bound's distance says of the variance, with all its errors. Squares of huge
            # coefficients overflow; their bounds stay as they are.
            with np.errstate(over="ignore", invalid="ignore"):
                variance = np.maximum(((bound - modes) / quantile) ** 2 + added, 0.0)
                skewed = skewed_quantile(modes + shift, variance, third, sign * quantile)
            bounds.append(np.where(np.isinf(variance), bound, skewed))
        return tuple(bounds)

    _MISSING_OFFSET = "this {name} was fitted with an offset; give that of the rows to predict."


def _integration(quadrature, family, shape, n_varying, rank):
    """How the log-likelihood under a covariance of `n_varying` coefficients was computed."""
    if shape == "zero":  # nothing is left to integrate
        return "exact"
    n_points = n_points_of(quadrature, family, np.empty((0, n_varying + rank)))
    return "laplace" if n_points == 1 else f"quadrature with {n_points} points"


def checked_offset(values, X, name="offset", largest=_LARGEST_OFFSET, cut=False):
    """Finite values (n_rows,) of the rows of `X`, of at most a size, or None.

    Larger ones are an error, or are cut to that size.
    """
    if values is None:
        return None
    check_one_per_row(name, values)
    values = check_array(values, dtype=np.float64, ensure_2d=False, input_name=name)
    if values.shape != (num_samples(X),):
        raise ValueError(f"{name} must have shape ({num_samples(X)},); got {values.shape}.")
    if cut:
        return np.clip(values, -largest, largest)
    if np.abs(values).max(initial=0.0) > largest:
        wrong = values[np.abs(values) > largest][0]
        raise ValueError(f"{name} must be between -{largest:g} and {largest:g}; got {wrong:g}.")
    return values


def check_one_predictor(offset, n_outputs):
    """Raise ValueError if an offset is given for more than two classes."""
    if offset is not None and n_outputs > 1:
        raise ValueError(
            "offset goes with two classes; with more, one number for all of them would not change "
            "their probabilities."
        )
