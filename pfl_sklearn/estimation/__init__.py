"""Estimation of each client's mean, proportion or rate."""

from pfl_sklearn.estimation._bernoulli import BernoulliMean
from pfl_sklearn.estimation._gaussian import GaussianMean
from pfl_sklearn.estimation._poisson import PoissonMean

__all__ = ["BernoulliMean", "GaussianMean", "PoissonMean"]
