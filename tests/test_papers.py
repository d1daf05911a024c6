"""The page of the papers: its figures are those stored, and cheap panels give them again."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import pfl_sklearn
from pfl_sklearn import neural_network, online, theory

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ROOT / "benchmarks" / "papers"
CHEAP = ["a_private_means", "a_elections", "a_proportions", "c_oracle"]
SLOW = ["a_linear_regression", "a_adamix", "b_synthetic", "c_agents"]
PARAMETER = re.compile(r"(\w+)=")


@pytest.fixture
def regenerate(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAPERS), *sys.path])
    import regenerate

    return regenerate


def test_the_page_is_of_the_stored_figures(regenerate):
    written = regenerate.papers_page.pages(regenerate.panels(), regenerate.stored())
    assert (ROOT / "docs/papers.rst").read_text(encoding="utf-8") == written["papers.rst"]
    # Other versions of matplotlib write other pictures.
    assert all((ROOT / "docs" / path).exists() for path in written)


@pytest.mark.parametrize("name", CHEAP)
def test_cheap_panels_give_the_stored_figures(regenerate, name):
    figures = json.loads(json.dumps(regenerate.panels()[name].compute()))
    assert _flat(figures) == pytest.approx(_flat(regenerate.stored()[name]), rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_part_of_the_other_panels_gives_the_stored_figures(regenerate, name):
    """A change of the code that changes a panel is seen before somebody computes all of it."""
    _check_part(regenerate.panels()[name].again(), regenerate.stored()[name])


@pytest.mark.parametrize("name", ["b_digits", pytest.param("b_digit_nets", marks=pytest.mark.slow)])
def test_a_part_of_a_panel_of_digits_gives_the_stored_figures(regenerate, data_home, name):
    _check_part(regenerate.panels()[name].again(), regenerate.stored()[name])


def _check_part(part, whole):
    """Part has some of the keys, and lists may end early."""
    for key, value in part.items():
        if isinstance(value, dict):
            _check_part(value, whole[key])
        else:
            stored = whole[key][: len(value)] if isinstance(value, list) else whole[key]
            assert value == pytest.approx(stored, rel=1e-3, abs=1e-6), key


def _flat(figures):
    """Numbers of figures, in order."""
    if isinstance(figures, dict):
        figures = list(figures.values())
    if isinstance(figures, list):
        return [number for each in figures for number in _flat(each)]
    return [figures]


def test_parameters_of_the_index_and_the_errata_exist(regenerate):
    """Of estimators, or of functions of the theory that the text calls."""
    page = regenerate.papers_page
    for _, _, name, how in page.ALGORITHMS:
        others = re.findall(r"``(\w+Classifier)``", how)
        assert all(
            hasattr(pfl_sklearn, other) or hasattr(neural_network, other) for other in others
        )
        _check_parameters(name, how)
    for *_, how in page.FAULTS:
        for call, given in re.findall(r"``(\w+)\(([^`]*)\)``", how):
            _check_parameters(call, given)


def _check_parameters(name, text):
    homes = (pfl_sklearn, neural_network, online, theory)
    made = next(getattr(home, name) for home in homes if hasattr(home, name))
    inner = {"covariance_type"}  # of the prior that is given
    assert set(PARAMETER.findall(text)) - inner <= set(inspect.signature(made).parameters), name
