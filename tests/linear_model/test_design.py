"""Which coefficients vary by client: names, indices, and what is said of bad ones."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from pfl_sklearn.linear_model._design import column_names, resolve_design

X = np.array([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]])
NAMES = ["age", "sex", "dose"]


@pytest.mark.parametrize(
    ("random", "fit_intercept", "expected"),
    [
        ("all", True, [0, 1, 2, 3]),
        ("all", False, [0, 1, 2]),
        ("intercept", True, [0]),
        (["intercept"], True, [0]),
        ("sex", True, [2]),
        (["dose", "intercept", "age"], True, [0, 1, 3]),
        (["dose", "age"], False, [0, 2]),
        ([2, 0], True, [1, 3]),
        ([0], False, [0]),
        (np.array([1, 2]), True, [2, 3]),
        (["sex", 1, "sex"], True, [2]),
        (("intercept", np.int32(2)), True, [0, 3]),
        (pd.Index(["age"]), True, [1]),
    ],
)
def test_positions(random, fit_intercept, expected):
    design = resolve_design(random, 3, fit_intercept, NAMES)
    assert design.random.tolist() == expected
    every = range(3 + fit_intercept)
    assert design.fixed.tolist() == [k for k in every if k not in expected]
    assert sorted(design.order.tolist()) == list(every)
    assert design.order.tolist()[: len(expected)] == expected
    assert list(design.names) == ["intercept"] * fit_intercept + NAMES
    assert design.random_names == [design.names[k] for k in expected]


def test_plain_names_without_a_frame():
    design = resolve_design(["x1", "intercept"], 3, True)
    assert design.random.tolist() == [0, 2]
    assert design.names == ("intercept", "x0", "x1", "x2")


def test_matrix_and_coefficients():
    design = resolve_design("all", 3, True, NAMES)
    np.testing.assert_array_equal(design.matrix(X), [[1, 2, 3, 5], [1, 7, 11, 13]])
    coef, intercept = design.coefficients(np.arange(8.0).reshape(2, 4))
    np.testing.assert_array_equal(coef, [[1, 2, 3], [5, 6, 7]])
    np.testing.assert_array_equal(intercept, [0, 4])
    without = resolve_design("all", 3, False, NAMES)
    np.testing.assert_array_equal(without.matrix(X), X)
    coef, intercept = without.coefficients(X)
    np.testing.assert_array_equal(coef, X)
    np.testing.assert_array_equal(intercept, [0, 0])
    np.testing.assert_array_equal(design.matrix(X[0]), [1, 2, 3, 5])


def test_a_covariance_among_the_columns():
    design = resolve_design(["dose", "age"], 3, True, NAMES)
    full = design.embedded(np.array([[1.0, 2.0], [2.0, 5.0]]))
    np.testing.assert_array_equal(full, [[0, 0, 0, 0], [0, 1, 0, 2], [0, 0, 0, 0], [0, 2, 0, 5]])


@pytest.mark.parametrize(
    ("random", "fit_intercept", "names", "message"),
    [
        (["dosis"], True, NAMES, r"random.*'dosis'.*'intercept'.*\['age', 'sex'"),
        ("dosis", True, NAMES, r"random.*'dosis'"),
        ([3], True, NAMES, r"random.*\bindex 3\b.*\b3 features"),
        ([-1], True, NAMES, r"random.*index -1\b"),
        ([True], True, NAMES, r"random.*\bTrue\b"),
        ([1.0], True, NAMES, r"random.*\b1\.0\b"),
        ([None], True, NAMES, r"random.*\bNone\b"),
        ([], True, NAMES, r"random.*empty list"),
        ("intercept", False, NAMES, r"random.*'intercept'.*fit_intercept=False"),
        (["intercept", "age"], False, NAMES, r"random.*'intercept'.*fit_intercept=False"),
        (["intercept"], True, ["intercept", "b", "c"], r"random='intercept'.*\bX\b"),
    ],
)
def test_bad_names(random, fit_intercept, names, message):
    with pytest.raises(ValueError, match=message):
        resolve_design(random, 3, fit_intercept, names)


def test_names_that_no_step_handed_on():
    with pytest.raises(
        ValueError, match=r"'age'.*\['x0', 'x1'\].*set_output\(transform='pandas'\)"
    ):
        resolve_design("age", 2, True)
    with pytest.raises(ValueError, match=r"'dosis'") as caught:
        resolve_design("dosis", 3, True, NAMES)
    assert "set_output" not in str(caught.value)


def test_a_feature_called_all_is_meant_by_a_list():
    assert resolve_design(["all"], 2, True, ["all", "b"]).random.tolist() == [1]
    with pytest.raises(ValueError, match=r"random='all' is ambiguous.*\['all'\]"):
        resolve_design("all", 2, True, ["all", "b"])


def test_a_feature_called_intercept_can_be_had_by_its_index_or_without_one():
    names = ["intercept", "b", "c"]
    assert resolve_design([0], 3, True, names).random.tolist() == [1]
    assert resolve_design(["intercept"], 3, False, names).random.tolist() == [0]


def test_names_of_containers():
    for frame in (pd.DataFrame, pl.DataFrame, pa.table):
        assert column_names(frame({name: [1.0] for name in NAMES})) == NAMES
    assert column_names(pd.DataFrame(X)) == ["0", "1", "2"]
    assert column_names(X) is None
    with pytest.raises(TypeError, match=r"strings.*\['age', 1, 'dose'\]"):
        column_names(pd.DataFrame(X, columns=["age", 1, "dose"]))
