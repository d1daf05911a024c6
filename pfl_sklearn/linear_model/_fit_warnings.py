"""What fits of regressions with a link warn of."""

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._base import warn_not_converged
from pfl_sklearn.linear_model._separation import find_separation

# Pearson's chi-square per degree of freedom from which a fit warns: intervals that should have 1.7
# times their length cover .74 instead of .95.
_OVERDISPERSED = 3.0
_CLEAR = 4.0  # standard errors above 1: one surprising count among tiny means is no evidence


class SeparationWarning(UserWarning):
    """The likelihood has no finite maximum: some combination of the features tells too much.

    It separates classes, or rows of count 0 from the others; or the differences between clients
    diverge.
    """


def warn_of_separation(estimator, estimates, table, first):
    """Warn of maxima that only a weak prior keeps finite; `first` is the first free column."""
    scale, separated, weak = estimator._scale, estimator._separated, estimates.weak
    if weak.separated:
        subject = find_separation(table, estimates.family, first).text(table.names)
        warn_caller(
            f"{subject} {separated}, so the likelihood has no finite maximum. The population "
            "slopes got a normal prior with standard deviation 2.5 per standard deviation of their "
            "feature.",
            SeparationWarning,
        )
    if weak.spread.any() and not weak.runaway:
        message = (
            "No client has rows of two classes, so the likelihood has no finite maximum in the "
            "differences between clients. Their standard deviations got a normal prior with "
            f"standard deviation 2.5 (in {scale})"
        )
        if estimates.family.n_outputs > 1:
            message += ", which alone sets their level: the data do not determine it"
        warn_caller(message + ". Give a known covariance instead.", SeparationWarning)
    if weak.runaway:
        warn_caller(
            "The differences between clients diverged to a standard deviation of more than 10 "
            f"{scale}: clients have too few rows for so many random coefficients, or these "
            f"separate {separated} of nearly every client. Their standard deviations got a normal "
            f"prior with standard deviation 1 (in {scale}). Give a known covariance instead, or "
            "let fewer coefficients vary by client (random).",
            SeparationWarning,
        )


def warn_of_lost_accuracy(estimator, estimates):
    """Warn of a search that ended early; advise more iterations only if it ran out of them."""
    if estimates.weak.coarse:
        warn_caller(
            f"quadrature={estimator.quadrature!r} takes too few points for clients so far apart: "
            "by more points the standard deviation between them differs by a factor of over 1.5. "
            "Take quadrature='auto'.",
            ConvergenceWarning,
        )
    # Rounding ends a search below max_iter, and modes that are lost stay lost.
    if estimates.modes_found and estimates.n_iter >= estimator.max_iter:
        warn_not_converged(estimator, estimates)
    elif not (estimates.modes_found and estimates.converged):
        warn_caller(
            f"{type(estimator).__name__} did not reach full accuracy: rounding stopped the search "
            "or the clients' modes. More iterations do not help; give a smaller covariance, or "
            "bring the features to a common scale.",
            ConvergenceWarning,
        )


def warn_of_overdispersion(estimates, table):
    """Warn of Poisson counts that differ much more than their means say."""
    dispersion, error = pearson_dispersion(estimates, table)
    if dispersion >= _OVERDISPERSED and dispersion - 1 > _CLEAR * error:
        warn_caller(
            f"The counts are overdispersed: squared residuals are {dispersion:.3g} times what "
            "family='poisson' expects given clients and features, so errors and intervals are too "
            "small. Take family='negative_binomial'.",
            UserWarning,
        )


def pearson_dispersion(estimates, table):
    """Pearson's chi-square of Poisson counts over its degrees of freedom, and its standard error.

    Means are those given the clients' effects. The degrees of freedom are the rows less what they
    determine themselves: the posterior variance of a row's predictor over that of its own count.
    """
    coefficients = estimates.coefficients[table.codes, 0]
    predictors = np.einsum("np,np->n", table.columns, coefficients)
    if table.offset is not None:
        predictors += table.offset
    mean = np.exp(predictors)
    weights = np.ones(len(mean)) if table.weights is None else table.weights
    # Given the variances: averages over them would take longer than the fit.
    posterior = getattr(estimates.posterior, "plug_in", estimates.posterior)
    used = weights * mean * posterior.variances(table.columns, table.codes)
    rest = float(np.sum(weights) - np.sum(used))
    if rest < 1:  # every row has an effect of its own, which takes all dispersion
        return 1.0, np.inf
    square = np.sum(weights * (table.y - mean) ** 2 / mean)
    # The square of one count's residual has the variance 2 + 1 / mean.
    return float(square / rest), float(np.sqrt(np.sum(weights * (2 + 1 / mean))) / rest)
