"""Base of the regressions with a link: parameters, fit, warnings and predictors."""

import math
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.special import ndtri
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._columns import check_one_per_row, name_bad_columns
from pfl_sklearn._compat import Interval, StrOptions, num_samples
from pfl_sklearn._labels import class_weighted
from pfl_sklearn._parallel import with_iterations
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
from pfl_sklearn.linear_model._base import population_errors
from pfl_sklearn.linear_model._fit_warnings import warn_of_lost_accuracy, warn_of_separation
from pfl_sklearn.linear_model._grouped_rows import GROUPINGS, GroupedRegression
from pfl_sklearn.linear_model._grouping_columns import resolve_groupings
from pfl_sklearn.linear_model._mixed._fit import check_row_ranges, fit_link
from pfl_sklearn.linear_model._mixed._groupings._link_fit import fit_grouped_link
from pfl_sklearn.linear_model._mixed._identifiability import gaussian_evidence, with_groupings
from pfl_sklearn.linear_model._mixed._marginal_likelihood import choose_n_points
from pfl_sklearn.linear_model._mixed._posterior import skewed_quantile
from pfl_sklearn.linear_model._mixed._predictions import PredictorLaw, cross_outputs, response_sums
from pfl_sklearn.linear_model._mixed._table import make_table
from pfl_sklearn.linear_model._private._checks import check_link_parameters, check_link_rows
from pfl_sklearn.linear_model._private._link_fit import fit_private_link
from pfl_sklearn.linear_model._private._messages import cut_features
from pfl_sklearn.linear_model._random_choice import choose_random, warn_of_long_fit
from pfl_sklearn.linear_model._row_space import find_row_space, warn_unidentified
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.priors._resolve import resolve_prior
from pfl_sklearn.privacy._spending import gaussian_events

if TYPE_CHECKING:
    from pfl_sklearn._compat import CallbackSupportMixin
else:
    from sklearn.callback import CallbackSupportMixin

_LARGEST_OFFSET = 250.0  # exponentials of 700 overflow, and predictors come on top


@with_parameters
class LinkRegression(CallbackSupportMixin, GroupedRegression):
    """Base of the regressions with a link.

    A subclass names its predictors (`_scale`) and the rows that a feature may separate
    (`_separated`); for reports of private fits, the ranges to which values are clipped
    (`_clipped_ranges`) and the public part of the response (`_public_response`). It implements

    - ``_checked_response(y, with_offset)``: responses (n,), or an error;
    - ``_cut_response(y)``: the same in a private fit, where an inadmissible number becomes the
      nearest admissible one, because an error would reveal it;
    - ``_family_of(y)``: family, coded responses, and fitted attributes that decode them;
    - ``_variance_within``, and with a private fit ``_private_start``.

    Attributes
    ----------
    random_losses_ : dict or None
        With ``random="auto"``: mean log-loss of the held-out rows in nats, with "intercept" and
        with "all"; None if there was nothing to compare.

    Notes
    -----
    *Estimates.* The population, its covariance and a dispersion maximize the marginal likelihood
    directly, with the clients' deviations integrated out (`quadrature`). Laplace's approximation
    needs more rows per client than random coefficients. With fewer, estimated variances are often
    too small: give a covariance, and choose it by cross-validation. A single client gets the
    maximum of its own likelihood, without a prior, and its covariance is NaN. With `groupings` we
    take Laplace's approximation at the joint mode of all effects (:ref:`classes_and_counts`);
    there is no log-likelihood beyond 4,000 of them, besides those of the largest grouping, or
    2^25 products of both numbers.

    *Errors* come from the observed information of the marginal likelihood, or from averages over
    the variance between clients (`uncertainty`). With few clients and several varying coefficients
    they are too small, and with few levels those of their effects.

    *Predictions* of known clients are averages over the client's own posterior, by a grid of nodes
    for up to six effects and by a normal density beyond, or with `groupings` (:ref:`the guide
    <client_posteriors>` has figures).

    *Centring.* We centre columns where an intercept can absorb their means: features with common
    coefficients, and features that vary with a random intercept, unless the prior has
    ``centered=False``. Centre other features yourself if they lie far from zero.

    *Weights.* A weight multiplies the log-likelihood of its row, as if the row occurred that often;
    a row of weight 0 is absent.

    *Privacy.* With a finite `epsilon` the population and the variances come from `n_rounds` noisy
    sums of the clients' messages, each clipped to norm 1: replacing all data of one client changes
    the release within (`epsilon`, `delta`). Only the intercept varies unless `random` names slopes,
    whose covariance is then diagonal for the columns as they are. Stated errors count the noise and
    take the variances as known. Clients' own coefficients use their exact rows and are for them
    alone. See the :ref:`user guide <private_link>`, also for outcomes too rare for these errors.

    *Progress.* Callbacks (``set_callbacks``) see a task "iteration" for each step of the searches,
    those of trial fits with ``random="auto"`` included, and none in a private fit
    (:ref:`example <progress>`).

    *Memory* beyond the input: two copies of `X` and ``8 k p`` bytes per client, where k is the
    smaller of p and the largest number of rows of a client; K squared times that for K > 2 classes.
    The nodes of its posterior are at most 3 kB a client, and 60 bytes for one effect. With
    `groupings` of up to 500 effects, besides those of the largest grouping, the fitted model keeps
    its rows for ``conf_int``, in ``8 p + 130`` bytes each.
    """

    # An offset is routed without a request, as ids are: it can only be meant for this estimator.
    __metadata_request__fit = {"offset": True}
    __metadata_request__predict = {"offset": True}
    __metadata_request__score = {"offset": True}

    _clipped_ranges = f"offsets to {_LARGEST_OFFSET:g} of either sign"
    _population_attributes: ClassVar[tuple[str, ...]] = (
        *GroupedRegression._population_attributes,
        "random_losses_",
        "_row_family",
    )
    _check_private_rows = check_link_rows
    _row_arguments: ClassVar[tuple[str, ...]] = ("offset",)

    prior: str | GaussianPrior = parameter(
        default="gaussian",
        kw_only=False,
        text="""
            "gaussian" or GaussianPrior
                Distribution of the q varying coefficients, the intercept first. What the prior
                leaves None is estimated; by default a variance for each coefficient ("diag") of
                centred columns.
        """,
    )
    random: str | Sequence[str | int] = parameter(
        default="auto",
        text="""
            "auto", "all", "intercept", the name of a feature, or list of str and int
                Coefficients that vary by client: names or indices of features, and "intercept".
                "auto" is "all" if that improves the log-loss of the clients' held-out rows by at
                least 0.5 % in three folds without `groupings` (see the user guide), and otherwise
                "intercept", as with a number of points as `quadrature` or a finite `epsilon`, where
                most rows are of clients with no more of them than coefficients (of all classes but
                one), and where such a trial would take minutes. It is "all" without an intercept,
                for a single client, and where the prior gives a mean, a covariance or a shape other
                than "diag". With "all" and the default prior, features that are constant within
                every client have a common coefficient. With a finite `epsilon` a list has to hold
                the intercept, and should hold no feature that is constant within clients.
        """,
    )
    fit_intercept: bool = FIT_INTERCEPT
    groupings: Any = GROUPINGS
    population_penalty: float = parameter(
        default=0.0,
        ranges=[NOT_NEGATIVE],
        text="""
            float, >= 0
                L2 penalty on the population's slopes, per standard deviation of their features. For
                classes it is 1 / C of scikit-learn's LogisticRegression on standardized features.
        """,
    )
    quadrature: str | int = parameter(
        default="auto",
        ranges=[Interval(Integral, 1, 100, closed="both"), StrOptions({"auto", "laplace"})],
        text="""
            {"auto", "laplace"} or int in [1, 100]
                Integration over a client's effects: adaptive Gauss-Hermite quadrature with that
                many points, or Laplace's approximation (one point). Quadrature needs one varying
                coefficient, counts or two classes, and no `groupings`; "auto" then takes 15 points,
                or 61 or 121 if clients are far apart, and Laplace's approximation otherwise. A
                likelihood ratio test needs the same approximation of both fits. Predictions average
                over a client's posterior by quadrature for up to six effects (K - 1 for each
                coefficient of K > 2 classes). With more, means of clients with few events may be
                off by a tenth.
        """,
    )
    uncertainty: str = parameter(
        default="full",
        ranges=[StrOptions(UNCERTAINTIES)],
        text="""
            {"full", "plug_in"}
                Whether errors allow for the variance between clients being estimated. "full"
                averages over it if one coefficient varies (counts or two classes) and fewer than
                1,000 clients inform on it; the weight of the average falls from 1 at 100 clients to
                0. Otherwise the population's errors come from the inverse observed information of
                the marginal likelihood in population, covariance and dispersion; an estimated
                variance of 0 adds nothing. With `groupings` that needs a log-likelihood, and leaves
                out a small part beyond 30 population coefficients. "plug_in" takes variances and
                dispersion as known: errors are too small with few clients, and those of the
                population for classes however many there are.
        """,
    )
    max_iter: int = parameter(
        default=200, text="int\n    Largest number of iterations of the search."
    )
    tol: float = parameter(
        default=1e-4,
        text="""
            float
                The search ends when the gradient of the criterion is below `tol` nats per standard
                error in every direction, so within about `tol` standard errors of the maximum.
        """,
    )
    unseen: str = UNSEEN
    n_jobs: int | None = parameter(
        default=None,
        text="""
            int or None
                Workers that evaluate the likelihood, each on its share of the clients, with the
                same bits for any number. Two processes did not pay on a table of 400,000 rows. A
                fit with `groupings` uses one.
        """,
    )
    epsilon = parameter(
        also="""
            It is that of one client whose data are all replaced, through the released population. A
            finite value needs a varying intercept, and two classes or Poisson counts. Slopes vary
            only if `random` names them, independently of each other, and with enough clients.
            `quadrature`, `uncertainty`, `max_iter` and `tol` then have no effect.
        """
    )
    delta = parameter()
    feature_bound: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float, > 0, or None
                About the largest L2 norm of a row of X, from 1e-6 to 1e6; required when `epsilon`
                is finite. It sets the scale of messages and of the slopes' prior, not the privacy.
                By public numbers, give features similar scales and means near 0.
        """,
    )
    max_rows_per_client: int | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int, >= 1, or None
                Rows up to which a client counts in full, about those of a typical client; required
                when `epsilon` is finite, and at most 1e6. Further rows inform less on slopes within
                clients.
        """,
    )
    n_rounds: int = parameter(
        default=12,
        ranges=[Interval(Integral, 2, None, closed="left")],
        text="int, >= 2\n    Noisy sums of a private fit.",
    )
    ledger = parameter()
    random_state = parameter()

    @property
    def _public_response(self):
        """What a private fit assumes to be public of the response, after a semicolon."""
        return ""

    def _cut_response(self, y):
        return self._checked_response(y)

    def _check_groupings(self, prior):
        super()._check_groupings(prior)
        if self.quadrature not in ("auto", "laplace", 1):
            raise ValueError(
                f"quadrature={self.quadrature} does not go with groupings, which are fitted by "
                "Laplace's approximation; take 'auto' or 'laplace'."
            )

    @with_iterations
    def _fit_link(self, X, y, groups, sample_weight, offset_of):
        """Fit; `offset_of` checks the offset of rows, (n_rows,) or None, or cuts it."""
        prior, private = resolve_prior(self), math.isfinite(self.epsilon)
        self._check_and_charge(prior, X, groups, sample_weight)
        # A private fit must not choose columns by their values.
        groupings = None if private else self.groupings
        table_of_all, (columns, priors) = X, resolve_groupings(X, groupings, sample_weight)
        if priors:
            self._check_groupings(prior)
            X, values = columns.split(X)
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
        if priors and family.n_outputs > 1:
            raise ValueError(
                f"groupings go with two classes; got {family.n_outputs + 1} classes in y and "
                f"the grouping columns {list(columns.labels)}. Set groupings=None, and encode the "
                "columns or leave them out."
            )
        if known is not None and len(known) > len(rows.y):  # rows of weight 0 are absent
            known = known[np.asarray(sample_weight) > 0]
        check_one_predictor(known, family.n_outputs)
        table = make_table(state["_design"], features, rows._replace(y=response), offset=known)
        if not private:
            check_row_ranges(table)
        design, options = state["_design"], self._fit_parameters()
        # Without the levels: whether slopes vary by client shows in the clients' rows.
        table, design, losses = choose_random(table, design, prior, family, options)
        state |= attributes | {
            "_design": design,
            "_row_family": family,
            "_with_offset": known is not None,
            "random_losses_": losses,
        }
        if priors:
            read = columns, values, priors
            # One row a level says nothing of classes, and looks like a dispersion.
            keeps = columns.are_named and not family.needs_repeats
            state |= self._grouped_state(
                table_of_all, *read, state, features, rows, sample_weight, keeps
            )
        return self._fit_table(table, state, prior)

    def _fit_without_privacy(self, table, prior, state):
        options, family = self._fit_parameters(), state["_row_family"]
        first = 0 if prior.mean is None else table.n_random
        grouped = state.pop("_grouped", None)
        if grouped is None:
            warn_of_long_fit(table, family)
            estimates = fit_link(table, prior, family, options)
            # None where a penalty identifies all coefficients.
            at = np.flatnonzero(~estimates.estimable.all(axis=0))
            estimates = estimates._replace(row_space=find_row_space(table, at, first))
        else:
            estimates = fit_grouped_link(table, prior, family, options, grouped)
        warn_of_separation(self, estimates, table, first)
        warn_of_lost_accuracy(self, estimates)
        warn_unidentified(estimates.row_space, table.names)
        return estimates

    def _fit_privately(self, table, prior, state):
        family, start = state["_row_family"], self._private_start()
        names = self._released, self._not_released
        return fit_private_link(table, prior, family, start, self, names)

    def _exact_state(self, table, prior, estimates, state):
        family = state["_row_family"]
        quadrature = self.quadrature if estimates.levels is None else "laplace"
        integration = partial(_integration, quadrature, family)
        # A family without a dispersion is one with a known dispersion of 0.
        noise = None if family.has_dispersion else 0.0
        design, c = state["_design"], family.n_outputs
        evidence = gaussian_evidence(table, design, prior, noise, integration, c)
        # Comparisons of fits check the mean and the mean square of the offset for equality.
        if table.offset is not None:
            powers = table.offset, table.offset**2
            moments = np.average(powers, axis=1, weights=table.weights)
            evidence = evidence._replace(offset=tuple(moments.tolist()))
        if estimates.levels is not None:
            known = estimates.variances.is_known[1:]
            evidence = with_groupings(evidence, design.order, estimates.levels, known)
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
            # The sums of two classes add up to the number of rows, so one is enough.
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
        """As `_predictors`, plus a known `offset` (n_rows,), which is needed if fit got one."""
        check_is_fitted(self)
        if self._with_offset and offset is None:
            raise ValueError(self._MISSING_OFFSET.format(name=type(self).__name__))
        predictors, x, codes, levels = self._row_predictions(X, groups)
        known = checked_offset(offset, x)
        check_one_predictor(known, np.size(self.population_intercept_))
        return predictors if known is None else predictors + known, x, codes, levels

    def _predictor_law(self, X, groups, offset):
        """PredictorLaw of rows, and their design matrix."""
        predictors, x, codes, levels = self._predictors_with(X, groups, offset)
        shifts = self._level_predictors(x, levels, "shifts") if levels else 0.0

        def covariances_of(rows, combinations):
            chosen = levels and [level[rows] for level in levels]
            return self._given_population(x[rows], codes[rows], combinations, chosen)

        law = PredictorLaw(
            predictors.reshape(len(x), -1),
            self._row_family.coding,
            getattr(self, "_effects", None),  # a released model has no clients
            x[:, self._design.random],
            codes,
            covariances_of,
            levels,
            shifts,
        )
        return law, x

    def _given_population(self, x, codes, combinations, levels):
        """Covariances (n, a, a) of combinations (a, c) of predictors."""
        # By the curvature at the modes; population and spread count as known.
        known, a = codes >= 0, len(combinations)
        if levels:
            posterior = self._grouped_posterior().given_population
            variances = posterior.variances(x[:, self._design.order], codes, levels)
            return variances[:, None, None] * np.square(combinations)
        result = np.zeros((len(x), a, a))
        new = cross_outputs(combinations, x[~known])
        result[~known] = self._errors.between_covariances(new)
        # A single client without a prior is its own population.
        if known.any() and hasattr(self._posterior, "given_population"):
            ordered = cross_outputs(combinations, x[known][:, self._design.order])
            result[known] = self._posterior.given_population(ordered, codes[known])
        return result

    def _posterior_moments(self, x, law, combination=(1.0,)):
        """Mean less the mode, variance and third central moment of a combination of predictors.

        Arrays (n,), for rows x (n, p) of the design and their PredictorLaw. The variance counts all
        errors.
        """
        codes, third = law.codes, np.zeros(len(x))
        shift, known = law.shifts + np.zeros(len(x)), codes >= 0
        if law.levels:
            variance = self._row_variances(x, codes, law.levels)
        else:
            variance = self._variances(x, codes, combination)
        if known.any():
            z = x[known][:, self._design.random]
            coded = np.dot(combination, self._row_family.coding)
            shifts, added, third[known] = self._effects.moments(z, codes[known], coded)
            shift[known] += shifts
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
            # The distance of a bound gives the variance with all its errors. Squares of huge
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
    n_points = choose_n_points(quadrature, family, np.empty((0, n_varying + rank)))
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
