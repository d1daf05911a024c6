"""Estimation of each client's mean or proportion."""

from pfl_sklearn.estimation._bernoulli import BernoulliMean
from pfl_sklearn.estimation._gaussian import GaussianMean

__all__ = ["BernoulliMean", "GaussianMean"]
