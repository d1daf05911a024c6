"""A checkpoint belongs to the code of a run: of modules, components and functions of the user."""

import os
import subprocess
import sys
import threading
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pfl_sklearn._rounds.checkpoint import describe_parameters
from tests.helpers.fedavg_estimator import FedAvgRegressor, Recipe
from tests.helpers.interruption import interrupt

ROOT = Path(__file__).parents[2]
SOURCE = '''
import functools
import math
import numpy as np
from tests.helpers.fedavg_estimator import Recipe

WIDTH, DEPTH = 3, 5
SIZES = {"hidden": [4, 8], "kinds": frozenset({"wide", "deep", "flat"})}
TABLE = np.arange(3.0)
calls = set()
n_calls = 0

def scaled(X, by=2.0, *, shift=0.0):
    global n_calls
    n_calls += 1  # what code counts is no part of it
    calls.add(len(X))
    return by * X * WIDTH + DEPTH + SIZES["hidden"][0] + TABLE[0] + shift

def kept(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + 0.5
    return wrapper

class Block:
    size = 7
    def __call__(self, X):
        return [math.exp(x) for x in X if x > 1.5 and str(x) not in {"nan", "inf", "0.0"}]

class Base(Recipe):
    """A base."""
    def __init__(self, lr=0.1):
        super().__init__(lr)
    @property
    def twice(self):
        return 2 * self.lr
    @staticmethod
    def half(X):
        return X / 4 + 0 * n_calls

class Net(Base):
    def forward(self, X):
        # A remark.
        return self.inner(scaled(X), Block)

    @kept
    def inner(self, X, block):
        def inmost(Z):
            return sorted(Z, key=lambda z: -z)
        return block()(inmost(X))
'''
LOCK = threading.Lock()
TREE = {"name": "root"}
TREE["parent"] = TREE


class Stubborn:
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


STUBBORN = Stubborn()
EDITS = {
    "method": ("self.inner(scaled(X), Block)", "self.inner(scaled(-X), Block)"),
    "another method": ("sorted(Z,", "reversed(Z,"),
    "constant inside": ("key=lambda z: -z", "key=lambda z: z"),
    "constant": ("x > 1.5", "x > 2.5"),
    "function": ("by * X * WIDTH", "by / X * WIDTH"),
    "library function": ("math.exp", "math.log"),
    "decorator": ("function(*args) + 0.5", "function(*args) - 0.5"),
    "base": ("2 * self.lr", "3 * self.lr"),
    "static method": ("X / 4", "X / 8"),
    "default": ("by=2.0", "by=1.0"),
    "keyword default": ("shift=0.0", "shift=1.0"),
    "global": ("WIDTH, DEPTH = 3, 5", "WIDTH, DEPTH = 4, 5"),
    "exchanged globals": ("WIDTH, DEPTH = 3, 5", "WIDTH, DEPTH = 5, 3"),
    "global container": ("[4, 8]", "[4, 9]"),
    "global array": ("arange(3.0)", "arange(4.0)"),
    "attribute of a class": ("size = 7", "size = 8"),
    "new method": ("class Block:", "class Block:\n    def __len__(self): return 3"),
}
NO_EDITS = {
    "none": ("", ""),
    "remark": ("# A remark.", "# Another remark."),
    "lines": ("class Block:", "\n\n\nclass Block:"),
    "counts": ("calls = set()", "calls = {1, 2}"),
    "count": ("n_calls = 0", "n_calls = 7"),
    "what nothing names": ("import math\n", "import math\nUNUSED = 3\n"),
}
FORMS = {
    "class": lambda code: code.Net,
    "component": lambda code: code.Net(),
    "partial": lambda code: partial(print, code.Net),
    "container": lambda code: {"net": [code.Net]},
}
OF_A_FUNCTION = ("function", "default", "keyword default", "exchanged globals", "global array")


def compiled(edit=("", "")):
    """Module of the source after an edit."""
    old, new = edit
    assert old in SOURCE
    code = types.ModuleType("code_of_a_user")
    exec(compile(SOURCE.replace(old, new, 1), "code_of_a_user.py", "exec"), vars(code))
    return code


def digest(value):
    return describe_parameters(Recipe(value))["lr"][0]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_noticed(edit):
    """In every form; of a function, where it is in its code or in what it names."""
    before, after = compiled(), compiled(EDITS[edit])
    for form in FORMS.values():
        assert digest(form(before)) != digest(form(after))
    changed = digest(before.scaled) != digest(after.scaled)
    assert changed == (edit in (*OF_A_FUNCTION, "global", "global container"))


@pytest.mark.parametrize("edit", NO_EDITS)
def test_what_is_no_edit(edit):
    for form in FORMS.values():
        assert digest(form(compiled())) == digest(form(compiled(NO_EDITS[edit])))


def test_an_object_with_an_edited_class_is_noticed(monkeypatch):
    found = []
    for edit in (NO_EDITS["none"], NO_EDITS["remark"], EDITS["constant"]):
        code = compiled(edit)
        monkeypatch.setitem(sys.modules, "code_of_a_user", code)  # or it cannot be pickled
        found.append([digest(code.Block()), digest(np.array([code.Block()], dtype=object))])
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]


def test_code_that_names_itself_and_values_that_cannot_be_pickled():
    def one(X, lock=LOCK, again=None):
        return two(X)

    def two(X):
        return one(X)

    def cyclic(X, stubborn=STUBBORN):
        return TREE

    one.__defaults__ = (one.__defaults__[0], one)
    assert digest(one) == digest(one)
    assert digest(cyclic) == digest(cyclic)


def test_what_a_function_imports_when_it_is_called_is_not_compared(monkeypatch):
    """It would make the same code another one as soon as it has run."""

    def lazy(X):
        from shelf_of_a_user import SCALE, scaled

        return SCALE * scaled(X)

    before = digest(lazy)
    shelf = compiled()
    shelf.SCALE = 2.0
    monkeypatch.setitem(sys.modules, "shelf_of_a_user", shelf)
    assert digest(lazy) == before


@pytest.mark.slow
def test_another_process_finds_the_same_digest(tmp_path):
    """Whatever order its sets have."""
    script = (
        "from tests.rounds.test_checkpointed_code import FORMS, compiled, digest\n"
        "print([digest(form(compiled())) for form in FORMS.values()])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, check=True
    )
    assert found.stdout.decode().strip() == str([digest(f(compiled())) for f in FORMS.values()])


def test_a_run_does_not_go_on_with_an_edited_component(tmp_path):
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(20, 2)), np.arange(20) // 4
    data = X, X.sum(axis=1), groups
    model = FedAvgRegressor(compiled().Net(), random_state=0, checkpoint=tmp_path / "run")
    interrupt(model, data, 3)
    model.set_params(recipe=compiled(EDITS["base"]).Net())
    with pytest.raises(ValueError, match=r"another recipe=Recipe\(\).*code"):
        model.fit(X, data[1], groups=groups)
    model.set_params(recipe=compiled(NO_EDITS["remark"]).Net())
    assert model.fit(X, data[1], groups=groups).n_rounds_ == 5


def test_parameters_of_components_in_a_list_are_distinguished():
    """As those of a net's callbacks: they are no parameters of the net."""

    def digest(rate):
        return describe_parameters(FedAvgRegressor(), callbacks=[("clip", Recipe(rate))])[
            "callbacks"
        ][0]

    assert digest(0.1) == digest(0.1) != digest(0.5)
