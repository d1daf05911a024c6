"""The public interface: what is exported is documented, and what it takes has not changed."""

import importlib
import inspect
import re
from collections import Counter
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


def test_a_table_of_the_api_page_has_at_most_ten_rows_and_no_name_twice():
    tables = API_PAGE.read_text().split(".. autosummary::")[1:]
    rows = [re.findall(r"^   (\w+)$", table, flags=re.MULTILINE) for table in tables]
    assert {len(names) for names in rows} <= set(range(1, 11))
    times = Counter(name for names in rows for name in names)
    assert [name for name in times if times[name] > 1] == []


def is_module(value):
    return inspect.ismodule(value) or isinstance(value, str)  # a version


def test_no_name_or_parameter_changed():
    """A change that is meant is stored anew, with a line in the changelog."""
    before, now = read_oracle("public_interface"), public_interface()
    gone, added = before.keys() - now.keys(), now.keys() - before.keys()
    assert (sorted(gone), sorted(added)) == ([], [])
    both = {name: (as_called(before[name]), as_called(now[name])) for name in before}
    assert {name: pair for name, pair in both.items() if pair[0] != pair[1]} == {}


def as_called(parameters):
    """Parameters as calls see them: only of those before the star does the order matter."""
    if "*" not in parameters:
        return parameters
    star = parameters.index("*")
    return parameters[:star], sorted(parameters[star:])


def test_the_order_of_positional_parameters_is_part_of_the_interface():
    assert as_called(["X", "y", "*", "a=1", "b=2"]) == as_called(["X", "y", "*", "b=2", "a=1"])
    assert as_called(["X", "y", "*", "a=1"]) != as_called(["y", "X", "*", "a=1"])
    assert as_called(["X", "y"]) != as_called(["y", "X"])


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


def test_numbers_of_theorems_name_their_source():
    """Two versions of one paper have different numbers: ours are those of ICLR, and say so."""
    root, unnamed = API_PAGE.parents[1], []
    pages = [root / "README.md", *root.glob("docs/*.rst"), *root.glob("docs/user_guide/*.rst")]
    number = re.compile(r"(?:Theorem|Algorithm|Lemma|Remark|[Ee]quation)s? \(?\d")
    named = re.compile(r"ICLR| of (?:[A-Z]|\[\d)")
    for path in [*pages, *root.glob("pfl_sklearn/**/*.py"), *root.glob("examples/**/*.py")]:
        if re.search("ppsgd|stream|online|collaborative", str(path.relative_to(root))):
            continue  # they are about one other paper, which has one version
        text = re.sub(r"\s+(?:# )?", " ", path.read_text(encoding="utf-8"))
        for found in number.finditer(text):
            before, after = text[: found.start()][-60:], text[found.start() :][:45]
            # The page of the papers calls the others B and C.
            if not named.search(after) and not re.search(r"\b(?:19|20)\d\d\b|[BC], ", before):
                unnamed.append((path.name, after))
    assert unnamed == []
