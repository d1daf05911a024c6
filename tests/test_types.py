"""What a type checker says of a user's script: types are known, and mistakes are found."""

import inspect
import subprocess
import sys

import pytest

from tests.helpers.public_interface import PACKAGES, exported, is_ours, methods_of, properties_of

RIGHT = """
import numpy as np
import pandas as pd
from typing import assert_type

from pfl_sklearn import BernoulliMean, ClientColumn, GaussianMean, PersonalizedLinearRegression
from pfl_sklearn import DittoRegressor, PPSGDRegressor, privacy_of
from pfl_sklearn.privacy import PrivacyReport

import pfl_sklearn

assert_type(pfl_sklearn.privacy.privacy_of(pfl_sklearn.GaussianMean()), PrivacyReport)
X, y, groups = np.ones((4, 1)), np.arange(4.0), ["a", "a", "b", "b"]
assert_type(GaussianMean(epsilon=1.0).fit(X, y, groups=groups), GaussianMean)
linear = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=groups)
assert_type(linear, PersonalizedLinearRegression)
assert_type(linear.privacy_, PrivacyReport)
assert_type(linear.privacy_.epsilon, float)
assert_type(linear.summary(), pd.DataFrame)
assert_type(linear.for_client("a"), PersonalizedLinearRegression)
assert_type(PPSGDRegressor(alpha=1.0, n_rounds=5).fit(X, y, groups=groups), PPSGDRegressor)
ditto = DittoRegressor(proximal=0.5).fit(X, y, groups=groups)
assert_type(ditto, DittoRegressor)
ditto.history_["loss"]  # a fitted attribute may be anything
ditto.set_score_request(sample_weight=True)
assert_type(BernoulliMean().fit(X, y > 1, groups=groups).score(X, y > 1, groups=groups), float)
assert_type(ClientColumn(linear, 0).fit(X, y), ClientColumn)
assert_type(privacy_of(linear), PrivacyReport)
"""

# scikit-learn has no types: behind its base classes a checker accepts unknown methods.
WRONG = {
    "GaussianMean(epsilno=1.0)": "call-arg",
    "GaussianMean(random_state=default_rng(0))": "arg-type",
    "PPSGDRegressor(random_state=default_rng(0))": "arg-type",
    "GaussianMean().fit([[0.0]], [1.0], client=['a'])": "call-arg",
    "GaussianMean().privacy_.epsilonn": "attr-defined",
    "PersonalizedLinearRegression(max_iter='ten')": "arg-type",
    "PersonalizedLinearRegression(max_itre=10)": "call-arg",
    "GaussianPrior(covariance_typ='diag')": "call-arg",
    "ClientSelector([], hwo='best')": "call-arg",
    "ClientColumn(GaussianMean(), colunm=0)": "call-arg",
    "ClientKFold(n_splits='five')": "arg-type",
    "ClientShuffleSplit(tset_size=0.2)": "call-arg",
    "PPSGDRegressor(batch_size=2.5)": "arg-type",
    "PPSGDRegressor(n_round=5)": "call-arg",
    "DittoRegressor(local_steps='ten')": "arg-type",
    "DittoRegressor(None, 5)": "call-arg",
    "privacy_of()": "call-arg",
    "pfl_sklearn.GaussianMeen": "attr-defined",
}


def errors_of(script, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict"]
    command += ["--ignore-missing-imports", "--allow-untyped-calls"]
    command += ["--follow-imports=silent", f"--cache-dir={tmp_path}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if ": error:" in line]


@pytest.mark.slow
def test_a_users_script(tmp_path):
    """One run of the checker, which takes most of its time to read the package."""
    names = "ClientColumn, ClientKFold, ClientSelector, ClientShuffleSplit, DittoRegressor"
    names += ", GaussianMean, GaussianPrior, PPSGDRegressor"
    names += ", PersonalizedLinearRegression, privacy_of"
    imports = f"from numpy.random import default_rng; from pfl_sklearn import {names}"
    first = RIGHT.count("\n") + 2  # line of the first wrong call
    errors = errors_of("\n".join([RIGHT + imports, *WRONG]), tmp_path)
    lines = {int(line.split(":")[1]) - first: line for line in errors}
    assert [line for k, line in lines.items() if k < 0] == []
    missed = [call for k, call in enumerate(WRONG) if k not in lines]
    assert missed == []
    for k, code in enumerate(WRONG.values()):
        assert f"[{code}]" in lines[k], lines[k]


def sources(package):
    """Functions of a package, and methods and properties of its classes, by name."""
    for name, value in exported(package).items():
        if inspect.isclass(value) and is_ours(value):
            yield from ((f"{name}.{key}", each) for key, each in methods_of(value).items())
            for key, each in properties_of(value).items():
                yield f"{name}.{key}", getattr(each, "fget", None) or each.func
        elif is_ours(value) and callable(value):
            yield name, value


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_are_annotated(package):
    bare = []
    for name, function in sources(package):
        signature = inspect.signature(inspect.unwrap(getattr(function, "__func__", function)))
        types = [
            each.annotation
            for each in signature.parameters.values()
            if each.name not in ("self", "cls")
        ]
        if inspect.Signature.empty in (*types, signature.return_annotation):
            bare.append(name)
    assert sorted(bare) == []
