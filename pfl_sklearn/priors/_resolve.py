"""The parameter `prior` of an estimator: its name or object, and whether the likelihood takes it.

An estimator with such a parameter names its likelihood in ``_likelihood`` and takes
:func:`default_prior` as its ``_default_component``.
"""

from sklearn.base import clone

from pfl_sklearn.priors import _PRIORS_OF, GaussianPrior, GridPrior
from pfl_sklearn.priors._mixture import MixturePrior

# The shape of the covariance of a GaussianPrior that names none: outputs of means have one unit,
# coefficients have those of their columns.
_DEFAULT_COVARIANCE_TYPES = {
    "mean": "spherical",
    "linear": "diag",
    "logistic": "diag",
    "poisson": "diag",
}
# What the counts are of which a grid prior has the parameter.
_OUTCOMES = {"proportion": "binomial", "rate": "poisson"}
# The shapes of a covariance that a likelihood can estimate, where it cannot estimate all of them.
COVARIANCE_TYPES = {("mean", GaussianPrior): ("spherical", "diag")}


def default_prior(estimator, name, value):
    """Prior behind the name in an estimator's parameter `prior`; None for anything else.

    Raises ValueError if no prior of that name goes with the estimator's likelihood.
    """
    if name != "prior":
        return None
    priors = _PRIORS_OF[estimator._likelihood]
    if not isinstance(value, str) or value not in priors:
        raise _unsupported(estimator, value)
    return priors[value]()


def resolve_prior(estimator):
    """Validated clone of an estimator's parameter `prior`, which is a name or an object.

    Raises ValueError if that prior, its outcome, or the covariance to estimate does not go with the
    estimator's likelihood.
    """
    prior, likelihood = estimator.prior, estimator._likelihood
    if isinstance(prior, str):
        prior = default_prior(estimator, "prior", prior)
    # A subclass may be another distribution.
    if type(prior) not in _PRIORS_OF[likelihood].values():
        raise _unsupported(estimator, prior)
    prior = clone(prior)  # a fit alters no argument
    prior._validate_params()
    if type(prior) is GaussianPrior and prior.covariance_type is None:
        prior.covariance_type = _DEFAULT_COVARIANCE_TYPES[likelihood]
    if isinstance(prior, MixturePrior):
        prior.n_components = prior._size
    if type(prior) is GridPrior:
        outcome = _OUTCOMES[likelihood]
        if prior.outcome not in (None, outcome):
            raise ValueError(
                f"outcome={prior.outcome!r} of GridPrior does not go with "
                f"{type(estimator).__name__}; expected {outcome!r} or None."
            )
        prior.outcome = outcome
    types = COVARIANCE_TYPES.get((likelihood, type(prior)))
    if types is not None and prior.covariance_type not in types:
        raise ValueError(
            f"covariance_type={prior.covariance_type!r} does not go with "
            f"{type(estimator).__name__}; expected {' or '.join(map(repr, types))}."
        )
    return prior


def _unsupported(estimator, prior):
    """Error for a prior that does not go with an estimator's likelihood."""
    priors = _PRIORS_OF[estimator._likelihood]
    names = " or ".join(f"{name!r} ({cls.__name__})" for name, cls in priors.items())
    return ValueError(
        f"prior={prior!r} does not go with {type(estimator).__name__}; expected {names}."
    )
