"""ClientScorer against scikit-learn's metrics on direct predictions."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import (
    accuracy_score,
    get_scorer,
    log_loss,
    make_scorer,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

from pfl_sklearn import BernoulliMean, ClientColumn, GaussianMean, UnseenClientsWarning
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.metrics import ClientScorer, client_scores
from pfl_sklearn.model_selection import ClientKFold
from tests.helpers.slow import slow

MSE = "neg_mean_squared_error"
ROUTED = {"enable_metadata_routing": True}
rng = np.random.default_rng(3)
# Clients of very unequal size, so that averages over rows and over clients differ.
GROUPS = np.random.default_rng(1).permutation(np.repeat(np.arange(6), [3, 4, 8, 15, 30, 60]))
N_ROWS = len(GROUPS)
X = rng.normal(size=(N_ROWS, 2))
Y = 2.0 * GROUPS + (1 + GROUPS) * rng.normal(size=N_ROWS)
LABELS = (rng.random(N_ROWS) < 0.2 + 0.1 * GROUPS).astype(int)
LABELS[GROUPS == 0] = 1  # one class only
FRAME = pd.DataFrame({"x": X[:, 0], "site": [f"site {k}" for k in GROUPS], "z": X[:, 1]})
MODEL = GaussianMean().fit(X, Y, groups=GROUPS)
PREDICTED = MODEL.predict(X, groups=GROUPS)
CLASSIFIER = BernoulliMean().fit(X, LABELS, groups=GROUPS)
PROBABILITY = CLASSIFIER.predict_proba(X, groups=GROUPS)[:, 1]


def per_client(metric, y, response, clients=range(6), groups=GROUPS):
    return np.array([metric(y[groups == k], response[groups == k]) for k in clients])


def squared_loss(y, predicted):
    return -mean_squared_error(y, predicted)


def absolute_loss(y, predicted):
    return -mean_absolute_error(y, predicted)


def log_score(y, probability):
    return -log_loss(y, probability, labels=[0, 1])


def test_micro_is_the_metric_of_all_rows():
    for scoring, metric in (("r2", r2_score), (MSE, squared_loss)):
        got = ClientScorer(scoring)(MODEL, X, Y, groups=GROUPS)
        assert got == pytest.approx(metric(Y, PREDICTED), rel=1e-12)
        assert isinstance(got, float)
    assert ClientScorer("roc_auc")(CLASSIFIER, X, LABELS, groups=GROUPS) == pytest.approx(
        roc_auc_score(LABELS, PROBABILITY)
    )
    assert ClientScorer("neg_log_loss")(CLASSIFIER, X, LABELS, groups=GROUPS) == pytest.approx(
        log_score(LABELS, PROBABILITY)
    )


def test_macro_is_the_mean_over_clients():
    for scoring, metric in (("r2", r2_score), (MSE, squared_loss)):
        scores = per_client(metric, Y, PREDICTED)
        got = ClientScorer(scoring, average="macro")(MODEL, X, Y, groups=GROUPS)
        assert got == pytest.approx(scores.mean(), rel=1e-12)
        assert abs(got - metric(Y, PREDICTED)) > 0.1


@pytest.mark.parametrize("average", [np.min, np.median, lambda scores: np.quantile(scores, 0.1)])
def test_callable_averages(average):
    scores = per_client(squared_loss, Y, PREDICTED)
    got = ClientScorer(MSE, average=average)(MODEL, X, Y, groups=GROUPS)
    assert got == pytest.approx(average(scores), rel=1e-12)


@pytest.mark.parametrize("average", ["micro", "macro"])
@pytest.mark.parametrize("subset", ["all", "known", "new"])
def test_subsets(average, subset):
    clients = {"all": range(6), "known": [0, 2, 4], "new": [1, 3, 5]}[subset]
    seen = np.isin(GROUPS, [0, 2, 4])
    model = GaussianMean(unseen="population").fit(X[seen], Y[seen], groups=GROUPS[seen])
    predicted = model.predict(X, groups=GROUPS)
    got = ClientScorer(MSE, average=average, subset=subset)(model, X, Y, groups=GROUPS)
    rows = np.isin(GROUPS, clients)
    if average == "micro":
        assert got == pytest.approx(squared_loss(Y[rows], predicted[rows]), rel=1e-12)
    else:
        scores = per_client(squared_loss, Y, predicted, clients)
        assert got == pytest.approx(scores.mean(), rel=1e-12)


def test_subsets_without_rows():
    with pytest.raises(ValueError, match=r"rows.*new clients"):
        ClientScorer(MSE, subset="new")(MODEL, X, Y, groups=GROUPS)
    strangers = GROUPS + 100
    with pytest.raises(ValueError, match=r"rows.*known clients"):
        ClientScorer(MSE, subset="known")(MODEL, X, Y, groups=strangers)


@pytest.fixture(scope="module")
def ratings():
    """Rows of users and movies of which some are new, and fits to the others."""
    rng = np.random.default_rng(0)
    user, movie = rng.integers(0, 20, 1500), rng.integers(0, 30, 1500)
    table = pd.DataFrame(
        {"user": user, "movie": [f"m{k:02}" for k in movie], "length": rng.normal(size=1500)}
    )
    y = rng.normal(size=20)[user] + rng.normal(size=30)[movie] + rng.normal(size=1500)
    table.loc[::50, "movie"] = None
    movies = table["movie"].to_numpy()
    seen = (user < 15) & np.isin(movies, [f"m{k:02}" for k in range(25)])
    model = personalized(["movie"])
    scaled = make_column_transformer((StandardScaler(), ["length"]), remainder="passthrough")
    scaled.set_output(transform="pandas")
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
    inner = [
        model,
        make_pipeline(scaled, personalized(["remainder__movie"])),
        # What the model gets are numbers, in another place than in the table.
        make_pipeline(make_column_transformer((encoder, ["movie"])), personalized([0])),
    ]
    columns = [ClientColumn(each, "user").fit(table[seen], y[seen]) for each in inner]
    model.fit(table.loc[seen, ["movie", "length"]], y[seen], groups=user[seen])
    return table, y, seen, user < 15, np.isin(movies, movies[seen]), model, columns


def personalized(groupings):
    return PersonalizedLinearRegression(
        random="intercept", groupings=groupings, unseen="population"
    )


CONDITIONS = [
    {"groups": "known", "movie": "new"},
    *slow([{"movie": "new"}, {"movie": "known"}, {"groups": "new", "movie": "known"}]),
]


@pytest.mark.parametrize("subset", CONDITIONS, ids=repr)
@pytest.mark.slow
def test_subsets_by_levels(ratings, subset):
    table, y, _, known_user, known_movie, model, columns = ratings
    rows = (known_movie if subset["movie"] == "known" else ~known_movie).copy()
    if "groups" in subset:
        rows &= known_user if subset["groups"] == "known" else ~known_user
    features, users = table[["movie", "length"]], table["user"]
    predicted = model.predict(features, groups=users)
    micro, macro = (ClientScorer(MSE, average=how, subset=subset) for how in ("micro", "macro"))
    expected = squared_loss(y[rows], predicted[rows])
    assert micro(model, features, y, groups=users) == pytest.approx(expected, rel=1e-12)
    clients = np.unique(users[rows])
    scores = per_client(squared_loss, y[rows], predicted[rows], clients, users[rows].to_numpy())
    assert macro(model, features, y, groups=users) == pytest.approx(scores.mean(), rel=1e-12)

    for column, key in zip(columns, ["movie", "movie", 0], strict=True):
        wanted = {key if name == "movie" else name: kind for name, kind in subset.items()}
        scorer = ClientScorer(MSE, subset=wanted, client_column="user")
        expected = squared_loss(y[rows], column.predict(table)[rows])
        for fitted in (column, FrozenEstimator(column)):
            assert scorer(fitted, table, y) == pytest.approx(expected, rel=1e-12)


def test_subsets_by_levels_that_do_not_exist(ratings):
    table, y, seen, *_, (model, *_) = ratings
    assert list(model.levels_) == ["movie"]
    np.testing.assert_array_equal(model.levels_["movie"], np.unique(table["movie"][seen]))
    scorer = ClientScorer(MSE, subset={"movie": "new"}, client_column="user")
    with pytest.raises(ValueError, match=r"\{'movie': 'new'\}.*no such rows"):
        scorer(model, table[seen], y[seen])
    with pytest.raises(ValueError, match=r"'film'.*groups rows by 'movie'"):
        ClientScorer(MSE, subset={"film": "new"}, client_column="user")(model, table, y)
    plain = ClientColumn(personalized(None), "user").fit(table[["user", "length"]], y)
    assert plain.levels_ == {}
    with pytest.raises(ValueError, match=r"'movie'.*by clients alone"):
        scorer(plain, table[["user", "length"]], y)
    with pytest.raises(ValueError, match=r"GaussianMean.*by clients alone"):
        ClientScorer(MSE, subset={"movie": "new"})(MODEL, X, Y)
    with pytest.raises(ValueError, match=r"'movie'.*number.*string"):
        scorer(model, table.assign(movie=1), y)


@pytest.mark.parametrize("average", ["micro", "macro"])
def test_new_clients_that_were_asked_for_do_not_warn(average):
    rows = np.isin(GROUPS, [4, 5])
    model = GaussianMean().fit(X[~rows], Y[~rows], groups=GROUPS[~rows])
    for table, responses in ((slice(None), 2), (rows, 1)):
        data = X[table], Y[table]
        for subset in ("new", "known")[:responses]:
            ClientScorer(MSE, average=average, subset=subset)(model, *data, groups=GROUPS[table])
        with pytest.warns(UnseenClientsWarning):
            ClientScorer(MSE, average=average)(model, *data, groups=GROUPS[table])


def test_clients_of_one_class():
    for model in (LogisticRegression(), make_pipeline(StandardScaler(), LogisticRegression())):
        model.fit(X, LABELS)
        auc = per_client(roc_auc_score, LABELS, model.predict_proba(X)[:, 1], range(1, 6))
        assert np.ptp(auc) > 0.05
        for average, expected in (("macro", auc.mean()), (np.min, auc.min())):
            scorer = ClientScorer("roc_auc", average=average)
            assert scorer(model, X, LABELS, groups=GROUPS) == pytest.approx(expected, rel=1e-12)
    one = GROUPS == 0
    with pytest.raises(ValueError, match=r"'roc_auc'.*defined"):
        ClientScorer("roc_auc", average="macro")(model, X[one], LABELS[one], groups=np.arange(3))


@pytest.mark.parametrize("names", [np.array([0, 1]), np.array(["no", "yes"])])
def test_log_loss_counts_clients_of_one_class(names):
    labels = names[LABELS]
    model = BernoulliMean().fit(X, labels, groups=GROUPS)
    probability = model.predict_proba(X, groups=GROUPS)[:, 1]
    scores = per_client(log_score, LABELS, probability)
    pipeline = make_pipeline(StandardScaler(), BernoulliMean())
    pipeline.fit(X, labels, bernoullimean__groups=GROUPS)
    for estimator in (model, pipeline):
        got = ClientScorer("neg_log_loss", average="macro")(estimator, X, labels, groups=GROUPS)
        assert got == pytest.approx(scores.mean(), rel=1e-12)
    assert abs(scores.mean() - scores[1:].mean()) > 0.01
    one = GROUPS == 0
    got = ClientScorer("neg_log_loss")(model, X[one], labels[one], groups=GROUPS[one])
    assert got == pytest.approx(scores[0])


def test_other_scores_of_clients_of_one_class_are_defined():
    predicted = CLASSIFIER.predict(X, groups=GROUPS)
    got = ClientScorer("accuracy", average="macro")(CLASSIFIER, X, LABELS, groups=GROUPS)
    assert got == pytest.approx(per_client(accuracy_score, LABELS, predicted).mean())
    always = DummyClassifier(strategy="constant", constant=0).fit(X, LABELS)
    got = ClientScorer("balanced_accuracy", average="macro")(always, X, LABELS, groups=GROUPS)
    assert got == pytest.approx((0 + 5 * 0.5) / 6)


def test_errors_of_the_metric_itself_are_raised():
    three = np.arange(N_ROWS) % 3
    model = LogisticRegression().fit(X, three)
    with pytest.raises(ValueError, match="multi_class must be in"):
        ClientScorer("roc_auc", average="macro")(model, X, three, groups=GROUPS)


def test_sample_weight():
    weight = rng.uniform(0.1, 3, N_ROWS)
    seen = GROUPS < 4
    model = GaussianMean(unseen="population").fit(X[seen], Y[seen], groups=GROUPS[seen])
    predicted = model.predict(X, groups=GROUPS)
    for subset, rows in (("all", np.ones(N_ROWS, dtype=bool)), ("known", seen), ("new", ~seen)):
        got = ClientScorer(MSE, subset=subset)(model, X, Y, groups=GROUPS, sample_weight=weight)
        expected = -mean_squared_error(Y[rows], predicted[rows], sample_weight=weight[rows])
        assert got == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=r"sample_weight.*average='micro'"):
        ClientScorer(MSE, average="macro")(MODEL, X, Y, groups=GROUPS, sample_weight=weight)


def test_routed_sample_weight():
    weight = rng.uniform(0.1, 3, N_ROWS)
    folds = ClientKFold(3, random_state=0)
    with config_context(**ROUTED):
        result = cross_validate(
            GaussianMean().set_fit_request(sample_weight=False),
            X,
            Y,
            params={"groups": GROUPS, "sample_weight": weight},
            cv=folds,
            scoring=ClientScorer(MSE).set_score_request(sample_weight=True),
        )
    for (train, test), score in zip(
        folds.split(X, None, GROUPS), result["test_score"], strict=True
    ):
        model = GaussianMean().fit(X[train], Y[train], groups=GROUPS[train])
        expected = -mean_squared_error(
            Y[test], model.predict(X[test], groups=GROUPS[test]), sample_weight=weight[test]
        )
        assert score == pytest.approx(expected, rel=1e-12)


def by_hand(estimator, average, folds, metric=squared_loss):
    """Scores of folds of fits with groups."""
    scores = []
    for train, test in folds.split(X, None, GROUPS):
        model = clone(estimator).fit(X[train], Y[train], groups=GROUPS[train])
        predicted = model.predict(X[test], groups=GROUPS[test])
        if average == "micro":
            scores.append(metric(Y[test], predicted))
        else:
            clients = np.unique(GROUPS[test])
            scores.append(per_client(metric, Y[test], predicted, clients, GROUPS[test]).mean())
    return np.array(scores)


def test_in_a_routed_search():
    folds, averages = ClientKFold(3, random_state=0), ["micro", "macro"]
    scoring = {average: ClientScorer(MSE, average=average) for average in averages}
    scoring["absolute"] = ClientScorer("neg_mean_absolute_error")
    with config_context(**ROUTED):
        search = GridSearchCV(
            make_pipeline(StandardScaler(), GaussianMean()),
            {"gaussianmean__noise_variance": [None, 300.0]},
            cv=folds,
            scoring=scoring,
            refit=False,
        ).fit(X, Y, groups=GROUPS)
    for k, variance in enumerate((None, 300.0)):
        model = GaussianMean(noise_variance=variance)
        expected = {average: by_hand(model, average, folds) for average in averages}
        expected["absolute"] = by_hand(model, "micro", folds, absolute_loss)
        for name, scores in expected.items():
            got = [search.cv_results_[f"split{j}_test_{name}"][k] for j in range(3)]
            np.testing.assert_allclose(got, scores, rtol=1e-12)


@pytest.mark.parametrize("routed", [False, True])
def test_with_a_client_column(routed):
    folds = ClientKFold(3, random_state=0, client_column="site")
    scoring = {
        "rows": ClientScorer(MSE),
        "clients": ClientScorer(MSE, average="macro", client_column="site"),
        "known": ClientScorer(MSE, subset="known", client_column="site"),
        "string": MSE,
    }
    with config_context(enable_metadata_routing=routed):
        result = cross_validate(
            ClientColumn(GaussianMean(), "site"), FRAME, Y, cv=folds, scoring=scoring
        )
    expected = by_hand(GaussianMean(), "micro", ClientKFold(3, random_state=0))
    for name in ("rows", "known", "string"):
        np.testing.assert_allclose(result[f"test_{name}"], expected)
    np.testing.assert_allclose(
        result["test_clients"], by_hand(GaussianMean(), "macro", ClientKFold(3, random_state=0))
    )


def test_plain_estimators_get_macro_scores():
    ridge = Ridge().fit(X, Y)
    expected = per_client(squared_loss, Y, ridge.predict(X)).mean()
    macro = ClientScorer(MSE, average="macro")
    assert macro(ridge, X, Y, groups=GROUPS) == pytest.approx(expected, rel=1e-12)
    folds = KFold(3, shuffle=True, random_state=0)
    with config_context(**ROUTED):
        result = cross_validate(Ridge(), X, Y, params={"groups": GROUPS}, cv=folds, scoring=macro)
    by_fold = []
    for train, test in folds.split(X):
        predicted = Ridge().fit(X[train], Y[train]).predict(X[test])
        clients = np.unique(GROUPS[test])
        by_fold.append(per_client(squared_loss, Y[test], predicted, clients, GROUPS[test]).mean())
    np.testing.assert_allclose(result["test_score"], by_fold)
    with pytest.raises(ValueError, match=r"Ridge.*client-aware"):
        ClientScorer(MSE, subset="known")(ridge, X, Y, groups=GROUPS)


def test_through_a_search():
    with config_context(**ROUTED):
        search = GridSearchCV(
            make_pipeline(StandardScaler(), GaussianMean()),
            {"gaussianmean__method": ["reml"]},
            cv=ClientKFold(2, random_state=0),
            scoring=ClientScorer(MSE),
        ).fit(X, Y, groups=GROUPS)
    for routed in (False, True):
        with config_context(enable_metadata_routing=routed):
            for average in ("micro", "macro"):
                scorer = ClientScorer(MSE, average=average)
                assert scorer(search, X, Y, groups=GROUPS) == scorer(MODEL, X, Y, groups=GROUPS)


@pytest.mark.parametrize("cv", [KFold(3), ClientKFold(3, random_state=0)])
def test_string_scorers_name_the_ways_out(cv):
    names = r"groups=.*enable_metadata_routing=True.*ClientScorer.*ClientColumn"
    with config_context(**ROUTED), pytest.raises(ValueError, match=names):
        cross_validate(
            GaussianMean(), X, Y, params={"groups": GROUPS}, cv=cv, scoring=MSE, error_score="raise"
        )


def test_predictions_are_made_once():
    class Counting(GaussianMean):
        calls = 0

        def predict(self, X, *, groups=None):
            type(self).calls += 1
            return super().predict(X, groups=groups)

    model = Counting().fit(X, Y, groups=GROUPS)
    ClientScorer(MSE, average="macro")(model, X, Y, groups=GROUPS)
    assert Counting.calls == 1


def test_scorer_objects_and_callables():
    macro = per_client(squared_loss, Y, PREDICTED).mean()

    def scorer(estimator, X, y):
        return -mean_squared_error(y, estimator.predict(X))

    made = make_scorer(mean_squared_error, greater_is_better=False)
    for scoring in (get_scorer(MSE), made, scorer):
        got = ClientScorer(scoring, average="macro")(MODEL, X, Y, groups=GROUPS)
        assert got == pytest.approx(macro, rel=1e-12)


def test_targets_and_ids_in_other_containers():
    expected = ClientScorer(MSE, average="macro")(MODEL, X, Y, groups=GROUPS)
    shuffled_index = np.random.default_rng(0).permutation(N_ROWS)
    got = ClientScorer(MSE, average="macro")(
        MODEL,
        pd.DataFrame(X).set_index(shuffled_index),
        pd.Series(Y, index=shuffled_index),
        groups=pd.Series(GROUPS, index=shuffled_index).astype("category"),
    )
    assert got == expected
    two = np.column_stack([Y, -Y])
    model = GaussianMean().fit(X, two, groups=GROUPS)
    assert ClientScorer(MSE, average="macro")(model, X, two, groups=GROUPS) == pytest.approx(
        per_client(squared_loss, two, model.predict(X, groups=GROUPS)).mean()
    )


def test_groups_must_come_from_somewhere():
    for scorer in (ClientScorer(MSE, average="macro"), ClientScorer(MSE, subset="known")):
        with pytest.raises(
            ValueError, match=r"groups=.*enable_metadata_routing=True.*client_column="
        ):
            scorer(MODEL, X, Y)
    with pytest.raises(ValueError, match=r"\b6 clients.*groups="):
        ClientScorer(MSE)(MODEL, X, Y)
    with pytest.raises(ValueError, match=r"'site'.*ndarray"):
        ClientScorer(MSE, client_column="site")(MODEL, X, Y)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"average": "mean"}, r"average.*'micro', 'macro'.*'mean'"),
        ({"subset": "old"}, r"subset.*all, known, new.*'old'"),
        ({"subset": {}}, r"subset.*dict.*\{\}"),
        ({"subset": {"movie": "all"}}, r"subset.*'known' or 'new'.*'movie': 'all'"),
        ({"scoring": "nonsense"}, "nonsense"),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(ValueError, match=message):
        ClientScorer(**{"scoring": MSE, **parameters})


def test_repr_pickle_and_requests():
    scorer = ClientScorer(MSE, average="macro", subset="known", client_column="site")
    assert repr(scorer) == (
        "ClientScorer('neg_mean_squared_error', average='macro', subset='known', "
        "client_column='site')"
    )
    copy = pickle.loads(pickle.dumps(scorer))
    assert repr(copy) == repr(scorer)
    assert copy(MODEL, X, Y, groups=GROUPS) == scorer(MODEL, X, Y, groups=GROUPS)
    requests = scorer.get_metadata_routing()
    assert requests.consumes("score", ["groups", "sample_weight"]) == {"groups"}
    asked = ClientScorer(MSE).set_score_request(sample_weight=True).get_metadata_routing()
    assert asked.consumes("score", ["groups", "sample_weight"]) == {"groups", "sample_weight"}


@pytest.mark.parametrize("scoring", ["neg_mean_squared_error", "neg_mean_absolute_error"])
def test_scores_of_all_clients_at_once_are_those_one_by_one(scoring):
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 40, 300)
    X, y = np.zeros((300, 1)), rng.normal(size=300) + groups
    model = GaussianMean().fit(X, y, groups=groups)
    together = ClientScorer(scoring, average=lambda scores: scores[7])
    alone = ClientScorer(get_scorer(scoring), average=lambda scores: scores[7])
    expected = alone(model, X, y, groups=groups)
    assert together(model, X, y, groups=groups) == pytest.approx(expected, rel=1e-12)
    y[5] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        together(model, X, y, groups=groups)


@pytest.mark.parametrize("kind", ["uint8", "bool", "int32", object])
def test_small_and_odd_number_types_are_scored_alike(kind):
    rng = np.random.default_rng(0)
    groups, y = np.repeat(np.arange(6), 5), rng.integers(0, 2, 30)
    X = np.zeros((30, 1))
    model = BernoulliMean().fit(X, y, groups=groups)
    scorer = ClientScorer("neg_mean_squared_error", average="macro")
    expected = scorer(model, X, y.astype(float), groups=groups)
    assert scorer(model, X, y.astype(kind), groups=groups) == pytest.approx(expected)
    assert -1 <= expected <= 0


def test_y_of_another_length():
    X, y, groups = np.zeros((4, 1)), np.arange(4.0), [1, 1, 2, 2]
    model = GaussianMean().fit(X, y, groups=groups)
    for wrong in (y[:3], np.arange(5.0)):
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            ClientScorer("r2", average="macro")(model, X, wrong, groups=groups)


def test_scores_of_every_client_by_name():
    X, y, groups = np.zeros((7, 1)), np.arange(7.0), np.array(["b", "a", "a", "b", "b", "c", "c"])
    model = GaussianMean().fit(X[:5], y[:5], groups=groups[:5])
    scorer = ClientScorer("neg_mean_squared_error", average=None)
    found = scorer(model, X, y, groups=groups)
    table = client_scores(model, X, y, groups=groups, scoring="neg_mean_squared_error")
    assert found == table["score"].to_dict()
    known = ClientScorer("r2", average=None, subset="known")(model, X, y, groups=groups)
    assert list(known) == ["a", "b"]
    with pytest.raises(ValueError, match=r"average=None.*groups=.*client_column="):
        scorer(model, X, y)
