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
    methods_of,
    properties_of,
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
# Without noise PPSGD's rounds end when the loss is flat, and steps of a ratio that does not depend
# on the number of clients get there.
ADDED = {"tol=0.001", "max_rounds=10000", "validation_fraction=0.2"}
for _name in ("PPSGDRegressor", "PPSGDClassifier"):
    WIDENED |= {(_name, "alpha=1.0"): "alpha='auto'", (_name, "n_rounds=100"): "n_rounds=None"}
# What the class inside a ClientColumn has was handed on without showing; components named by a
# string or None get their default object before a parameter of theirs is set.
NEW = {("ClientColumn", name) for name in ("for_client", "privacy_", "release", "summary")}
NEW |= {("ClientMixin", "set_params")}


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


def present(name, parameters):
    """Parameters of today without those that were added, which are keywords with a default."""
    kept = allowed(name, parameters)
    if not name.endswith(("PPSGDRegressor", "PPSGDClassifier")):
        return kept
    return [each for each in kept if each not in ADDED]


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
        if before[name] != "inherited" and allowed(name, before[name]) != present(name, now[name])
    }
    assert changed == {}


def classes(package):
    return {name: each for name, each in exported(package).items() if inspect.isclass(each)}


def without_text(value):
    """Parameters of a function or class whose text is missing; a type alone is not a text."""
    texts = documented_parameters(value.__doc__)
    taken = [each for each in inspect.signature(value).parameters if each != "self"]
    return [each for each in taken if not texts.get(each)]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_parameter_has_a_text(package):
    missing = []
    for name, value in exported(package).items():
        if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
            continue
        missing += [f"{name}.{each}" for each in without_text(value)]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_parameter_of_a_method_has_a_text(package):
    missing = {
        f"{method.__qualname__}.{each}"
        for kind in classes(package).values()
        for method in methods_of(kind).values()
        for each in without_text(method)
    }
    assert sorted(missing) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_method_and_property_has_a_docstring(package):
    missing = [
        f"{owner}.{name}"
        for owner, kind in classes(package).items()
        for name, value in (methods_of(kind) | properties_of(kind)).items()
        if not value.__doc__
    ]
    assert missing == []


def test_the_tests_of_docstrings_find_methods_of_every_sort():
    report, column = exported("pfl_sklearn.privacy"), exported("pfl_sklearn.compose")
    assert "from_dict" in methods_of(report["PrivacyReport"])  # a classmethod
    assert "noise_std" in properties_of(report["GaussianMechanism"])  # cached
    assert "predict_proba" in methods_of(column["ClientColumn"])  # available_if
    assert "set_fit_request" not in methods_of(exported("pfl_sklearn")["BernoulliMean"])
    assert without_text(lambda x: x) == ["x"]
