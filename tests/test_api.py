"""The public interface: what is exported is documented, and what it takes has not changed."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.helpers.oracles import read_oracle
from tests.helpers.public_interface import (
    PACKAGES,
    documented_parameters,
    exported,
    public_interface,
)

API_PAGE = Path(__file__).parents[1] / "docs" / "api.rst"

# Where the interface deliberately differs from the stored one.
DELETED = {
    ("PPSGDRegressor", "loss"),  # it had one legal value
    ("SampledGaussian", "n_sampled"),  # nobody set it
    ("calibrate_rounds", "n_sampled"),
}
WIDENED = {("score", "y"): "y=None"}  # of four estimators y had no default
# What the class inside a ClientColumn has was handed on without showing; components named by a
# string or None get their default object before a parameter of theirs is set.
NEW = {("ClientColumn", name) for name in ("for_client", "privacy_", "release", "summary")}
NEW |= {("ClientMixin", "set_params")}

# Parameters that have a type and no text, or not even that. Nothing may be added here.
WITHOUT_TEXT = {
    "ClientShuffleSplit": "n_splits",
    "FitCost": "n_fits",
    "GaussianEvent": "n_releases",
    "GaussianMechanism": "epsilon delta",
    "PPSGDClassifier": "delta",
    "PPSGDRegressor": "delta",
    "PersonalizedLinearRegression": "fit_intercept max_iter",
    "PersonalizedLogisticRegression": "fit_intercept",
    "PrivacyAccuracyDisplay": "score_name",
    "PrivacyReport": "delta mechanism n_clients sampling sampling_rate rounds accountant "
    "assumptions warnings",
    "PrivateClustering": "epsilon delta n_features n_steps n_candidates",
    "PureEvent": "epsilon delta relation",
    "RegressionMoments": "n_features",
    "SampledGaussian": "n_rounds",
    "SearchCost": "delta unit relation scores_protected notes package_version",
    "ShrinkageDisplay": "clients local personalized lower upper population truth",
    "WeightAndRisk": "weight",
    "beta_moments": "alpha beta",
    "beta_parameters": "mean variance",
    "beta_risk": "alpha beta",
    "beta_shrinkage": "trials",
    "calibrate_noise": "epsilon delta sensitivity relation under n_releases",
    "calibrate_rounds": "epsilon delta",
    "client_scores": "X y",
    "compose_gdp": "mus",
    "epsilon_spent": "delta",
    "expand_counts": "successes trials",
    "gdp_delta": "epsilon",
    "gdp_epsilon": "mu delta",
    "gdp_mu": "delta",
    "load_digits_clients": "n_clients",
    "local_noise_std": "epsilon delta",
    "make_bernoulli_clients": "n_clients random_state",
    "make_gaussian_clients": "n_clients random_state",
    "make_ppsgd_regression": "n_clients random_state",
    "mean_half_width": "between_std noise_std",
    "odds_lower_bound": "n_draws",
    "personalization_threshold": "delta",
    "ppsgd_private_bound": "alpha n_rounds",
    "quantizer_variance": "half_width n_bits",
    "released_mean_risk": "n_clients n_rows between_variance noise_variance n_features",
    "selection_epsilon": "delta relation",
    "smoothness_alpha": "alpha weighting",
    "total_gradient_variance": "alpha n_clients",
}


def documented():
    """Objects that have a row in the tables of the API page."""
    module, found = None, set()
    for line in API_PAGE.read_text().splitlines():
        if line.startswith(".. currentmodule::"):
            module = importlib.import_module(line.split()[-1])
        elif row := re.fullmatch(r"   (\w+)", line):
            found.add(id(getattr(module, row[1])))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_page_lists_every_exported_name(package):
    rows = documented()
    names = {name: value for name, value in exported(package).items() if not is_module(value)}
    assert names
    assert [name for name, value in names.items() if id(value) not in rows] == []


def is_module(value):
    return inspect.ismodule(value) or isinstance(value, str)  # a version


def allowed(name, parameters):
    """Parameters of a stored name as they may be today."""
    if not isinstance(parameters, list):
        return parameters
    owner = name.rpartition(".")[2]
    kept = [each for each in parameters if (owner, each.partition("=")[0]) not in DELETED]
    return [WIDENED.get((owner, each), each) for each in kept]


def last_two(name):
    return tuple(name.split(".")[-2:])


def test_no_name_or_parameter_changed():
    before, now = read_oracle("public_interface"), public_interface()
    gone, added = before.keys() - now.keys(), now.keys() - before.keys()
    assert sorted(name for name in gone if last_two(name) not in DELETED) == []
    assert sorted(name for name in added if last_two(name) not in NEW) == []
    changed = {
        name: (before[name], now[name])
        for name in before.keys() & now.keys()
        if before[name] != "inherited" and allowed(name, before[name]) != allowed(name, now[name])
    }
    assert changed == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_parameter_has_a_text(package):
    missing = []
    for name, value in exported(package).items():
        if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
            continue
        texts = documented_parameters(value.__doc__)
        taken = [each for each in inspect.signature(value).parameters if each != "self"]
        known = WITHOUT_TEXT.get(name, "").split()
        missing += [f"{name}.{each}" for each in taken if not texts.get(each) and each not in known]
    assert missing == []
