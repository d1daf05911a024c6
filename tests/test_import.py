"""What importing the package pulls in, and what tests may import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pfl_sklearn

HEAVY = ("torch", "skorch", "dp_accounting", "matplotlib", "statsmodels")


def test_no_test_imports_another_test():
    for path in Path(__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (\S+\.)?test_", path.read_text(), re.M), path


def test_submodules_load_when_they_are_first_used_and_leave_heavy_packages_alone():
    code = (
        "import sys, pfl_sklearn; loaded = lambda: [m for m in sys.modules if m.count('.') == 1 and"
        " m.startswith('pfl_sklearn.')]; print(*dir(pfl_sklearn)); print(loaded());"
        "print('sklearn' in sys.modules); pfl_sklearn.theory; print(*loaded());"
        " import pfl_sklearn.privacy.auditing;"
        f" print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, loaded, sklearn, others, heavy = done.stdout.splitlines()
    assert "GaussianMean" in names.split()
    assert (loaded, sklearn) == ("[]", "False")
    assert "pfl_sklearn.theory" in others.split()
    assert (heavy, done.stderr) == ("", "")


def test_every_top_level_name_can_be_completed_and_found():
    assert set(pfl_sklearn.__all__) <= set(dir(pfl_sklearn))
    assert all(getattr(pfl_sklearn, name) is not None for name in pfl_sklearn.__all__)
    with pytest.raises(AttributeError, match=r"'pfl_sklearn' has no attribute 'Gaussian'"):
        pfl_sklearn.Gaussian  # noqa: B018


def test_type_checkers_know_the_same_top_level_names():
    """Packages that are public as a whole are starred there; the names of others are listed."""
    tree = ast.parse(Path(pfl_sklearn.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    starred, listed = set(), {}
    for node in block.body:
        module, names = node.module.removeprefix("pfl_sklearn."), [each.name for each in node.names]
        if names == ["*"]:
            starred.add(module)
        else:
            listed[module] = names
    assert starred == set(pfl_sklearn._WHOLE)
    assert sorted(listed.pop("pfl_sklearn")) == sorted(pfl_sklearn._SUBMODULES)
    assert listed == {module: [*names] for module, names in pfl_sklearn._CHOSEN.items()}


def test_what_is_left_out_of_the_top_level_is_public_elsewhere():
    whole = {name for module in pfl_sklearn._WHOLE for name in getattr(pfl_sklearn, module).__all__}
    assert whole >= pfl_sklearn._LEFT_OUT
    assert whole - pfl_sklearn._LEFT_OUT <= set(pfl_sklearn.__all__)


def test_every_estimator_that_the_readme_names_is_at_the_top_level():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    table = readme[readme.index("## Methods") : readme.index("A client's own model")]
    names = set(re.findall(r"`(\w+(?:Regressor|Classifier|Regression|Mean|Selector))`", table))
    assert len(names) > 15
    assert names - set(pfl_sklearn.__all__) == set()
