"""Population priors: the distribution of the clients' parameters.

A prior is a small estimator. A parameter left None is estimated from the clients; a given one is
known. The fitted prior of an estimator (``prior_``) holds the estimates in its constructor
parameters, so you can pass it back in as known.

References
----------
Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.
"""

from typing import Any

from pfl_sklearn.priors._beta import BetaPrior
from pfl_sklearn.priors._dirichlet import DirichletPrior
from pfl_sklearn.priors._discrete import DiscretePrior
from pfl_sklearn.priors._gamma import GammaPrior
from pfl_sklearn.priors._gaussian import GaussianPrior
from pfl_sklearn.priors._gaussian_mixture import GaussianMixturePrior
from pfl_sklearn.priors._grid import GridPrior
from pfl_sklearn.priors._grouping import GroupingPrior
from pfl_sklearn.priors._laplace import LaplacePrior
from pfl_sklearn.priors._sparse_dirichlet import SparseDirichletPrior

__all__ = [
    "BetaPrior",
    "DirichletPrior",
    "DiscretePrior",
    "GammaPrior",
    "GaussianMixturePrior",
    "GaussianPrior",
    "GridPrior",
    "GroupingPrior",
    "LaplacePrior",
    "SparseDirichletPrior",
]

# Which prior goes with which likelihood, and its name there: the one table.
_PRIORS_OF: dict[str, dict[str, type[Any]]] = {
    "mean": {
        "gaussian": GaussianPrior,
        "gaussian_mixture": GaussianMixturePrior,
        "discrete": DiscretePrior,
    },
    "proportion": {"beta": BetaPrior, "grid": GridPrior},
    "rate": {"gamma": GammaPrior, "grid": GridPrior},
    "linear": {
        "gaussian": GaussianPrior,
        "laplace": LaplacePrior,
        "gaussian_mixture": GaussianMixturePrior,
        "discrete": DiscretePrior,
    },
    "logistic": {"gaussian": GaussianPrior},
    "poisson": {"gaussian": GaussianPrior},
}
