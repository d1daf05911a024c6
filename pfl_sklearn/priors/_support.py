"""Which prior goes with which likelihood: the one table."""

from sklearn.base import clone

from pfl_sklearn.priors._beta import BetaPrior
from pfl_sklearn.priors._discrete import DiscretePrior
from pfl_sklearn.priors._gaussian import GaussianPrior
from pfl_sklearn.priors._gaussian_mixture import GaussianMixturePrior
from pfl_sklearn.priors._grid import GridPrior
from pfl_sklearn.priors._laplace import LaplacePrior

SUPPORTED = {
    "GaussianMean": {
        "gaussian": GaussianPrior,
        "gaussian_mixture": GaussianMixturePrior,
        "discrete": DiscretePrior,
    },
    "BernoulliMean": {"beta": BetaPrior, "grid": GridPrior},
    "PersonalizedLinearRegression": {
        "gaussian": GaussianPrior,
        "laplace": LaplacePrior,
        "gaussian_mixture": GaussianMixturePrior,
        "discrete": DiscretePrior,
    },
    "PersonalizedLogisticRegression": {"gaussian": GaussianPrior},
}
# Shapes of a covariance that a likelihood can estimate, where it is not all of them.
COVARIANCE_TYPES = {("GaussianMean", GaussianPrior): ("spherical", "diag")}


def resolve_prior(prior, likelihood):
    """Validated clone of the `prior` parameter of an estimator, a name or an object.

    Raises ValueError if that prior does not go with that likelihood.
    """
    supported = SUPPORTED[likelihood]
    if isinstance(prior, str) and prior in supported:
        return supported[prior]()
    if type(prior) not in supported.values():
        names = " or ".join(f"{name!r} ({cls.__name__})" for name, cls in supported.items())
        raise ValueError(f"prior={prior!r} does not go with {likelihood}; expected {names}.")
    prior = clone(prior)
    prior._validate_params()
    types = COVARIANCE_TYPES.get((likelihood, type(prior)))
    if types is not None and prior.covariance_type not in types:
        raise ValueError(
            f"covariance_type={prior.covariance_type!r} does not go with {likelihood}; expected "
            f"{' or '.join(map(repr, types))}."
        )
    return prior
