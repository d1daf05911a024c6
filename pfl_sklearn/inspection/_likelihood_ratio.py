"""Likelihood ratio test of two fitted regressions, of which one must extend the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._unwrap import feature_names_of, innermost_estimator
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.inspection._null_distribution import SHIFT_OF_SCALE, extension, names_in
from pfl_sklearn.linear_model._base import BasePersonalizedRegression

# How far a search may end below the maximum of the log-likelihood: nats, and relative to its size.
_ABSOLUTE_GAP, _RELATIVE_GAP = 1e-5, 1e-9


class LikelihoodRatioTest(NamedTuple):
    """Outcome of a likelihood ratio test.

    Attributes
    ----------
    statistic : float
        Twice the difference of the log-likelihoods.
    p_value : float
        Probability of at least this statistic if the smaller model holds.
    degrees_of_freedom : tuple of int, or None
        Those of the chi-square distributions whose mixture the statistic is compared with; 0 stands
        for the number 0. None where the distribution is simulated.
    weights : tuple of float, or None
        Their weights, which sum to 1.
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
    r"""Test whether the data need what a larger model has beyond a smaller one.

    The statistic is :math:`2 (\ell_1 - \ell_0)`, with the log-likelihoods of the larger and the
    smaller model. Its null distribution is

    - chi-square, where the larger model has more population coefficients, or more parameters in the
      covariance of the same coefficients;
    - :math:`\frac12 \chi^2_k + \frac12 \chi^2_{k+1}`, where one more coefficient varies by client
      and has k covariances with others, because a variance cannot be negative;
    - a mixture of :math:`\chi^2_0, \dots, \chi^2_r` with binomial weights, where r more
      coefficients vary independently;
    - a mixture of :math:`\chi^2_0, \dots, \chi^2_{r (r + 1) / 2}`, with the covariances with others
      added to each, where r more coefficients vary with a full covariance.

    Parameters
    ----------
    smaller, larger : fitted estimators
        Two models of the same rows under Gaussian priors: a ``PersonalizedLinearRegression`` or
        ``PersonalizedLogisticRegression``, or a pipeline, wrapper or search around one. The smaller
        model must be a special case of the larger one. A covariance of 0
        (``GaussianPrior(covariance=0.0)``) is the model without differences between clients.

    Returns
    -------
    LikelihoodRatioTest
        A named tuple of statistic, p_value, degrees_of_freedom, weights, log_likelihoods and
        n_parameters.

    Raises
    ------
    ValueError
        - If the smaller model is not a special case of the larger one, or is the same.
        - If the models were fitted to other rows, or if columns of one name differ.
        - If the log-likelihoods do not compare: restricted ones with other population
          coefficients, a restricted and a full one, Laplace's approximation and quadrature, or fits
          with a penalty.
        - If a model has no log-likelihood, as after private fits, or its prior is not Gaussian.

    Warns
    -----
    ConvergenceWarning
        If the larger model has the smaller log-likelihood: its search has not converged. The
        statistic is then 0.

    See Also
    --------
    PersonalizedLinearRegression.aic_ : Also for models of which neither contains the other.

    Notes
    -----
    The distributions hold for many clients (Self and Liang, 1987; Stram and Lee, 1994). Binomial
    weights are exact if the estimates of the variances are uncorrelated, the weights of a full
    covariance if all clients have the same design. With few clients the share of variances
    estimated as 0 is above one half, and the tests err on the safe side. The covariance of the
    smaller model must not be singular itself. For covariances of low rank the distribution is
    simulated, for columns whose estimates have equal errors.

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
    # A variance at 0 in the larger model: the statistic is 0 and its tail 1, but for rounding.
    statistic = 0.0 if statistic <= rounding else statistic
    return LikelihoodRatioTest(
        statistic,
        reference.tail(statistic),
        # A simulated distribution has neither.
        getattr(reference, "degrees_of_freedom", None),
        getattr(reference, "weights", None),
        (one, two),
        (models[0].evidence.n_parameters, models[1].evidence.n_parameters),
    )


def _short(value):
    """Text of a field: four digits, and one decimal of large numbers."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))}{',' if len(value) == 1 else ''})"
    if not isinstance(value, float):
        return repr(value)
    # Of a log-likelihood in the thousands, tenths still matter.
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"


_SAME_MOMENTS = 1e-8  # relative difference of moments that is due to the order of the rows


class ComparableModel(NamedTuple):
    """A fitted regression and the names of its columns."""

    fitted: BasePersonalizedRegression
    evidence: Any  # Evidence that has a form, and so a number of parameters
    names: tuple[str, ...]  # (p,)

    @property
    def free(self) -> set[str]:
        """Names of the columns whose population coefficient was estimated."""
        return {self.names[k] for k in np.flatnonzero(np.isnan(self.evidence.form.means[0]))}

    @property
    def covariance_name(self) -> str:
        """What the model says of the covariance, for an error."""
        form = self.evidence.form
        if form.shape == "zero":
            return "no covariance"
        columns = names_in(self.names[k] for k in form.varying)
        rank = f" of rank {form.rank}" if form.rank else ""
        return f"a {form.shape} covariance of {columns}{rank}"


def comparable_model(parameter: str, estimator: Any) -> ComparableModel:
    """The model inside `estimator`, which is the argument `parameter`.

    Raises NotFittedError before a fit, and ValueError for a model without a likelihood.
    """
    fitted = innermost_estimator(estimator)
    check_is_fitted(fitted)
    if not isinstance(fitted, BasePersonalizedRegression):
        raise ValueError(
            f"{parameter} must be a fitted PersonalizedLinearRegression or "
            f"PersonalizedLogisticRegression, or hold one; got {type(fitted).__name__}."
        )
    evidence = getattr(fitted, "_evidence", None)
    if evidence is None:
        raise ValueError(
            f"{parameter} must be a fit of all clients without privacy; got the "
            f"{type(fitted).__name__} that a fit with a finite epsilon, release() or for_client() "
            "gave."
        )
    if evidence.form is None:
        raise ValueError(
            f"{parameter} must have a GaussianPrior, fitted by likelihood; got {fitted._given()}."
        )
    if np.isnan(fitted.log_likelihood_):
        raise ValueError(
            f"the log_likelihood_ of {parameter} is NaN, so there is no ratio; fit it with a "
            "finite covariance and with rows to spare in some client."
        )
    if getattr(fitted, "population_penalty", 0.0):
        raise ValueError(
            f"{parameter} has population_penalty={fitted.population_penalty}, so its likelihood "
            "is not at its maximum; fit it with population_penalty=0."
        )
    # Steps that name other columns than the model sees, such as expanded ones, do not count.
    features = feature_names_of(estimator)
    features = features if len(features or ()) == fitted.n_features_in_ else None
    names = fitted._design.named(features).names
    if len(set(names)) < len(names):
        raise ValueError(f"{parameter} has columns of the same name: {names_in(names)}.")
    return ComparableModel(fitted, evidence, names)


def check_same_rows(smaller: ComparableModel, larger: ComparableModel) -> None:
    """Raise ValueError unless both models are of one class and were fitted to the same rows."""
    first, second = smaller.fitted, larger.fitted
    one, two = smaller.evidence.moments, larger.evidence.moments
    if type(first).__name__ != type(second).__name__:
        raise ValueError(
            f"smaller is a {type(first).__name__} and larger a {type(second).__name__}; their "
            "likelihoods differ."
        )
    if one.n_rows != two.n_rows:
        raise _other_rows(f"{one.n_rows} and {two.n_rows} rows")
    if not np.array_equal(first.clients_, second.clients_):
        raise _other_rows(
            f"other clients ({len(first.clients_)} and {len(second.clients_)}, or other ids)"
        )
    if not np.array_equal(first.n_samples_per_client_, second.n_samples_per_client_):
        raise _other_rows("other numbers of rows per client")
    if not np.array_equal(getattr(first, "classes_", 0), getattr(second, "classes_", 0)):
        raise _other_rows(f"classes {first.classes_.tolist()} and {second.classes_.tolist()}")
    known = smaller.evidence.offset, larger.evidence.offset
    if not np.allclose(*known, rtol=_SAME_MOMENTS, atol=_SAME_MOMENTS):
        raise _other_rows("with other exposure or offset")
    if abs(one.weight - two.weight) > _SAME_MOMENTS * one.weight:
        raise _other_rows(f"weights that sum to {one.weight:.6g} and {two.weight:.6g}")
    # Models keep no rows, so first and second moments stand for them; the last is the response.
    if _differing(one, two, [-1], [-1]).any():
        raise _other_rows("other responses, or the same with other weights")
    names = [name for name in smaller.names if name in larger.names]
    at = [[*(model.names.index(name) for name in names), -1] for model in (smaller, larger)]
    differing = _differing(one, two, *at)
    if differing.any():
        columns = [name for name, differs in zip(names, differing, strict=False) if differs]
        raise ValueError(
            f"the columns {names_in(columns)} of smaller and larger have the same names but other "
            "values, or go with other rows. Give data frames, or transform both alike."
        )


def _other_rows(what):
    return ValueError(f"smaller and larger were fitted to other rows: {what}.")


def _differing(one, two, first, second):
    """Which of the columns (k,) at two sets of positions differ in their moments."""
    means, others = one.means[first], two.means[second]
    squares, seconds = one.covariance[np.ix_(first, first)], two.covariance[np.ix_(second, second)]
    scales = np.sqrt(np.maximum(np.diag(squares), np.diag(seconds)))
    # A column far from 0 loses digits of its variance, as it is that of large numbers.
    scales = scales + SHIFT_OF_SCALE * np.maximum(abs(means), abs(others))
    far = abs(squares - seconds) > _SAME_MOMENTS * np.multiply.outer(scales, scales)
    own = np.diag(far) | (abs(means - others) > _SAME_MOMENTS * scales + 1e-12 * abs(means))
    # A pair of columns that go with other rows differs in the product alone.
    return own if own.any() else far.any(axis=0)
