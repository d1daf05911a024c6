"""The contract of client-aware estimators: who needs ids, when, and what they get."""

import datetime as dt

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PersonalizedLinearRegression,
    SingleClientWarning,
    UnseenClientsWarning,
)
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import LaplacePrior

ROUTED = {"enable_metadata_routing": True}


def make_rows(kind, n_clients=6, n_rows=90, seed=0):
    rng = np.random.default_rng(seed)
    groups = np.array([f"site {k}" for k in range(n_clients)])[rng.integers(0, n_clients, n_rows)]
    level = np.unique(groups, return_inverse=True)[1]
    X = rng.normal(size=(n_rows, 2))
    if kind is BernoulliMean:
        return X, (rng.random(n_rows) < (level + 0.5) / n_clients).astype(int), groups
    return X, 2.0 * level + rng.normal(size=n_rows), groups


@pytest.fixture(params=[GaussianMean, BernoulliMean])
def kind(request):
    return request.param


@pytest.fixture
def rows(kind):
    return make_rows(kind)


def response(model, X, **params):
    if hasattr(model, "predict_proba"):
        return model.predict_proba(X, **params)[:, 1]
    return model.predict(X, **params)


def expected_response(model, groups):
    """Straight from the fitted arrays."""
    position = {client: k for k, client in enumerate(model.clients_.tolist())}
    everybody = np.append(model.means_, model.population_mean_)
    return everybody[[position.get(client, -1) for client in groups]]


@pytest.mark.parametrize("n_unseen", [45, 46, 90])
def test_half_of_the_rows_unseen_warns(kind, rows, n_unseen):
    X, y, groups = rows
    model = kind().fit(X, y, groups=groups)
    strange = np.where(np.arange(90) < n_unseen, "stranger", groups)
    says = r"half.*ClientKFold.*sorted.*shuffle.*another table.*new clients.*unseen='population'"
    with pytest.warns(UnseenClientsWarning, match=says):
        got = response(model, X, groups=strange)
    np.testing.assert_array_equal(got, expected_response(model, strange))


@pytest.mark.parametrize(("unseen", "n_unseen"), [("warn", 44), ("population", 90)])
def test_fewer_or_expected_strangers_do_not_warn(kind, rows, unseen, n_unseen):
    X, y, groups = rows
    model = kind(unseen=unseen).fit(X, y, groups=groups)
    strange = np.where(np.arange(90) < n_unseen, "stranger", groups)
    got = response(model, X, groups=strange)
    np.testing.assert_array_equal(got, expected_response(model, strange))


@pytest.mark.parametrize("container", [list, np.array, pd.Series, pd.Categorical])
def test_unseen_clients_can_be_an_error(kind, rows, container):
    X, y, groups = rows
    model = kind(unseen="error").fit(X, y, groups=groups)
    np.testing.assert_array_equal(
        response(model, X, groups=container(groups)), expected_response(model, groups)
    )
    strange = groups.copy().astype(object)
    strange[[5, 7]] = "stranger"
    with pytest.raises(ValueError, match=r"^2 of 90 rows.*'stranger'.*unseen='error'"):
        response(model, X, groups=container(strange))


@pytest.mark.parametrize("call", ["predict", "release", "for_client"])
def test_before_fit(kind, rows, call):
    X, _, groups = rows
    arguments = {"predict": (X,), "release": (), "for_client": (groups[0],)}[call]
    with pytest.raises(NotFittedError):
        getattr(kind(), call)(*arguments)


def test_for_client_holds_nothing_of_the_others(kind, rows):
    X, y, groups = rows
    model = kind().fit(X, y, groups=groups)
    for k, client in enumerate(model.clients_):
        own = model.for_client(client)
        assert own.clients_.tolist() == [client]
        np.testing.assert_array_equal(response(own, X[:4]), np.full(4, model.means_[k]))
        np.testing.assert_array_equal(
            response(own, X[:3], groups=[client, client, "stranger"]),
            [model.means_[k], model.means_[k], model.population_mean_],
        )
        with pytest.warns(UnseenClientsWarning):
            response(own, X, groups=groups)
        others = [value for j, value in enumerate(model.means_) if j != k]
        for name, value in vars(own).items():
            if name == "_priors":  # weights of priors: the population model
                continue
            value = value.mixture.means[:, 0] if name == "_intervals" else value
            sizes = np.shape(value)
            allowed = 2 if name in ("classes_", "feature_names_in_") else 1
            assert not sizes or sizes[0] <= allowed, name
            if sizes and np.asarray(value).dtype.kind == "f":
                assert not np.isin(value, others).any(), name


def test_for_client_by_equal_values_of_other_types(kind, rows):
    X, y, groups = rows
    numbers = np.unique(groups, return_inverse=True)[1]
    days = np.datetime64("2020-01-01") + numbers
    by_number = kind().fit(X, y, groups=numbers)
    by_day = kind().fit(X, y, groups=days)
    expected = by_number.means_[[2]]
    for client in (2, np.int8(2), 2.0):
        np.testing.assert_array_equal(by_number.for_client(client).means_, expected)
    for client in (dt.date(2020, 1, 3), pd.Timestamp("2020-01-03"), np.datetime64("2020-01-03")):
        np.testing.assert_array_equal(by_day.for_client(client).means_, expected)


@pytest.mark.parametrize(
    ("client", "error"),
    [
        ("nobody", r"client_id='nobody'.*\b6 clients"),
        (None, r"client_id.*\bNaN\b"),
        (pd.NA, r"client_id.*\bNaN\b"),
        (3, r"client_id.*number.*\b3\b.*string.*'site 0'"),
    ],
)
def test_for_client_of_strangers(kind, rows, client, error):
    X, y, groups = rows
    model = kind().fit(X, y, groups=groups)
    with pytest.raises(ValueError, match=error):
        model.for_client(client)


def test_for_client_knows_time_zones(kind, rows):
    X, y, groups = rows
    days = pd.Timestamp("2020-01-01 12:00", tz="Europe/Paris") + pd.to_timedelta(
        np.unique(groups, return_inverse=True)[1], unit="D"
    )
    model = kind().fit(X, y, groups=days)
    assert model.for_client(days[0]).means_.shape == (1,)


def test_groups_are_requested_without_asking(kind):
    with config_context(**ROUTED):
        requests = kind().get_metadata_routing()
    for method in ("fit", "predict", "score"):
        assert requests.consumes(method, ["groups"]) == {"groups"}, method
    assert not requests.consumes("fit", ["sample_weight"])


def test_return_std_through_a_routed_pipeline():
    X, y, groups = make_rows(GaussianMean)
    direct = GaussianMean(uncertainty="plug_in").fit(X, y, groups=groups)
    mixed = np.where(np.arange(len(groups)) < 5, "stranger", groups)
    with config_context(**ROUTED):
        pipeline = make_pipeline(StandardScaler(), clone(direct)).fit(X, y, groups=groups)
        mean, std = pipeline.predict(X, groups=mixed, return_std=True)
    np.testing.assert_array_equal(mean, expected_response(direct, mixed))
    position = {client: k for k, client in enumerate(direct.clients_)}
    known = [position[client] for client in mixed[5:]]
    np.testing.assert_array_equal(std[5:], direct.stds_[known])
    spread = np.sqrt(direct.prior_.covariance[0, 0] + direct.population_mean_std_**2)
    np.testing.assert_allclose(std[:5], spread, rtol=1e-12)


def test_a_routed_search_fits_and_scores_per_client(kind, rows):
    X, y, groups = rows
    grid = {"method": ["ml", "moments"]}
    scoring = "neg_mean_squared_error" if kind is GaussianMean else "neg_log_loss"
    folds = ClientKFold(3, random_state=0)
    with config_context(**ROUTED):
        search = GridSearchCV(
            make_pipeline(StandardScaler(), kind()),
            {f"{kind.__name__.lower()}__{name}": values for name, values in grid.items()},
            cv=folds,
            scoring=ClientScorer(scoring),
        ).fit(X, y, groups=groups)
        got = search.best_estimator_.predict(X, groups=groups)
    by_hand = [
        [
            ClientScorer(scoring)(
                kind(method=method).fit(X[train], y[train], groups=groups[train]),
                X[test],
                y[test],
                groups=groups[test],
            )
            for train, test in folds.split(X, groups=groups)
        ]
        for method in grid["method"]
    ]
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], np.mean(by_hand, axis=1))
    best = kind(method=grid["method"][np.argmax(np.mean(by_hand, axis=1))])
    np.testing.assert_array_equal(got, best.fit(X, y, groups=groups).predict(X, groups=groups))


def test_a_search_without_routing_warns_that_groups_are_lost(kind, rows):
    X, y, groups = rows
    search = GridSearchCV(kind(), {"method": ["ml"]}, cv=ClientKFold(2, random_state=0))
    with pytest.warns(SingleClientWarning, match="enable_metadata_routing=True"):
        search.fit(X, y, groups=groups)
    assert search.best_estimator_.clients_.tolist() == [0]


def test_refitting_forgets_the_clients_of_before(kind, rows):
    X, y, groups = rows
    model = kind().fit(X, y, groups=groups)
    first = groups <= "site 2"
    model.fit(X[first], y[first], groups=groups[first])
    direct = kind().fit(X[first], y[first], groups=groups[first])
    assert model.clients_.tolist() == ["site 0", "site 1", "site 2"]
    np.testing.assert_array_equal(model.means_, direct.means_)


SEARCHED = {
    GaussianMean: ("covariance_type", ["spherical", "diag"]),
    BernoulliMean: ("alpha", [None, 2.0]),
    PersonalizedLinearRegression: ("covariance_type", ["diag", "spherical"]),
}
EVERY_KIND = pytest.mark.parametrize("kind", SEARCHED, ids=lambda kind: kind.__name__)


@EVERY_KIND
def test_a_nested_parameter_puts_the_object_in_place_of_its_name(kind):
    name, values = SEARCHED[kind]
    model = kind()
    assert f"prior__{name}" not in model.get_params()
    assert model.set_params(**{f"prior__{name}": values[1]}) is model
    assert getattr(model.prior, name) == values[1]
    assert getattr(clone(model).prior, name) == values[1]
    assert clone(kind()).prior == kind().prior  # a name stays a name


@EVERY_KIND
def test_a_prior_given_by_name_can_be_searched(kind):
    X, y, groups = make_rows(kind)
    name, values = SEARCHED[kind]
    grid, folds = {f"prior__{name}": values}, ClientKFold(2, random_state=0)
    if kind is BernoulliMean:
        grid = {f"prior__{name}": [1.0, 2.0], "prior__beta": [3.0]}
    with config_context(**ROUTED):
        search = GridSearchCV(kind(), grid, cv=folds, scoring=None, error_score="raise")
        search.fit(X, y, groups=groups)
    assert {params[f"prior__{name}"] for params in search.cv_results_["params"]} == set(
        grid[f"prior__{name}"]
    )
    assert kind().prior == search.estimator.prior


def test_a_prior_given_by_name_can_be_searched_behind_a_column():
    X, y, groups = make_rows(BernoulliMean)
    grid = {"estimator__prior__alpha": [1.0, 2.0], "estimator__prior__beta": [3.0]}
    table = pd.DataFrame(X, columns=["a", "b"]).assign(site=groups)
    folds = ClientKFold(2, client_column="site")
    search = GridSearchCV(
        ClientColumn(BernoulliMean(), "site"), grid, cv=folds, error_score="raise"
    )
    best = search.fit(table, y).best_estimator_
    assert best.estimator.prior.get_params()["alpha"] in (1.0, 2.0)


@pytest.mark.parametrize("swap", [False, True])
def test_the_order_of_nested_parameters_does_not_matter(swap):
    params = [("prior", "laplace"), ("prior__scale", 1.0)]
    model = PersonalizedLinearRegression().set_params(**dict(params[::-1] if swap else params))
    assert isinstance(model.prior, LaplacePrior)
    assert model.prior.scale == 1.0
    given = LaplacePrior(scale=3.0)
    assert model.set_params(prior__scale=2.0, prior=given).prior is given
    assert given.scale == 2.0


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"prior__bogus": 1}, "'bogus'"),
        ({"prior__covariance_type": "diag", "prior__bogus": 1}, "'bogus'"),
        ({"unseen": "error", "bogus": 1}, "'bogus'"),
        ({"unseen": "error", "bogus__of": 1}, "'bogus'"),
        ({"prior": "beta", "prior__alpha": 1.0}, "prior='beta'"),
        ({"prior": None, "prior__alpha": 1.0}, "prior=None"),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("kind", [GaussianMean, PersonalizedLinearRegression])
def test_unknown_parameters_are_named_and_change_nothing(kind, params, name):
    model = kind()
    before = model.get_params()
    with pytest.raises(ValueError, match=name):
        model.set_params(**params)
    assert model.get_params() == before


def test_a_parameter_that_is_no_component_is_named():
    with pytest.raises(ValueError, match=r"method='reml' of GaussianMean .* method__"):
        GaussianMean().set_params(method__of=1)
