"""Likelihood ratio test of two nested regressions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._unwrap import feature_names_of, innermost_estimator
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.inspection._null_distribution import SHIFT_OF_SCALE, extension, names_in
from pfl_sklearn.linear_model._base import BasePersonalizedRegression

# Tolerance of a search for the maximum of the log-likelihood: in nats, and relative to its size.
_ABSOLUTE_GAP, _RELATIVE_GAP = 1e-5, 1e-9


class LikelihoodRatioTest(NamedTuple):
    """Outcome of a likelihood ratio test.

    Attributes
    ----------
    statistic : float
        Twice the difference of the log-likelihoods.
    p_value : float
        Probability of at least this statistic if the smaller model holds.
    degrees_of_freedom, weights : tuples, or None
        Those of the mixed chi-square distributions in the reference; 0 degrees mean a point mass at
        0. None if the distribution is simulated.
    log_likelihoods : tuple of two floats
        Of the smaller and the larger model, restricted after fits by REML.
    n_parameters : tuple of two ints
        Numbers of estimated parameters, as ``aic_`` counts them.
    """

    statistic: float
    p_value: float
    degrees_of_freedom: tuple[int, ...] | None
    weights: tuple[float, ...] | None
    log_likelihoods: tuple[float, float]
    n_parameters: tuple[int, int]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={_short(value)}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({fields})"


def likelihood_ratio_test(smaller: Any, larger: Any) -> LikelihoodRatioTest:
    r"""Test a smaller model against a larger one that contains it.

    The statistic is :math:`2 (\ell_1 - \ell_0)`, with the log-likelihoods of the larger and the
    smaller model. Its null distribution is

    - chi-square, where the larger model has more population coefficients, or more parameters in the
      covariance of the same coefficients;
    - :math:`\frac12 \chi^2_k + \frac12 \chi^2_{k+1}`, where one more coefficient varies by client
      and has k covariances with others, because a variance cannot be negative;
    - a mixture of :math:`\chi^2_0, \dots, \chi^2_r` with binomial weights, where r more
      coefficients vary independently;
    - a mixture of :math:`\chi^2_0, \dots, \chi^2_{r (r + 1) / 2}`, plus one degree of freedom for
      each covariance with others, where r more coefficients vary with a full covariance.

    Coefficients that vary by the levels of `groupings` count as if levels were clients. The
    statistics of different groupings are taken as independent.

    Parameters
    ----------
    smaller, larger : fitted estimators
        Two models of the same rows under Gaussian priors: a ``PersonalizedLinearRegression``,
        ``PersonalizedLogisticRegression`` or ``PersonalizedPoissonRegression``, or a pipeline,
        wrapper or search around one. The smaller must be a special case of the larger: Poisson
        counts are one of negative binomial counts, and ``GaussianPrior(covariance=0.0)`` is the
        model without differences between clients.

    Returns
    -------
    LikelihoodRatioTest
        A named tuple.

    Raises
    ------
    ValueError
        - If the smaller model is not a special case of the larger one, or is the same.
        - If the models were fitted to different rows, or if columns of one name differ.
        - If the log-likelihoods are not comparable: restricted ones with different population
          coefficients, a restricted and a full one, Laplace's approximation and quadrature, or fits
          with a penalty.
        - If a model has no log-likelihood, as after private fits and with more than 4,000 effects
          of levels, or its prior is not Gaussian.

    Warns
    -----
    ConvergenceWarning
        If the larger model has the smaller log-likelihood: its search has not converged. The
        statistic is then 0.

    Notes
    -----
    The distributions hold for many clients (Self and Liang, 1987; Stram and Lee, 1994). Binomial
    weights are exact if estimates of the variances are uncorrelated, the weights of a full
    covariance if all clients have the same design. With few clients, more than half of the
    variances are estimated as 0, and the tests are conservative. The smaller model's covariance
    must not be singular. For covariances of low rank the distribution is simulated, for columns
    whose estimates have equal errors.

    References
    ----------
    Self, S. G. and Liang, K.-Y. (1987). Asymptotic properties of maximum likelihood estimators and
    likelihood ratio tests under nonstandard conditions. JASA.

    Stram, D. O. and Lee, J. W. (1994). Variance components testing in the longitudinal mixed
    effects model. Biometrics.

    Examples
    --------
    Does the intercept differ between clients?

    >>> import numpy as np
    >>> from pfl_sklearn.inspection import likelihood_ratio_test
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> from pfl_sklearn.priors import GaussianPrior
    >>> rng = np.random.default_rng(0)
    >>> X, clinic = rng.normal(size=(200, 1)), np.repeat(np.arange(20), 10)
    >>> y = X[:, 0] + 0.5 * rng.normal(size=20)[clinic] + rng.normal(size=200)
    >>> pooled = PersonalizedLinearRegression(GaussianPrior(covariance=0.0))
    >>> varying = PersonalizedLinearRegression(random="intercept")
    >>> test = likelihood_ratio_test(
    ...     pooled.fit(X, y, groups=clinic), varying.fit(X, y, groups=clinic))
    >>> test.degrees_of_freedom, test.weights
    ((0, 1), (0.5, 0.5))
    >>> test.p_value < 0.001
    True
    """
    models = comparable_model("smaller", smaller), comparable_model("larger", larger)
    check_same_rows(*models)
    reference = extension(*models)
    one, two = (float(model.fitted.log_likelihood_) for model in models)
    statistic = 2 * (two - one)
    rounding = 2 * (_ABSOLUTE_GAP + _RELATIVE_GAP * abs(one))
    if statistic < -rounding:  # impossible at the maxima, as the larger model contains the smaller
        warn_caller(
            f"larger has a log-likelihood of {two:.6g}, less than the {one:.6g} of "
            "smaller, so its search has not converged; the statistic is set to 0. Raise max_iter, "
            "or bring the features to similar scales.",
            ConvergenceWarning,
        )
    # If the larger model estimates a variance as 0, the statistic is 0 up to rounding errors.
    statistic = 0.0 if statistic <= rounding else statistic
    return LikelihoodRatioTest(
        statistic,
        reference.tail(statistic),
        # Simulated distributions have neither.
        getattr(reference, "degrees_of_freedom", None),
        getattr(reference, "weights", None),
        (one, two),
        (models[0].evidence.n_parameters, models[1].evidence.n_parameters),
    )


def _short(value):
    """Text of a field: four digits, or one decimal for large numbers."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))}{',' if len(value) == 1 else ''})"
    if not isinstance(value, float):
        return repr(value)
    # Tenths matter even if a log-likelihood is in the thousands.
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"


_SAME_MOMENTS = 1e-8  # relative difference of moments that the order of rows explains


class ComparableModel(NamedTuple):
    """A fitted regression and the names of its columns."""

    fitted: BasePersonalizedRegression
    evidence: Any  # Evidence with a form, so that its parameters can be counted
    names: tuple[str, ...]  # (p,)
    grouping: Any = None  # name of the one whose covariance `evidence` has; None: the clients

    @property
    def free(self) -> set[str]:
        """Names of the columns whose population coefficient was estimated."""
        return {self.names[k] for k in np.flatnonzero(np.isnan(self.evidence.form.means[0]))}

    @property
    def covariance_name(self) -> str:
        """Text about the covariance, for an error."""
        form = self.evidence.form
        between = "" if self.grouping is None else f" between levels of {self.grouping!r}"
        if form.shape == "zero":
            return f"no covariance{between}"
        columns = names_in(self.names[k] for k in form.varying)
        rank = f" of rank {form.rank}" if form.rank else ""
        return f"a {form.shape} covariance of {columns}{rank}{between}"


def comparable_model(parameter: str, estimator: Any) -> ComparableModel:
    """The model inside `estimator`, which is the argument `parameter`.

    Raises NotFittedError before a fit, and ValueError for a model without a likelihood.
    """
    fitted = innermost_estimator(estimator)
    check_is_fitted(fitted)
    if not isinstance(fitted, BasePersonalizedRegression):
        raise ValueError(
            f"{parameter} must be a fitted PersonalizedLinearRegression, "
            "PersonalizedLogisticRegression or PersonalizedPoissonRegression, or hold one; got "
            f"{type(fitted).__name__}."
        )
    evidence = getattr(fitted, "_evidence", None)
    if evidence is None:
        raise ValueError(
            f"{parameter} must be a fit of all clients without privacy; got a "
            f"{type(fitted).__name__} from a fit with a finite epsilon, release() or for_client()."
        )
    if evidence.form is None:
        raise ValueError(
            f"{parameter} must have a GaussianPrior, fitted by likelihood; got "
            f"{fitted._parameter_text()}."
        )
    if np.isnan(fitted.log_likelihood_) and evidence.groupings:
        raise ValueError(
            f"the log_likelihood_ of {parameter} is NaN, so there is no ratio: its levels have "
            "more effects than the 4,000 for which a likelihood is computed."
        )
    if np.isnan(fitted.log_likelihood_):
        raise ValueError(
            f"the log_likelihood_ of {parameter} is NaN, so there is no ratio; fit it with a "
            "finite covariance and with more rows than coefficients in some client."
        )
    if getattr(fitted, "population_penalty", 0.0):
        raise ValueError(
            f"{parameter} has population_penalty={fitted.population_penalty}, so its likelihood "
            "is not at its maximum; fit it with population_penalty=0."
        )
    # Names from before steps that change the columns, such as an expansion, are not used.
    features = feature_names_of(estimator)
    features = features if len(features or ()) == len(fitted.coef_names_) else None
    names = fitted._named_design(features).names
    if len(set(names)) < len(names):
        raise ValueError(f"{parameter} has columns of the same name: {names_in(names)}.")
    return ComparableModel(fitted, evidence, names)


def check_same_rows(smaller: ComparableModel, larger: ComparableModel) -> None:
    """Raise ValueError unless both models are of one class and were fitted to the same rows."""
    first, second = smaller.fitted, larger.fitted
    one, two = smaller.evidence.moments, larger.evidence.moments
    if type(first).__name__ != type(second).__name__:
        raise ValueError(
            f"smaller is a {type(first).__name__} and larger a {type(second).__name__}; expected "
            "models of one class, whose likelihoods compare."
        )
    if one.n_rows != two.n_rows:
        raise _different_rows(f"{one.n_rows} and {two.n_rows} rows")
    if not np.array_equal(first.clients_, second.clients_):
        raise _different_rows(
            f"different clients ({len(first.clients_)} and {len(second.clients_)}, or other ids)"
        )
    if not np.array_equal(first.n_samples_per_client_, second.n_samples_per_client_):
        raise _different_rows("different numbers of rows per client")
    groupings = dict(larger.evidence.groupings)
    for name, grouping in smaller.evidence.groupings:
        other = groupings.get(name, grouping)
        same = np.array_equal(grouping.levels, other.levels)
        if not (same and np.array_equal(grouping.n_rows, other.n_rows)):
            raise _different_rows(f"different levels of {name!r}, or numbers of rows per level")
    if not np.array_equal(getattr(first, "classes_", 0), getattr(second, "classes_", 0)):
        raise _different_rows(f"classes {first.classes_.tolist()} and {second.classes_.tolist()}")
    offsets = smaller.evidence.offset, larger.evidence.offset
    if not np.allclose(*offsets, rtol=_SAME_MOMENTS, atol=_SAME_MOMENTS):
        raise _different_rows("with different exposure or offset")
    if abs(one.weight - two.weight) > _SAME_MOMENTS * one.weight:
        raise _different_rows(f"weights that sum to {one.weight:.6g} and {two.weight:.6g}")
    # Models keep no rows, so we compare first and second moments; the last is the response.
    if _differing(one, two, [-1], [-1]).any():
        raise _different_rows("different responses or weights")
    names = [name for name in smaller.names if name in larger.names]
    at = [[*(model.names.index(name) for name in names), -1] for model in (smaller, larger)]
    differing = _differing(one, two, *at)
    if differing.any():
        columns = [name for name, differs in zip(names, differing, strict=False) if differs]
        raise ValueError(
            f"the columns {names_in(columns)} of smaller and larger have the same names but "
            "different values, or belong to different rows. Give data frames, or transform "
            "both in the same way."
        )


def _different_rows(difference):
    return ValueError(f"smaller and larger were fitted to different rows: {difference}.")


def _differing(one, two, first, second):
    """Whether columns (k,) at two sets of positions differ in their moments."""
    means, others = one.means[first], two.means[second]
    squares, seconds = one.covariance[np.ix_(first, first)], two.covariance[np.ix_(second, second)]
    scales = np.sqrt(np.maximum(np.diag(squares), np.diag(seconds)))
    # The variance of a column far from 0 has fewer correct digits.
    scales = scales + SHIFT_OF_SCALE * np.maximum(abs(means), abs(others))
    far = abs(squares - seconds) > _SAME_MOMENTS * np.multiply.outer(scales, scales)
    differing = np.diag(far) | (abs(means - others) > _SAME_MOMENTS * scales + 1e-12 * abs(means))
    # The same columns in another order of rows differ only in their products.
    return differing if differing.any() else far.any(axis=0)
