"""Summaries print whole, as narrow as they can, and are data frames otherwise."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression, Ridge

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    ClientSelector,
    CollaborativeMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PersonalizedStackingRegressor,
    PoissonMean,
    PrivacyWarning,
)
from pfl_sklearn._client_tables import NOT_COVERED, SummaryTable
from pfl_sklearn.priors import GaussianPrior

rng = np.random.default_rng(0)
SHOPS = np.repeat(list("abcdef"), 15)
X = pd.DataFrame(rng.normal(size=(90, 2)), columns=["experience", "income"])
Y = X["income"] + rng.normal(size=6).repeat(15) + rng.normal(size=90)
LABELS, COUNTS = (Y > 0).astype(int), rng.poisson(np.exp(Y / 2))
FINAL = PersonalizedLinearRegression(random="intercept")
CANDIDATES = [(f"candidate_{k}", Ridge(alpha=1.0 + k)) for k in range(9)]


@pytest.fixture(autouse=True)
def narrow_page():
    with pd.option_context("display.width", 80, "display.max_columns", 0):
        yield


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("model", "y"),
    [
        (BernoulliMean(), LABELS),
        (CollaborativeMean(), Y),
        (GaussianMean(), Y),
        (PoissonMean(), COUNTS),
        (PersonalizedLinearRegression(uncertainty="plug_in"), Y),
        (PersonalizedLogisticRegression(), LABELS),
        (PersonalizedPoissonRegression(), COUNTS),
        (ClientSelector(CANDIDATES, cv=3, random_state=0), Y),
        (
            PersonalizedStackingRegressor(
                [("line", LinearRegression())], FINAL, cv=2, fallback=False
            ),
            Y,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_summaries_print_whole(model, y):
    table = model.fit(X, y, groups=SHOPS).summary()
    assert isinstance(table, pd.DataFrame)
    for printed in (repr(table), str(table.round(2))):
        assert "..." not in printed
        lines = printed.splitlines()
        assert all(name in lines[0] for name in table.columns)
        assert len(lines) == len(table) + 1 + any(table.index.names)
    wide = isinstance(model, ClientSelector)
    assert wide or max(map(len, repr(table).splitlines())) <= 82


def test_the_corner_of_a_table_says_which_class_it_is_about():
    classes, logistic = np.where(LABELS, "late", "punctual"), PersonalizedLogisticRegression
    model = logistic(random="intercept").fit(X, classes, groups=SHOPS)
    means = BernoulliMean().fit(X, classes, groups=SHOPS)
    for said, table in (
        ("log odds", model.summary()),
        ("log odds", model.conf_int()),
        ("log odds", model.for_client("a").summary()),
        ("probability", means.summary()),
    ):
        assert repr(table).startswith(f"{said} of punctual ")
        assert f"{said} of punctual<" in table._repr_html_()
    several = logistic(random="intercept").fit(X, np.tile(["a", "b", "c"], 30), groups=SHOPS)
    for table in (several.summary(), GaussianMean().fit(X, Y, groups=SHOPS).summary()):
        assert table.columns.name is None


def test_the_summary_in_a_wrapper():
    model = ClientColumn(PersonalizedLinearRegression(random="intercept"), "shop")
    model.fit(X.assign(shop=SHOPS), Y)
    assert repr(model.summary()) == repr(model.estimator_.summary(["experience", "income"]))


def test_many_rows_are_cut():
    table = SummaryTable({name: np.arange(200.0) for name in "abcdefghijklmnopqrstuvwxyz"})
    lines = repr(table).splitlines()
    assert len(lines) < 20
    assert lines[0].split() == list("abcdefghijklmnopqrstuvwxyz")


def test_small_numbers_keep_their_digits():
    assert repr(SummaryTable({"sd": [1 / 3, 0.0]})).split() == ["sd", "0", "0.3333", "1", "0.0000"]
    small = repr(SummaryTable({"sd": [1 / 3, 2e-5]}))
    assert small == repr(pd.DataFrame({"sd": [1 / 3, 2e-5]}))
    with pd.option_context("display.precision", 2):
        assert "0.33\n" in repr(SummaryTable({"sd": [1 / 3, 1.0]})) + "\n"


def test_a_notebook_shows_a_table():
    table = SummaryTable({"sd": [0.5]})
    assert table._repr_html_() == pd.DataFrame({"sd": [0.5]})._repr_html_()


def test_nullable_numbers_print():
    table = SummaryTable({"a": [1.5, None], "b": [1.0, 2.0]}).astype("Float64")
    assert "<NA>" in repr(table)


PRIVATE = {"epsilon": 1.0, "clip_norm": 3.0, "random_state": 0}
BOUNDED = {"epsilon": 1.0, "feature_bound": 3.0, "target_bound": 5.0, "random_state": 0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model",
    [
        GaussianMean(**PRIVATE),
        GaussianMean(GaussianPrior(0.0, 1.0), noise_variance=1.0, epsilon=1.0, clip_norm=1.0),
        PersonalizedLinearRegression(
            GaussianPrior(covariance=1.0), noise_variance=1.0, random="intercept", **BOUNDED
        ),
    ],
)
def test_tables_of_clients_say_what_privacy_does_not_cover(model):
    fitted = model.fit(X, Y, groups=SHOPS)
    tables = [fitted.coef_table()]
    tables.append(fitted.summary() if isinstance(model, GaussianMean) else fitted.effects())
    for table in tables:
        for form in (table, table.head(2), pickle.loads(pickle.dumps(table))):
            assert form.attrs["privacy"] == NOT_COVERED
            assert "does not cover" in " ".join(repr(form).split())
            assert "does not cover" in form._repr_html_()
        assert "privacy" not in pd.DataFrame(table.to_dict()).attrs


def test_tables_that_are_covered_say_by_what():
    published = GaussianMean(unit="row", publish="clients", epsilon=1.0, bounds=(-5.0, 5.0))
    model = published.fit(X, Y, groups=SHOPS)
    for table in (model.summary(), model.coef_table()):
        assert table.attrs["privacy"].startswith(
            "The privacy promise of this fit covers this table: epsilon = 1, delta = 0, unit one "
            "row, relation replace_one; adversary: anyone who sees what is published"
        )
    with pytest.warns(PrivacyWarning):
        seeded = published.set_params(random_state=0).fit(X, Y, groups=SHOPS).summary()
    assert "had a seed" in repr(seeded)


@pytest.mark.slow
def test_tables_of_other_fits_have_no_note():
    for model in (GaussianMean(), PersonalizedLinearRegression()):
        table = model.fit(X, Y, groups=SHOPS).coef_table()
        assert table.attrs == {}
        assert "cover" not in repr(table)
        assert "cover" not in table._repr_html_()
