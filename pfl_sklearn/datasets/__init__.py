"""Small tables, generators of the papers' settings, and loaders of public tables."""

from pfl_sklearn.datasets._generators import (
    expand_counts,
    make_bernoulli_clients,
    make_gaussian_clients,
    make_ppsgd_regression,
)
from pfl_sklearn.datasets._images import fetch_cifar10, fetch_femnist, fetch_mnist
from pfl_sklearn.datasets._label_skew import (
    load_digits_clients,
    make_dirichlet_clients,
    make_label_skew_clients,
)
from pfl_sklearn.datasets._tables import (
    load_baseball,
    load_county_elections,
    load_heart_disease,
    load_parkinsons,
    load_radon,
)

__all__ = [
    "expand_counts",
    "fetch_cifar10",
    "fetch_femnist",
    "fetch_mnist",
    "load_baseball",
    "load_county_elections",
    "load_digits_clients",
    "load_heart_disease",
    "load_parkinsons",
    "load_radon",
    "make_bernoulli_clients",
    "make_dirichlet_clients",
    "make_gaussian_clients",
    "make_label_skew_clients",
    "make_ppsgd_regression",
]
