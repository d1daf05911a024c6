"""Checks that every public estimator passes, from one registry."""

import copy
import dataclasses
import math
import pickle
import re
import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
from scipy.special import expit
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import has_fit_parameter

import pfl_sklearn
from pfl_sklearn import (
    ClientColumn,
    GaussianMean,
    PersonalizedLinearRegression,
    SingleClientWarning,
)
from pfl_sklearn.base import ClientMixin, UnseenClientsWarning
from pfl_sklearn.linear_model import NotEstimableWarning, SeparationWarning
from pfl_sklearn.priors import DiscretePrior, GaussianPrior, LaplacePrior
from pfl_sklearn.privacy._spending import unit_of
from tests.helpers.finite import not_finite
from tests.helpers.registry import (
    COMPOSED,
    CONFIGURATIONS,
    ESTIMATORS,
    FAST,
    FIELD,
    MEANS,
    NEURAL,
    PRIVATE,
    PRIVATE_ROUNDS,
    REGRESSIONS,
    RELEASING,
    ROUNDS,
    STREAMS,
    UNREPEATABLE,
    VARIANTS,
    assert_same_estimates,
    documented_exceptions,
    estimates,
    every_one_of,
    first_of_each_class,
    fit_quietly,
    make_table,
    of_counts,
    plain_fit,
    population,
    response,
)
from tests.helpers.torch import WITHOUT_TORCH

# Some labels are random, so that rounds which end by themselves may be of no use.
pytestmark = pytest.mark.filterwarnings("ignore:no round of .* lowered the loss of held-out rows")

SHORT = {"n_rounds": 5, "local_steps": 8, "random_state": 0}  # enough to pass scikit-learn's checks


# Wrappers, for scikit-learn's checks. The client column is one of their float features there, so
# every row is a client and the noise variance has to be known.
WRAPPERS = [ClientColumn(GaussianMean(noise_variance=1.0), 0)]


classifiers = [estimator for estimator in FIELD if is_classifier(estimator)]
PUBLIC = [*FAST, *classifiers, *COMPOSED]
# One of each way to read rows, for checks of what is done once for all estimators of the kind.
FAMILIES = [*(MEANS[0], REGRESSIONS[0], ROUNDS[1]), *(*STREAMS, *NEURAL[:1], COMPOSED[2])]
RANDOM_SLOPES = next(one for one in VARIANTS if repr(one) == "PersonalizedLinearRegression()")
every = every_one_of(PUBLIC)
every_release = every_one_of([*PRIVATE, *UNREPEATABLE])
every_configuration = every_one_of([*PUBLIC, *VARIANTS, *RELEASING, *UNREPEATABLE])
every_weighted = every_one_of([one for one in PUBLIC if has_fit_parameter(one, "sample_weight")])
every_mean = pytest.mark.parametrize("estimator", MEANS, ids=repr)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # separable classes
# Some tables have fewer rows than columns, and their targets are no counts.
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
@pytest.mark.filterwarnings("ignore:(y|sample_weight) holds fractions:UserWarning")
@pytest.mark.filterwarnings("ignore:The counts are overdispersed:UserWarning")
@parametrize_with_checks(
    [*MEANS, RANDOM_SLOPES, *REGRESSIONS[1:], *STREAMS],
    expected_failed_checks=lambda one: getattr(get_tags(one), "expected_failed_checks", {}),
)
def test_sklearn_checks(estimator, check):
    check(estimator)


# Networks share the code that these checks reach, but for the targets and what clients keep.
OTHER_STATES = {"LocalNetRegressor", "FedEMClassifier"}
CHECKED_NETS = [
    clone(net).set_params(**SHORT)
    for net in [*NEURAL, *FIELD]
    if net in NEURAL or type(net).__name__ in OTHER_STATES
]
FAILED_BY_STACKS = {"check_sample_weight_equivalence_on_dense_data": "its folds are other ones"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:TableEncoder leaves out columns")
@parametrize_with_checks(
    [ROUNDS[0], clone(ROUNDS[1]).set_params(n_rounds=20), *CHECKED_NETS, *COMPOSED],
    expected_failed_checks=lambda one: FAILED_BY_STACKS if hasattr(one, "estimators") else {},
)
def test_sklearn_checks_of_rounds(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.UnseenClientsWarning")
@parametrize_with_checks(WRAPPERS)
def test_sklearn_checks_of_wrappers(estimator, check):
    check(estimator)


@every_one_of([*PUBLIC, *VARIANTS, *first_of_each_class(PRIVATE)])
def test_row_order_does_not_matter(estimator):
    (X, y, groups), first = make_table(estimator), plain_fit(estimator)
    order = np.random.default_rng(1).permutation(len(y))
    if hasattr(estimator, "n_rounds") or hasattr(estimator, "horizon"):
        # Batches and streams follow the order of a client's rows.
        order[np.argsort(groups[order], kind="stable")] = np.argsort(groups, kind="stable")
    second = fit_quietly(estimator, X[order], y[order], groups=groups[order])
    for one, other in zip(estimates(first), estimates(second), strict=True):
        scale = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9 + 1e-6 * scale)


@every
def test_order_preserving_renaming_of_clients_changes_nothing(estimator):
    (X, y, groups), first = make_table(estimator), plain_fit(estimator)
    names = np.array([f"client {k:03d}" for k in range(groups.max() + 1)])
    second = fit_quietly(estimator, X, y, groups=names[groups])
    assert_same_estimates(first, second)
    np.testing.assert_array_equal(second.clients_, names[first.clients_])


CONTAINERS = {
    "list": list,
    "str": lambda ids: np.array([f"site {k:02d}" for k in ids]),
    "pandas": lambda ids: pd.Series(ids, index=np.arange(len(ids))[::-1]),
    "categorical": lambda ids: pd.Series(ids).astype("category"),
    "polars": lambda ids: pl.Series(ids),
    "datetime": lambda ids: pd.to_datetime("2020-01-01") + pd.to_timedelta(ids, unit="D"),
    "float": lambda ids: ids.astype(float),
}


@pytest.mark.parametrize(
    ("estimator", "kind"),
    [*((MEANS[0], kind) for kind in CONTAINERS), *((one, "pandas") for one in FAMILIES[1:])],
)
def test_containers_and_types_of_ids(estimator, kind):
    container = CONTAINERS[kind]
    (X, y, groups), plain = make_table(estimator), plain_fit(estimator)
    other = fit_quietly(estimator, X, y, groups=container(groups))
    assert_same_estimates(plain, other)
    np.testing.assert_array_equal(response(plain, X, groups), response(other, X, container(groups)))


@pytest.mark.parametrize(
    ("estimator", "frame"),
    [
        *((one, frame) for one in FAMILIES for frame in (pd.DataFrame, pl.DataFrame)),
        *((one, lambda X: X.astype(str)) for one in FAST if get_tags(one).no_validation),
    ],
)
def test_containers_of_rows(estimator, frame):
    (X, y, groups), plain = make_table(estimator), plain_fit(estimator)
    named = X if frame not in (pd.DataFrame, pl.DataFrame) else {"a": X[:, 0], "b": X[:, 1]}
    model = fit_quietly(estimator, frame(named), y, groups=groups)
    assert_same_estimates(model, plain)
    assert model.n_features_in_ == 2


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_the_name_of_a_column_is_no_groups(estimator):
    X, y, groups = make_table(estimator)
    table = pd.DataFrame({"a": X[:, 0], "site": groups.astype(str)})
    for method in ("fit", "partial_fit"):
        if hasattr(estimator, method):
            with pytest.raises(ValueError, match=r"'site'.*ClientColumn\(..., column='site'\)"):
                getattr(clone(estimator), method)(table, y, groups="site")


@every_mean
def test_one_client_keeps_its_own_mean(estimator):
    X, y, _ = make_table(estimator)
    with pytest.warns(SingleClientWarning, match=r"groups=.*\b44 rows") as caught:
        model = clone(estimator).fit(X, y)
    assert len(caught) == 1
    assert model.means_ == pytest.approx([np.mean(y)])
    assert model.shrinkage_[0] == 0
    assert math.isnan(model.icc_)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = clone(estimator).fit(X, y, groups=np.full(len(y), "only"))
    np.testing.assert_array_equal(response(model, X), response(named, X))


@every_configuration
def test_a_pickled_model_predicts_the_same(estimator):
    (X, _, groups), model = make_table(estimator), plain_fit(estimator)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(response(model, X, groups), response(again, X, groups))
    assert again.privacy_ == model.privacy_


@every_configuration
def test_for_client_predicts_alone(estimator):
    (X, _, groups), model = make_table(estimator), plain_fit(estimator)
    rounding = 1e-12 if hasattr(model, "net_") else 0.0  # products depend on the place of a row
    for client in model.clients_:
        rows = groups == client
        own, expected = model.for_client(client), response(model, X[rows], groups[rows])
        np.testing.assert_allclose(response(own, X[rows]), expected, rtol=rounding)
        assert _longest_array(own) <= 3  # population covariance of intercept and two slopes
    with pytest.raises(ValueError, match=r"client_id=99\b.*\b12 clients"):
        model.for_client(99)


def _longest_array(model):
    """Longest first axis among arrays, other than names and the parameters of a net."""
    ignored = {"feature_names_in_", *(["_population"] if hasattr(model, "net_") else [])}
    sizes = [
        np.shape(value)[0]
        for name, value in vars(model).items()
        if isinstance(value, np.ndarray) and value.ndim and name not in ignored
    ]
    return max(sizes, default=0)


@every_release
def test_release_holds_no_client(estimator):
    X, model = make_table(estimator)[0], plain_fit(estimator)
    released = model.release()
    assert not hasattr(released, "clients_")
    assert released.random_state is None
    assert _longest_array(released) <= 3
    np.testing.assert_array_equal(
        response(released, X), response(released, X, np.full(len(X), "anyone"))
    )
    np.testing.assert_array_equal(population(released), population(model))
    got = response(released, X)
    if hasattr(model, "population_mean_"):
        expected = np.full(len(X), model.population_mean_)
    elif hasattr(model, "net_"):
        net, rows = released.net_, X.astype(np.float32)
        expected = net.predict_proba(rows)[:, 1] if is_classifier(net) else net.predict(rows)[:, 0]
        got = got[:, 1] if got.ndim == 2 else got
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-7)
        return
    else:
        expected = X @ model.population_coef_ + model.population_intercept_
    if hasattr(model, "random_losses_"):  # it averages over clients by default
        method = "predict" if of_counts(estimator) else "predict_proba"
        got = getattr(released, method)(X, integrate=False)
        if of_counts(estimator):  # private ones are at most the highest plausible rate
            highest = math.inf if math.isinf(model.epsilon) else model.rate_range[1]
            expected = np.minimum(np.exp(expected), highest)
    if hasattr(model, "classes_") and hasattr(model, "population_coef_"):
        expected = expit(expected) if hasattr(model, "predict_proba") else expected > 0
    np.testing.assert_allclose(got[:, 1] if got.ndim == 2 else got, expected, rtol=1e-12)
    with pytest.raises(NotFittedError, match=r"population model.*\bclients_"):
        released.for_client(model.clients_[0])


def clients_alone(model):
    """Bits of what every client predicts with, by its id."""
    names = [name for name in model._client_attributes if hasattr(model, name)]
    alone = {each: model.for_client(each) for each in model.clients_.tolist()}
    return {client: [joblib.hash(getattr(m, k)) for k in names] for client, m in alone.items()}


ON_ROUNDS = [
    one
    for one in [*PUBLIC, *VARIANTS, *first_of_each_class(PRIVATE_ROUNDS)]
    if hasattr(one, "personalize")
]


@every_one_of(ON_ROUNDS)
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.filterwarnings("ignore:.* clients have one row, on which they adapt")
def test_personalize_moves_nobody_else(estimator):
    (X, y, groups), model = make_table(estimator), copy.deepcopy(plain_fit(estimator))
    new = np.isin(groups, [3, 4])
    ids = np.where(groups == 4, 99, groups)  # a known client with a new row, and a new client
    before, report, shared = clients_alone(model), model.privacy_, population(model)
    progress = model._progress
    rows = X[new] + 0.1, y[new]
    try:
        model.personalize(*rows, groups=ids[new])
    except ValueError as error:
        assert "nothing to personalize" in str(error)
        assert not hasattr(model, "_personal")
        assert clients_alone(model) == before
        return
    np.testing.assert_array_equal(model.clients_, np.union1d(plain_fit(estimator).clients_, [99]))
    after = clients_alone(model)
    assert {each: after[each] for each in before if each != 3} == {
        each: before[each] for each in before if each != 3
    }
    np.testing.assert_array_equal(population(model), shared)
    assert model._progress is progress
    assert "personalize" in model.privacy_.not_released[-1]
    assert dataclasses.replace(model.privacy_, not_released=report.not_released) == report
    # One by one, and on a model that knows nothing but the population's.
    alone = copy.deepcopy(plain_fit(estimator))
    for each in (99, 3):
        own = ids == each
        alone.personalize(X[own] + 0.1, y[own], groups=ids[own])
    assert clients_alone(alone) == after
    if np.isfinite(report.epsilon):
        home = plain_fit(estimator).release()
        assert not hasattr(home, "clients_")
        home.set_params(random_state=estimator.random_state)
        home.personalize(*rows, groups=ids[new])
        assert clients_alone(home) == {each: after[each] for each in (3, 99)}
        np.testing.assert_array_equal(
            response(home, *rows[:1], ids[new]), response(model, *rows[:1], ids[new])
        )


@every
def test_release_is_refused_without_privacy(estimator):
    model = plain_fit(estimator)
    with pytest.raises(ValueError, match=r"release.*epsilon"):
        model.release()


@every_configuration
def test_every_fit_reports_its_privacy(estimator):
    report = plain_fit(estimator).privacy_
    asked = getattr(estimator, "epsilon", math.inf)
    if estimator in PRIVATE_ROUNDS:  # calibrated from below, or by the multiplier
        assert (0.995 * asked if math.isfinite(asked) else 0) < report.epsilon <= asked
    else:
        assert report.epsilon == asked
    assert report.unit == unit_of(estimator)
    assert "clients_" in report.not_released
    if math.isfinite(report.epsilon):
        assert report.noise_reproducible == (estimator not in UNREPEATABLE)
        released = {"population_mean_", "population_coef_", "population_parameters_"}
        assert released & set(report.released)
        assert report.adversary
        assert sum("tables are valid" in text for text in report.assumptions) == 1
    else:
        assert report.warnings


@every_one_of([*PUBLIC, *first_of_each_class(PRIVATE)])
def test_refitting_with_bad_input_leaves_the_estimator_as_it_was(estimator):
    X, y, groups = make_table(estimator)
    fresh = clone(estimator)
    before = dict(vars(fresh))
    for bad in BAD_ROWS:
        changed, error = bad(X, y, groups)
        with pytest.raises((ValueError, TypeError), match=error):
            fresh.fit(*changed[:2], groups=changed[2])
        assert vars(fresh) == before
        with pytest.raises(NotFittedError):
            response(fresh, X, groups)


def test_refitting_forgets_what_the_new_prior_does_not_have():
    X, y, groups = make_table(PersonalizedLinearRegression())
    model = PersonalizedLinearRegression(DiscretePrior()).fit(X, y, groups=groups)
    assert model.responsibilities_.shape == (12, 2)
    model.set_params(prior=LaplacePrior()).fit(X, y, groups=groups)
    assert not hasattr(model, "responsibilities_")
    assert not hasattr(model, "coef_std_")


def _with(values, position, value):
    changed = np.array(values, dtype=object if not isinstance(value, float) else float)
    changed[position] = value
    return changed


BAD_ROWS = [
    lambda X, y, g: ((X, y, g[:-1]), r"groups.*\b\d+ ids.*\b\d+ rows"),
    lambda X, y, g: ((X, y, _with(g, 3, None)), r"groups.*None.*NaN.*row 3\b"),
    lambda X, y, g: ((X, y, _with(g, 3, np.nan)), r"groups.*NaN.*infinity.*row 3\b"),
    lambda X, y, g: ((X, y, _with(g, 3, 0.5)), r"groups.*float.*\b0\.5\b"),
    lambda X, y, g: ((X, y, _with(g, 3, "x")), r"groups.*\(int, str\)"),
    lambda X, y, g: ((X[:0], y[:0], g[:0]), "0 sample"),
    lambda X, y, g: ((X, _with(y, 2, np.nan), g), "NaN"),
    lambda X, y, g: ((X, y[:-1], g), "inconsistent numbers of samples"),
    lambda X, y, g: ((X, None, g), "y"),
]


@every
def test_predict_says_what_is_missing(estimator):
    (X, y, groups), model = make_table(estimator), copy.copy(plain_fit(estimator))
    with pytest.raises(NotFittedError):
        response(clone(estimator), X, groups)
    with pytest.raises(ValueError, match=r"groups=.*ClientColumn.*for_client"):
        response(model, X)
    with pytest.raises(ValueError, match=r"string 'site'.*ClientColumn\(..., column='site'\)"):
        response(model, X, "site")
    with pytest.raises(ValueError, match=r"groups.*string.*'0'.*number.*\b0\b"):
        response(model, X, groups.astype(str))
    with pytest.warns(UnseenClientsWarning):
        everybody = response(model, X[:1].repeat(len(X), axis=0), groups + 100)
    products = hasattr(model, "net_") or hasattr(model, "named_estimators_")
    same = 1e-12 if products else 0.0  # products depend on the place of a row
    assert np.ptp(everybody, axis=0).max() <= same
    np.testing.assert_allclose(
        response(model.set_params(unseen="population"), X[:1], groups[:1] + 100),
        everybody[:1],
        rtol=same,
    )
    with pytest.raises(ValueError, match="unseen='error'"):
        response(model.set_params(unseen="error"), X, groups + 100)
    with pytest.warns(SingleClientWarning):
        alone = clone(estimator).fit(X, y)
    with pytest.raises(ValueError, match=r"groups=.*without groups"):
        response(alone, X, groups)


@every_weighted
def test_weight_zero_is_an_absent_row(estimator):
    X, y, groups = make_table(estimator)
    weights = np.ones(len(y))
    weights[groups == 3] = 0
    weights[np.flatnonzero(groups == 5)[:1]] = 0
    kept = weights > 0
    first = fit_quietly(estimator, X, y, groups=groups, sample_weight=weights)
    second = fit_quietly(estimator, X[kept], y[kept], groups=groups[kept])
    for one, other in zip(estimates(first), estimates(second), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_array_equal(first.clients_, second.clients_)
    assert 3 not in first.clients_


@every_weighted
def test_bad_weights(estimator):
    X, y, groups = make_table(estimator)
    for weight, error in ((-1.0, "negative"), (0.0, "zero"), (np.nan, "NaN")):
        with pytest.raises(ValueError, match=f"(?i){error}"):
            clone(estimator).fit(X, y, groups=groups, sample_weight=np.full(len(y), weight))


OUT_OF_RANGE = [
    ("epsilon", 0),
    ("epsilon", -1.0),
    ("epsilon", math.nan),
    ("delta", 1.0),
    ("delta", -0.1),
    ("method", "magic"),
    ("mechanism", "magic"),
    ("unseen", "magic"),
    ("trust", "nobody"),
    ("solver", "magic"),
    ("unit", "house"),
    ("relation", "distant"),
    ("feature_bound", 0.0),
    ("target_bound", -1.0),
    ("max_iter", 0),
    ("tol", 0.0),
    ("alpha", -0.1),
    ("alpha", math.nan),
    ("client_fraction", 0.0),
    ("client_fraction", 1.1),
    ("n_rounds", 0),
    ("batch_size", 0),
    ("learning_rate", 0.0),
    ("noise_multiplier", -1.0),
    ("clip_norm", 0.0),
    ("noise_variance_bound", 0.0),
    ("clip_quantile", 1.0),
    ("checkpoint_every", 0),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_parameters_out_of_range(estimator):
    (X, y, groups), name_of_class = make_table(estimator), type(estimator).__name__
    params = estimator.get_params(deep=False)
    for name, value in OUT_OF_RANGE:
        if name in params:
            changed = clone(estimator).set_params(**{name: value})
            with pytest.raises(ValueError, match=f"The '{name}' parameter of {name_of_class}"):
                changed.fit(X, y, groups=groups)


@pytest.mark.parametrize("estimator", [*MEANS, *REGRESSIONS], ids=repr)
def test_unsupported_priors_are_refused(estimator):
    X, y, groups = make_table(estimator)
    for prior in ("magic", "exponential", GaussianPrior, 3.0):
        with pytest.raises(ValueError, match="prior"):
            clone(estimator).set_params(prior=prior).fit(X, y, groups=groups)


@every_mean
def test_summary_has_a_row_per_client(estimator):
    model = plain_fit(estimator)
    table = model.summary(level=0.9)
    assert list(table.index) == list(model.clients_)
    np.testing.assert_array_equal(table["mean"], model.means_)
    assert (table["lower"] <= table["mean"]).all()
    assert (table["mean"] <= table["upper"]).all()
    wider = model.summary(level=0.99)
    assert (wider["lower"] <= table["lower"]).all()


def _many_rows(X, y, groups):
    """The same with 6,000 rows more, of four of the clients."""
    rows = np.concatenate([np.arange(len(y)), np.tile(np.flatnonzero(groups < 4), 6_000)[:6_000]])
    return X[rows], y[rows], groups[rows]


def _equal_sizes(X, y, groups):
    """4,000 rows, as many of each client."""
    rows = np.arange(4_000)
    return X[rows % len(y)], y[rows % len(y)], rows // 1_000


def _of_clients(X, y, groups, clients):
    rows = np.isin(groups, clients)
    return X[rows], np.append(y[rows][:-1], abs(1 - y[rows][0])), groups[rows]


# Tables of finite numbers. Targets that are labels or counts have no scale.
SCALES = (1e-300, 1e-150, 1e-140, 1e-20, 1e100, 1e150)
TABLES = {
    **{f"y x {c}": lambda X, y, g, c=c: (X, c * y, g) for c in SCALES},
    **{f"X x {c}": lambda X, y, g, c=c: (c * X, y, g) for c in SCALES},
    "y + 1e12": lambda X, y, g: (X, y + 1e12, g),
    "y of one row 1e160": lambda X, y, g: (X, _with(y, 3, 1e160), g),
    "y of one row 1e308": lambda X, y, g: (X, _with(y, 3, 1e308), g),
    "X of one row 1e160": lambda X, y, g: (_with(X, 3, 1e160), y, g),
    "X of one row 1e308": lambda X, y, g: (_with(X, 3, 1e308), y, g),
    "a column x 1e-160": lambda X, y, g: (X * [1.0, 1e-160], y, g),
    "columns of two scales": lambda X, y, g: (X * [1.0, 1e10], y, g),
    "X + 1e9": lambda X, y, g: (X + 1e9, y, g),
    "y constant": lambda X, y, g: (X, np.full(len(y), 0.1), g),
    "X constant": lambda X, y, g: (np.full_like(X, 3.0), y, g),
    "equal columns": lambda X, y, g: (X[:, [0, 0]], y, g),
    "many rows": _many_rows,
    "equally many rows": _equal_sizes,
    "two clients": lambda X, y, g: _of_clients(X, y, g, [1, 2]),
    "one client": lambda X, y, g: _of_clients(X, y, g, [2]),
}
# Tables that a fit without privacy may refuse, with one of these sentences.
REFUSED = re.compile(
    r"too (large|small) to be squared|the squares of these features overflow|rounds diverged|"
    r"is constant over all rows|clients? with different values|needs at least 2 clients|"
    r"less than one client|a single client cannot identify|is too coarse to estimate|"
    r"random coefficients a standard deviation of|too large for the net's type|"
    r"floats beyond 2\*\*53|as many levels as rows|"
    r"is more than the number of clients|\d clients and \d+ coefficients that vary"
)


# The tables that most mistakes show on, for configurations of a family beyond its first.
TELLING = ("y x 1e-20", "y x 1e+100", "X of one row 1e308", "y constant", "one client")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "names"),
    [
        *((one, [*TABLES]) for one in (*FAST, RANDOM_SLOPES)),
        *((one, TELLING) for one in CONFIGURATIONS if one not in (*FAST, RANDOM_SLOPES, *COMPOSED)),
    ],
    ids=lambda value: repr(value) if value in CONFIGURATIONS else f"{len(value)} tables",
)
@pytest.mark.filterwarnings("ignore::pfl_sklearn.UnseenClientsWarning")
def test_finite_tables_give_finite_answers(estimator, names):
    """Or a refusal in one sentence, which only a fit without privacy may give."""
    plain = make_table(estimator)
    for name in names:
        change = TABLES[name]
        if (is_classifier(estimator) or of_counts(estimator)) and name.startswith("y"):
            continue
        X, y, groups = change(*plain)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SeparationWarning)
                warnings.simplefilter("ignore", ConvergenceWarning)
                warnings.filterwarnings("ignore", r".* coefficients fit all \d+ rows exactly")
                warnings.simplefilter("ignore", NotEstimableWarning)
                warnings.filterwarnings("ignore", "n_points=201 is too coarse")
                warnings.filterwarnings("ignore", "Grouping column 1 is left out")
                model = fit_quietly(estimator, X, y, groups=groups)
        except ValueError as error:
            assert REFUSED.search(str(error)), (name, error)
            private = estimator in (*PRIVATE, *UNREPEATABLE)
            clients = re.search(
                r"than one client|than the number of clients|\d clients and \d+ coefficients",
                str(error),
            )
            assert not private or clients, (name, error)
            continue
        seen = np.clip(X, -1e100, 1e100)  # beyond it predictions overflow, as they must
        found = set(not_finite(model, seen, groups)) - documented_exceptions(estimator, name)
        assert not found, name


def test_the_registry_has_every_public_estimator():
    names = ["compose", "estimation", "linear_model", "online"]
    modules = [getattr(pfl_sklearn, name) for name in names + ["neural_network"][WITHOUT_TORCH:]]
    public = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ClientMixin)
    }
    assert public == {type(estimator) for estimator in ESTIMATORS}


@every
@pytest.mark.filterwarnings("ignore:.* clients have one row, on which they adapt")
def test_groups_reach_the_last_step_of_a_routed_pipeline(estimator):
    X, y, groups = make_table(estimator)
    pipeline = make_pipeline(FunctionTransformer(), clone(estimator))
    with sklearn.config_context(enable_metadata_routing=True):
        pipeline.fit(X, y, groups=groups)
        got = response(pipeline, X, groups)
    np.testing.assert_array_equal(got, response(plain_fit(estimator), X, groups))
