"""Calls on rounds that are interrupted leave the estimator as it was."""

import copy
import math
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from pfl_sklearn import PPSGDRegressor, PrivacyWarning
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.checkpointed_run import PRIVATE, table
from tests.helpers.interruption import interrupt_everywhere

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
SHORT = {"n_rounds": 3, "random_state": 3}


def model_of(name, **params):
    if name == "PPSGD":
        return PPSGDRegressor(**SHORT, average=True, **params)
    pytest.importorskip("torch")
    pytest.importorskip("skorch")
    from pfl_sklearn.neural_network import FedAvgRegressor

    params.pop("learning_rate", None)
    return FedAvgRegressor(local_steps=2, **SHORT, **params)


def assert_same(one, other):
    """All public fitted arrays, and the report."""
    names = [name for name in vars(other) if name.endswith("_")]
    assert sorted(names) == sorted(name for name in vars(one) if name.endswith("_"))
    for name in names:
        np.testing.assert_equal(getattr(one, name), getattr(other, name), name)


@pytest.mark.parametrize(
    ("name", "every", "params"),
    [
        ("PPSGD", 40, {}),
        ("PPSGD", 40, PRIVATE),
        pytest.param("FedAvg", 2000, PRIVATE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_interrupted_partial_fit_leaves_the_rounds_before(name, every, params):
    X, y, groups = table()
    later = np.where(groups == 3, 70, groups)  # one client is new
    model = model_of(name, **params).partial_fit(X, y, groups=groups)
    whole = copy.deepcopy(model).partial_fit(X, y, groups=later)
    before, untouched = dict(vars(model)), copy.deepcopy(model)
    assert interrupt_everywhere(lambda: model.partial_fit(X, y, groups=later), every) > 20
    assert vars(model) == before
    assert_same(model, untouched)
    assert_same(model.partial_fit(X, y, groups=later), whole)


def test_a_fit_keeps_no_names_of_an_earlier_one():
    X, y, groups = table()
    model = model_of("PPSGD").fit(pd.DataFrame(X, columns=list("abcd")), y, groups=groups)
    assert not hasattr(model.fit(X, y, groups=groups), "feature_names_in_")


def test_a_warning_that_is_an_error_leaves_the_rounds_before(tmp_path):
    X, y, groups = table()
    model = model_of("PPSGD", checkpoint=tmp_path / "run", checkpoint_every=3, **PRIVATE)
    whole = clone(model).fit(X, y, groups=groups)
    before = dict(vars(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PrivacyWarning):
            model.fit(X, y, groups=groups)
    assert vars(model) == before
    assert_same(model.fit(X, y, groups=groups), whole)


@pytest.mark.parametrize("seed", [3, None])
def test_what_an_interrupted_call_spent_stays_in_the_ledger(tmp_path, seed):
    """The report is of the model's rounds, among which those of the interrupted call are not."""
    X, y, groups = table()
    model = model_of("PPSGD", ledger=PrivacyLedger(tmp_path / "ledger.jsonl"), **PRIVATE)
    model.set_params(random_state=seed, delta=1e-5).partial_fit(X, y, groups=groups)

    def interrupted(*args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfl_sklearn._rounds.estimator.check_converged", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.partial_fit(X, y, groups=groups)
    assert len(model.ledger.entries) == 2
    total = model.partial_fit(X, y, groups=groups).ledger.total()
    assert len(model.ledger.entries) == 3
    assert (total == math.inf) == (seed is not None)  # the same noise again hides nothing
    assert total > model.privacy_.epsilon > 0
    assert model.n_rounds_ == 6
