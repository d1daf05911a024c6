"""The table of client scores, number by number."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import Ridge
from sklearn.metrics import log_loss, make_scorer, mean_squared_error, roc_auc_score
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import (
    BernoulliMean,
    ClientAsFeature,
    ClientColumn,
    GaussianMean,
    UnseenClientsWarning,
)
from pfl_sklearn.metrics import ClientScorer, client_scores, known_clients
from pfl_sklearn.model_selection import ClientKFold

MSE = "neg_mean_squared_error"
rng = np.random.default_rng(0)
GROUPS = np.random.default_rng(1).permutation(np.repeat(np.arange(12), np.arange(2, 14)))
NAMES = np.array([f"site {k:02d}" for k in range(12)])[GROUPS]
N_ROWS = len(GROUPS)
X = rng.normal(size=(N_ROWS, 2))
Y = 1.0 * GROUPS + 2 * rng.normal(size=N_ROWS)
LABELS = (rng.random(N_ROWS) < (GROUPS + 0.5) / 12).astype(int)
FRAME = pd.DataFrame({"x": X[:, 0], "site": NAMES, "z": X[:, 1]})
MODEL = GaussianMean().fit(X, Y, groups=NAMES)
TRAIN = GROUPS % 3 > 0  # clients 0, 3, 6, 9 are new


def expected_table(model, y=Y, groups=NAMES):
    """Mean squared errors of every client, straight from the fitted arrays."""
    position = {client: k for k, client in enumerate(model.clients_.tolist())}
    everybody = np.append(model.means_, model.population_mean_)
    table = {}
    for client in np.unique(groups):
        own = y[groups == client]
        estimate = everybody[position.get(client, -1)]
        table[client] = (
            len(own),
            -np.mean((own - estimate) ** 2),
            client in position,
            -np.mean((own - model.population_mean_) ** 2),
        )
    columns = ["n_rows", "score", "known", "population_score"]
    return pd.DataFrame.from_dict(table, orient="index", columns=columns)


def assert_same(table, expected):
    assert table.columns.tolist() == ["n_rows", "score", "known", "population_score", "gain"]
    assert table.index.tolist() == expected.index.tolist()
    assert table.index.name == "client"
    for name in expected:
        np.testing.assert_allclose(table[name].to_numpy(), expected[name].to_numpy(), rtol=1e-10)
    np.testing.assert_array_equal(table["gain"], table["score"] - table["population_score"])
    assert table["known"].dtype == bool


def test_numbers():
    table = client_scores(MODEL, X, Y, groups=NAMES, scoring=MSE)
    assert_same(table, expected_table(MODEL))
    assert table["gain"].max() > 10


def test_a_client_beside_the_features():
    wrapped = ClientAsFeature(Ridge(), unseen="population")
    model = make_pipeline(StandardScaler(), wrapped)
    with config_context(enable_metadata_routing=True):
        model.fit(X[TRAIN], Y[TRAIN], groups=NAMES[TRAIN])
    np.testing.assert_array_equal(known_clients(model), np.unique(NAMES[TRAIN]))
    table = client_scores(model, X, Y, groups=NAMES, scoring=MSE)
    assert (table["gain"][~table["known"]] == 0).all()
    features, stranger = model[:-1].transform(X), np.full(N_ROWS, "nobody")
    errors = (Y - model[-1].predict(features, groups=stranger)) ** 2
    expected = -pd.Series(errors).groupby(NAMES).mean()
    np.testing.assert_allclose(table["population_score"], expected)
    assert (table["gain"][table["known"]] != 0).all()


def test_summaries():
    table = client_scores(MODEL, X, Y, groups=NAMES, scoring=MSE)
    assert table.attrs == {
        "worst_decile": table["score"].min(),
        "mean_gain": pytest.approx(table["gain"].mean()),
        "share_improved": np.mean(table["gain"] > 0),
    }
    many = np.repeat(np.arange(30), 4)
    y = many + np.random.default_rng(0).normal(size=120)
    model = GaussianMean().fit(np.zeros((120, 1)), y, groups=many)
    table = client_scores(model, np.zeros((120, 1)), y, groups=many, scoring=MSE)
    assert table.attrs["worst_decile"] == pytest.approx(table["score"].nsmallest(3).mean())


def test_new_clients_gain_nothing():
    model = GaussianMean().fit(X[TRAIN], Y[TRAIN], groups=NAMES[TRAIN])
    table = client_scores(model, X, Y, groups=NAMES, scoring=MSE)
    assert_same(table, expected_table(model))
    new = [f"site {k:02d}" for k in (0, 3, 6, 9)]
    assert table.index[~table["known"]].tolist() == new
    assert (table.loc[new, "gain"] == 0).all()
    assert table.attrs["share_improved"] == (table["gain"] > 0).mean() <= 8 / 12
    with pytest.warns(UnseenClientsWarning):
        client_scores(model, X[~TRAIN], Y[~TRAIN], groups=NAMES[~TRAIN], scoring=MSE)


def test_on_held_out_rows_of_some_clients():
    rows = np.isin(GROUPS, [2, 5, 11])
    table = client_scores(MODEL, X[rows], Y[rows], groups=NAMES[rows], scoring=MSE)
    assert_same(table, expected_table(MODEL, Y[rows], NAMES[rows]))


def pipeline():
    return make_pipeline(StandardScaler(), GaussianMean())


def search(estimator, name):
    folds = ClientKFold(2, random_state=0)
    return GridSearchCV(estimator, {name: ["reml"]}, cv=folds, scoring=ClientScorer(MSE))


# Estimators to make with routing on, and the table that they take.
WRAPPED = {
    "frozen": (lambda: FrozenEstimator(MODEL), X),
    "pipeline": (lambda: pipeline().fit(X, Y, groups=NAMES), X),
    "column": (lambda: ClientColumn(GaussianMean(), "site").fit(FRAME, Y), FRAME),
    "column of a pipeline": (lambda: ClientColumn(pipeline(), "site").fit(FRAME, Y), FRAME),
    "column of a search": (
        lambda: ClientColumn(search(GaussianMean(), "method"), "site").fit(FRAME, Y),
        FRAME,
    ),
    "search": (lambda: search(GaussianMean(), "method").fit(X, Y, groups=NAMES), X),
    "search of a pipeline": (
        lambda: search(pipeline(), "gaussianmean__method").fit(X, Y, groups=NAMES),
        X,
    ),
    "search of a column": (
        lambda: GridSearchCV(
            ClientColumn(GaussianMean(), "site"),
            {"estimator__method": ["reml"]},
            cv=ClientKFold(2, client_column="site", random_state=0),
        ).fit(FRAME, Y),
        FRAME,
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_through_wrappers(case):
    make, table_of_rows = WRAPPED[case]
    with config_context(enable_metadata_routing=True):
        estimator = make()
        table = client_scores(estimator, table_of_rows, Y, groups=NAMES, scoring=MSE)
    assert_same(table, expected_table(MODEL))
    again = client_scores(estimator, table_of_rows, Y, groups=NAMES, scoring=MSE)
    pd.testing.assert_frame_equal(table, again)
    np.testing.assert_array_equal(known_clients(estimator), np.unique(NAMES))


def test_a_wrapper_keeps_what_it_adds():
    column = ClientColumn(BernoulliMean(), "site")
    model = FixedThresholdClassifier(column, threshold=0.3).fit(FRAME, LABELS)
    table = client_scores(model, FRAME, LABELS, groups=NAMES, scoring="accuracy")
    direct = BernoulliMean().fit(X, LABELS, groups=NAMES)
    population = float(direct.population_mean_ >= 0.3)
    for k, client in enumerate(direct.clients_):
        own = LABELS[client == NAMES]
        row, personal = table.loc[client], float(direct.means_[k] >= 0.3)
        assert row["score"] == pytest.approx(np.mean(own == personal))
        assert row["population_score"] == pytest.approx(np.mean(own == population))


def test_scores_that_are_not_defined():
    labels = LABELS.copy()
    labels[GROUPS == 5] = 1
    model = BernoulliMean().fit(X, labels, groups=NAMES)
    table = client_scores(model, X, labels, groups=NAMES, scoring="roc_auc")
    one_class = [np.ptp(labels[client == NAMES]) == 0 for client in table.index]
    assert table["score"].isna().tolist() == one_class
    assert any(one_class)
    assert not all(one_class)
    assert (table["score"].dropna() == 0.5).all()
    assert table.attrs == {"worst_decile": 0.5, "mean_gain": 0.0, "share_improved": 0.0}
    alone = client_scores(
        model, X[GROUPS == 5], labels[GROUPS == 5], groups=NAMES[GROUPS == 5], scoring="roc_auc"
    )
    assert np.isnan(list(alone.attrs.values())).all()


def test_log_loss_is_defined_for_one_class():
    labels = LABELS.copy()
    labels[GROUPS == 5] = 1
    model = BernoulliMean().fit(X, labels, groups=NAMES)
    table = client_scores(model, X, labels, groups=NAMES, scoring="neg_log_loss")
    for k, client in enumerate(model.clients_):
        own = labels[client == NAMES]
        made = {"score": model.means_[k], "population_score": model.population_mean_}
        for name, probability in made.items():
            expected = -log_loss(own, np.full(len(own), probability), labels=[0, 1])
            assert table.loc[client, name] == pytest.approx(expected)


def test_scorers_with_rows_that_differ_within_clients():
    class Tilted(GaussianMean):
        """Adds the first feature, so that ranks within a client mean something."""

        def predict(self, X, *, groups=None):
            return super().predict(X, groups=groups) + X[:, 0]

    above = (np.median(Y) < Y).astype(int)
    model = Tilted().fit(X, Y, groups=NAMES)
    scorer = make_scorer(lambda y, predicted: roc_auc_score(y, predicted))
    table = client_scores(model, X, above, groups=NAMES, scoring=scorer)
    predicted = model.predict(X, groups=NAMES)
    for client, row in table.iterrows():
        own = client == NAMES
        if np.ptp(above[own]):
            assert row["score"] == pytest.approx(roc_auc_score(above[own], predicted[own]))
            assert row["gain"] == 0
        else:
            assert np.isnan(row["score"])
    assert table["score"].nunique() > 2


def test_two_outputs_and_other_containers():
    two = np.column_stack([Y, -2 * Y])
    model = GaussianMean().fit(X, two, groups=NAMES)
    table = client_scores(model, X.tolist(), pd.DataFrame(two), groups=FRAME["site"], scoring=MSE)
    predicted = model.predict(X, groups=NAMES)
    for client in table.index:
        own = client == NAMES
        assert table.loc[client, "score"] == pytest.approx(
            -mean_squared_error(two[own], predicted[own])
        )


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (Ridge().fit(X, Y), r"Ridge.*client-aware"),
        (
            MultiOutputRegressor(GaussianMean()).fit(X, Y[:, None], groups=NAMES),
            r"MultiOutputRegressor.*client-aware",
        ),
        (GaussianMean(), "not fitted"),
    ],
)
def test_estimators_without_clients(estimator, message):
    error = NotFittedError if message == "not fitted" else ValueError
    for call in (known_clients, partial(client_scores, X=X, y=Y, groups=NAMES, scoring=MSE)):
        with pytest.raises(error, match=message):
            call(estimator)


def test_bad_groups_and_scores():
    with pytest.raises(ValueError, match=r"groups.*\b3 ids.*\b90 rows"):
        client_scores(MODEL, X, Y, groups=NAMES[:3], scoring=MSE)
    with pytest.raises(ValueError, match=r"groups.*number.*\b0\b.*'site 00'"):
        client_scores(MODEL, X, Y, groups=GROUPS, scoring=MSE)
    with pytest.raises(ValueError, match="nonsense"):
        client_scores(MODEL, X, Y, groups=NAMES, scoring="nonsense")


def test_known_clients():
    np.testing.assert_array_equal(known_clients(MODEL), np.unique(NAMES))
    with pytest.raises(ValueError, match=r"GaussianMean.*client-aware"):
        released = GaussianMean(epsilon=1e6, clip_norm=50.0, noise_variance=4.0)
        known_clients(released.fit(X, Y, groups=NAMES).release())


def test_y_of_another_length():
    X, y, groups = np.zeros((4, 1)), np.arange(4.0), [1, 1, 2, 2]
    model = GaussianMean().fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        client_scores(model, X, y[:3], groups=groups, scoring="r2")


@pytest.mark.parametrize(
    "wrapped", [GaussianMean(), make_pipeline(StandardScaler(), GaussianMean())]
)
def test_gains_of_frozen_wrappers(wrapped):
    """A frozen estimator predicts from what it holds, whatever is set on it."""
    model = ClientColumn(wrapped, "site").fit(FRAME, Y)
    plain = client_scores(model, FRAME, Y, groups=NAMES, scoring=MSE)
    frozen = client_scores(FrozenEstimator(model), FRAME, Y, groups=NAMES, scoring=MSE)
    pd.testing.assert_frame_equal(plain, frozen)
    assert (frozen["gain"] != 0).all()


@pytest.mark.parametrize("column", ["site", 1])
def test_ids_from_a_column(column):
    model = ClientColumn(GaussianMean(), column).fit(FRAME, Y)
    expected = client_scores(model, FRAME, Y, groups=NAMES, scoring=MSE)
    for groups in (None, NAMES):
        got = client_scores(model, FRAME, Y, groups=groups, client_column=column, scoring=MSE)
        pd.testing.assert_frame_equal(got, expected)
        assert got.attrs == expected.attrs
    numbers = np.column_stack([GROUPS / 4, X])
    exact = ClientColumn(GaussianMean(), 0).fit(numbers, Y)
    got = client_scores(exact, numbers, Y, client_column=0, scoring=MSE)
    np.testing.assert_array_equal(got["score"], expected["score"])
    assert got.index.tolist() == (np.arange(12) / 4).tolist()


def test_ids_of_client_scores_are_given_once():
    model = ClientColumn(GaussianMean(), "site").fit(FRAME, Y)
    with pytest.raises(ValueError, match=r"groups=.*'site'"):
        client_scores(model, FRAME, Y, groups=NAMES[::-1], client_column="site", scoring=MSE)
    with pytest.raises(ValueError, match=r"groups=.*client_column="):
        client_scores(model, FRAME, Y, scoring=MSE)
    with pytest.raises(ValueError, match=r"'clinic'.*\['x', 'site', 'z'\]"):
        client_scores(model, FRAME, Y, client_column="clinic", scoring=MSE)
