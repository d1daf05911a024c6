"""Private fits of classes and counts refuse no finite value, and name none that they refuse."""

import re
import traceback

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from pfl_sklearn.linear_model import PersonalizedLogisticRegression, PersonalizedPoissonRegression
from pfl_sklearn.privacy import PrivacyLedger, PrivacyWarning
from tests.helpers.blinded import blind

pytestmark = pytest.mark.filterwarnings(f"ignore::{PrivacyWarning.__module__}.PrivacyWarning")
M, N = 12, 4
GROUPS = np.repeat(np.arange(M), N)
HOSTILE = [
    [1e308, -1e308, 1e308, -1e308],
    [1.7e308] * N,
    [-1e308, -1e308, 1.0, 0.5],
    [1e-300, -1e-300, 5e-324, 0.0],
    [2.0**60, -(2.0**60), 1e300, -1e300],
    [251.0, -251.0, 1e9 + 1, 1e-130],
]


def table(kind, seed=0):
    rng = np.random.default_rng(seed)
    X, counts = rng.normal(size=(M * N, 2)), rng.poisson(1.0, M * N).astype(float)
    return X, counts if kind == "counts" else (counts > 0).astype(float)


def model_of(kind, **params):
    params = {
        "epsilon": 2.0,
        "feature_bound": 2.0,
        "max_rows_per_client": N,
        "random_state": 0,
        **params,
    }
    params = {"unseen": "population", "n_rounds": 4, **params}
    if kind == "counts":
        return PersonalizedPoissonRegression(rate_range=(0.1, 10.0), **params)
    return PersonalizedLogisticRegression(**params)


def fitted(kind, values, where, **params):
    """A fit in which the first client has these values as features, target, offset or exposure."""
    X, y = table(kind)
    more = {"offset": np.zeros(M * N)}
    if kind == "counts":
        more["exposure"] = np.ones(M * N)
    if where == "X":
        X[:N] = np.asarray(values)[:, None]
    elif where == "y":
        y[:N] = values
    else:
        more[where][:N] = values
    return model_of(kind, **params).fit(X, y, groups=GROUPS, **more)


def numbers_of(model):
    """What a fit gives to the population, and to the clients but the first."""
    own = [getattr(model, name)[1:] for name in ("coef_", "intercept_", "coef_std_")]
    return [model.population_coef_, model.population_covariance_, model.prior_.covariance, *own]


PLACES = [("counts", where) for where in ("X", "y", "offset", "exposure")]
PLACES += [("classes", "X"), ("classes", "offset")]


@pytest.mark.parametrize("values", HOSTILE[::2], ids=lambda v: f"{v[0]:g}")
@pytest.mark.parametrize(("kind", "where"), PLACES)
def test_no_finite_value_refuses_a_fit_or_reaches_other_clients(kind, where, values, monkeypatch):
    """With blinded sums the others keep every bit; warnings are errors here."""
    blind(monkeypatch)
    plain = np.ones(N) if where in ("y", "exposure") else np.zeros(N)
    expected, hostile = fitted(kind, plain, where), fitted(kind, values, where)
    for name in ("coef_", "intercept_", "coef_std_", "population_coef_"):
        assert np.isfinite(getattr(hostile, name)).all()
    for first, second in zip(numbers_of(expected), numbers_of(hostile), strict=True):
        np.testing.assert_array_equal(first, second)
    assert expected.privacy_.warnings == hostile.privacy_.warnings


finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("place", PLACES, ids=str)
@given(st.lists(finite, min_size=N, max_size=N), st.sampled_from(["auto", "all"]))
@settings(max_examples=5, deadline=None)
def test_any_finite_values_leave_finite_numbers(place, values, random):
    epsilon = 2.0 if random == "auto" else 1e3
    model = fitted(place[0], values, place[1], random=random, epsilon=epsilon)
    for name in ("population_coef_", "population_coef_std_", "coef_", "intercept_std_"):
        assert np.isfinite(getattr(model, name)).all()


def test_counts_are_rounded_and_cut_and_the_rest_is_too():
    """A value that is out of range counts as the nearest that is in it."""
    pairs = [
        ("y", [-3.0, 0.4, 2.6, 1e12], [0.0, 0.0, 3.0, 1e9]),
        ("offset", [-1e5, 1e5, 3.0, 251.0], [-250.0, 250.0, 3.0, 250.0]),
        ("exposure", [-1.0, 0.0, 1e300, 2.0], [1e-100, 1e-100, 1e100, 2.0]),
        ("X", [1e40, -1e40, 1.0, 2.0], [2e30, -2e30, 1.0, 2.0]),
    ]
    for where, values, nearest in pairs:
        given_, cut = fitted("counts", values, where), fitted("counts", nearest, where)
        for first, second in zip(numbers_of(given_), numbers_of(cut), strict=True):
            np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(given_.intercept_, cut.intercept_)


@pytest.mark.parametrize("value", [2e9, -1.0])
def test_without_privacy_bad_counts_are_still_named(value):
    X, y = table("counts")
    y[3] = value
    with pytest.raises(ValueError, match=re.escape(f"0 to 1e+09; got {value:g}")):
        PersonalizedPoissonRegression().fit(X, y, groups=GROUPS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, "secret"], ids=str)
@pytest.mark.parametrize(("kind", "where"), PLACES)
def test_what_is_refused_is_not_named_and_is_paid_for(kind, where, bad, tmp_path):
    """Neither the value, nor its row, nor its client."""
    X, y = table(kind)
    columns = {"offset": np.zeros(M * N), "exposure": np.ones(M * N), "y": y}
    columns = {name: values.astype(object) for name, values in columns.items()}
    frame = pd.DataFrame(X, columns=["a", "b"]).astype(object)
    if where == "X":
        frame.loc[17, "a"] = bad
    else:
        columns[where][17] = bad
    more = {where: columns[where]} if where in ("offset", "exposure") else {}
    target = columns["y"] if where == "y" else y
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(9.0, 1e-3))
    with pytest.raises(ValueError) as raised:
        model_of(kind, ledger=ledger).fit(frame, target, groups=GROUPS, **more)
    shown = "".join(traceback.format_exception_only(raised.value)).lower()
    assert "secret" not in "".join(traceback.format_exception(raised.value)).replace("'secret'", "")
    assert "17" not in shown.replace("float64", "")
    assert "secret" not in shown
    assert len(ledger.entries) == 1


@pytest.mark.parametrize(
    "label", [2, 0.5, 1e300, -(2**60), "secret", None, 123_456], ids=lambda v: str(v)
)
def test_a_label_that_is_none_of_the_public_ones_is_refused_without_its_name(label):
    X, y = table("classes")
    labels = y.astype(object)
    labels[5] = label
    if not isinstance(label, str) and label is not None:
        labels = labels.astype(type(label))
    with pytest.raises((ValueError, TypeError)) as raised:
        model_of("classes").fit(X, labels, groups=GROUPS)
    text = str(raised.value)
    assert "secret" not in text
    assert "123" not in text
    assert "group" not in text


@pytest.mark.parametrize(
    "labels",
    [np.full(M * N, "secret"), np.append(np.arange(M * N - 1) % 22, 22)],
    ids=["one", "23, the last of which has one row"],
)
def test_another_number_of_classes_is_refused_without_a_warning_that_names_them(labels):
    X, _ = table("classes")
    with pytest.raises(ValueError, match="takes two classes") as raised:
        model_of("classes").fit(X, labels, groups=GROUPS)
    assert "secret" not in str(raised.value)


def test_the_report_lists_how_values_are_cut():
    for kind, words in (("classes", ["offsets to 250"]), ("counts", ["1e+09", "1e-100 to 1e+100"])):
        X, y = table(kind)
        (rule,) = [
            text
            for text in model_of(kind).fit(X, y, groups=GROUPS).privacy_.assumptions
            if text.startswith("finite numbers cause no refusal")
        ]
        for text in [*words, "1e+30 times feature_bound", "overflows counts as 0"]:
            assert text in rule
