"""Settings that all tests share."""

import gc
import os
import sys
from pathlib import Path

import matplotlib
import pytest
from hypothesis import settings

matplotlib.use("Agg")
# The same examples in every run, on which a green suite depends; --hypothesis-profile=default draws
# others.
settings.load_profile("ci")
pytest.register_assert_rewrite("tests.helpers")

if "PFL_SKLEARN_WITHOUT_TORCH" in os.environ:
    from tests.helpers.torch import block_torch

    block_torch()

from tests.helpers import entropy  # noqa: E402  # torch may have to be blocked before

entropy.replace_system_entropy()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    entropy.start_from(item.nodeid)
    if "matplotlib.pyplot" in sys.modules:  # it warns of many open figures, and doctests leave some
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What tests share is the same whichever of them asks first."""
    if fixturedef.scope == "function":
        return (yield)
    before = entropy.start_from(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}")
    try:
        return (yield)
    finally:
        entropy.go_on_from(before)


@pytest.fixture(scope="session")
def data_home():
    """Folder of the public tables, or a skip that says why."""
    folder = os.environ.get("PFL_SKLEARN_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("PFL_SKLEARN_DATA names no folder with the public tables")
    return Path(folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector, which need not look at modules and tests again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


# Chapters of the user guide, and modules of the package, whose examples take seconds.
SLOW_CHAPTERS = {"linear_models.rst", "neural_networks.rst", "ppsgd.rst", "privacy.rst"}
SLOW_CHAPTERS |= {"groups.rst", "publishing.rst", "tables.rst", "workflow.rst"}
SLOW_CHAPTERS |= {"getting_started.rst"}
SLOW_EXAMPLES = ("pfl_sklearn/neural_network/*", "pfl_sklearn/compose/_stack/*")
SLOW_EXAMPLES += ("pfl_sklearn/compose/_selector.py", "*/_accounting/_composition.py")
FAST_EXAMPLE = "_adaped.py"  # of the neural networks


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items):
    families = set()
    for item in items:
        family = item.nodeid.partition("[")[0]
        if family in families and item.get_closest_marker("slow_but_first"):
            item.add_marker("slow")
        families.add(family)
        slow = any(item.path.match(pattern) for pattern in SLOW_EXAMPLES)
        if item.path.name in SLOW_CHAPTERS or (slow and item.path.name != FAST_EXAMPLE):
            item.add_marker("slow")
        if "data_home" in getattr(item, "fixturenames", ()):
            item.add_marker("tables")
