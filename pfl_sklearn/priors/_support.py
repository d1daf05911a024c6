"""Which prior goes with which likelihood: the one table."""

from sklearn.base import clone

from pfl_sklearn.priors._beta import BetaPrior
from pfl_sklearn.priors._gaussian import GaussianPrior
from pfl_sklearn.priors._grid import GridPrior

SUPPORTED = {
    "GaussianMean": {"gaussian": GaussianPrior},
    "BernoulliMean": {"beta": BetaPrior, "grid": GridPrior},
}


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
    return prior
