"""Regressions of clients with an intercept and nothing else."""

import numpy as np
import pandas as pd
import pytest

from pfl_sklearn import (
    ClientColumn,
    ClientStatistics,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PrivacyLedger,
)
from pfl_sklearn.inspection import ResidualsDisplay

GROUPS = np.repeat(np.arange(15), 8)
RNG = np.random.default_rng(0)
Y = 1 + RNG.normal(size=15)[GROUPS] + RNG.normal(size=120)
NOTHING, NO_COLUMNS = np.empty((120, 0)), pd.DataFrame(index=range(120))
LINE = PersonalizedLinearRegression()


@pytest.mark.parametrize(
    ("model", "y", "table"),
    [
        (PersonalizedLinearRegression(), Y, NO_COLUMNS),
        (PersonalizedLogisticRegression(), np.digitize(Y, [1.0]), NOTHING),
        (PersonalizedLogisticRegression(), np.digitize(Y, [0.5, 1.5]), NOTHING),
        (PersonalizedPoissonRegression(), np.maximum(np.rint(Y), 0), NO_COLUMNS),
    ],
    ids=["linear", "two classes", "three classes", "counts"],
)
def test_a_table_without_columns_gives_the_model_of_a_column_of_zeros(model, y, table):
    zeros = np.zeros((120, 1))
    model.set_params(random="intercept", uncertainty="plug_in")
    expected = model.fit(zeros, y, groups=GROUPS)
    intercepts, likelihood = expected.intercept_, expected.log_likelihood_
    band = expected.predict_interval(zeros, groups=GROUPS)
    model.set_params(random="auto")
    model.fit(table, y, groups=GROUPS)
    np.testing.assert_allclose(model.intercept_, intercepts, rtol=1e-6)
    assert model.log_likelihood_ == pytest.approx(likelihood)
    np.testing.assert_allclose(model.predict_interval(table, groups=GROUPS), band, rtol=1e-6)
    assert model.coef_.shape == (*np.shape(intercepts), 0)
    assert model.n_features_in_ == 0
    assert len(model.for_client(3).predict(NOTHING[:2])) == 2
    assert len(model.coef_table()) == 15


def test_clients_means_are_those_of_gaussian_mean():
    model = LINE.fit(NOTHING, Y, groups=GROUPS)
    means = GaussianMean().fit(NOTHING, Y, groups=GROUPS)
    np.testing.assert_allclose(model.intercept_, means.means_, rtol=1e-5)
    assert model.population_intercept_ == pytest.approx(means.population_mean_)
    parts = PersonalizedLinearRegression()
    for half in (slice(60), slice(60, None)):
        parts.partial_fit(NOTHING[half], Y[half], groups=GROUPS[half])
    np.testing.assert_allclose(parts.intercept_, model.intercept_)
    statistics = ClientStatistics.from_rows(None, Y, groups=GROUPS)
    reduced = PersonalizedLinearRegression().fit_statistics(statistics)
    np.testing.assert_allclose(reduced.intercept_, model.intercept_)
    ResidualsDisplay.from_estimator(model, NOTHING, Y, groups=GROUPS)


@pytest.mark.parametrize("column", ["ward", 0])
def test_a_table_of_ids_alone_is_enough(column):
    table = pd.DataFrame({"ward": GROUPS}) if column else GROUPS[:, None]
    model = ClientColumn(PersonalizedLinearRegression(), column).fit(table, Y)
    expected = LINE.fit(NOTHING, Y, groups=GROUPS).predict(NOTHING, groups=GROUPS)
    np.testing.assert_allclose(model.predict(table), expected)


@pytest.mark.parametrize(
    ("params", "groups"), [({}, None), ({"fit_intercept": False}, GROUPS)], ids=["ids", "origin"]
)
def test_without_ids_or_an_intercept_a_feature_is_needed(params, groups):
    with pytest.raises(ValueError, match=r"0 feature.*minimum of 1"):
        PersonalizedLinearRegression(**params).fit(NOTHING, Y, groups=groups)


def test_a_private_linear_fit_needs_a_feature_and_charges_nothing_without(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(2.0, 1e-4))
    model = PersonalizedLinearRegression(
        random="intercept", epsilon=1.0, feature_bound=1.0, target_bound=4.0, ledger=ledger
    )
    with pytest.raises(ValueError, match=r"features; got X of shape \(120, 0\).*GaussianMean"):
        model.fit(NOTHING, Y, groups=GROUPS)
    assert not ledger.entries
