"""Checks that every public estimator passes, from one registry."""

import copy
import dataclasses
import functools
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
from scipy.sparse import csr_array
from scipy.special import expit
from sklearn.base import clone, is_classifier
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import has_fit_parameter

import pfl_sklearn
from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    CollaborativeMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PoissonMean,
    PPSGDClassifier,
    PPSGDRegressor,
    SingleClientWarning,
    neural_network,
)
from pfl_sklearn.base import ClientMixin, UnseenClientsWarning
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientSelector,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.linear_model import NotEstimableWarning, SeparationWarning
from pfl_sklearn.model_selection import PrivateSelectCV
from pfl_sklearn.priors import (
    BetaPrior,
    DirichletPrior,
    DiscretePrior,
    GammaPrior,
    GaussianMixturePrior,
    GaussianPrior,
    LaplacePrior,
)
from pfl_sklearn.privacy._spending import unit_of
from tests.helpers.blinded import blind, what_leaves
from tests.helpers.finite import not_finite
from tests.helpers.slow import slow
from tests.helpers.torch import WITHOUT_TORCH

# Some labels are random, so that rounds which end by themselves may be of no use.
pytestmark = pytest.mark.filterwarnings("ignore:no round of .* lowered the loss of held-out rows")

# Every public estimator: scikit-learn's checks and ours. Those that draw have a seed.
MEANS = [GaussianMean(), BernoulliMean(), PoissonMean()]
REGRESSIONS = [
    PersonalizedLinearRegression(),
    PersonalizedLogisticRegression(),
    PersonalizedPoissonRegression(),
]
ROUNDS = [PPSGDRegressor(random_state=0), PPSGDClassifier(random_state=0)]
SHORT = {"n_rounds": 5, "local_steps": 8, "random_state": 0}  # enough to pass scikit-learn's checks
FLAT = {"n_rounds": None, "tol": 0.3, "local_steps": 2, "random_state": 0}
SHORTER = {"n_rounds": 2, "local_steps": 2, "random_state": 0}
FAST_NETS = {"FedAvgClassifier", "FedAvgRegressor", "AdaPeDClassifier"}


def nets():
    """All neural estimators; regressors share all but the targets with their classifiers."""
    if WITHOUT_TORCH:
        return []
    names = sorted(set(neural_network.__all__) - {"MLP"})
    return [getattr(neural_network, name)(**SHORTER) for name in names]


NEURAL = [net for net in nets() if type(net).__name__ in FAST_NETS]
FIELD = [net for net in nets() if type(net).__name__ not in FAST_NETS]  # their checks are slow
STREAMS = [CollaborativeMean()]
# Around others. Few folds and linear models: their defaults are tested in tests/compose.
LINES = [("line", LinearRegression()), ("own", PersonalizedLinearRegression(unseen="population"))]
CLASSIFIERS = [("line", LogisticRegression()), ("own", PersonalizedLogisticRegression())]
COMPOSED = [
    ClientAsFeature(HistGradientBoostingRegressor(max_iter=10), random_state=0),
    ClientAsFeature(HistGradientBoostingClassifier(max_iter=10), "target", random_state=0),
    PersonalizedStackingRegressor(LINES[:1], cv=2, fallback=False, random_state=0),
    PersonalizedStackingClassifier(CLASSIFIERS[:1], cv=2, fallback=False, random_state=0),
    ClientSelector(LINES, cv=3, random_state=0),
    ClientSelector(CLASSIFIERS, how="best", cv=3, random_state=0),
]
FAST = [*MEANS, *REGRESSIONS, *ROUNDS, *STREAMS, *NEURAL]
ESTIMATORS = [*FAST, *FIELD, *COMPOSED]
# Other configurations, for our checks only.
VARIANTS = [
    GaussianMean(noise_variance=1.0),
    GaussianMean(GaussianPrior(mean=0.0, covariance=1.0)),
    GaussianMean("gaussian_mixture"),
    GaussianMean("discrete"),
    GaussianMean(GaussianMixturePrior("bic", covariance_type="full", max_components=3)),
    GaussianMean("discrete", method="printed"),
    PoissonMean("grid"),
    PoissonMean(GammaPrior(2.0, 1.0)),
    PoissonMean(method="moments", uncertainty="plug_in"),
    PersonalizedLinearRegression(GaussianPrior(covariance_type="full"), random=["intercept", 1]),
    PersonalizedLinearRegression(GaussianPrior(covariance_type="diag")),
    PersonalizedLinearRegression(GaussianPrior(covariance_type="low_rank"), method="ml"),
    PersonalizedLinearRegression(GaussianPrior(covariance=math.inf)),
    PersonalizedLinearRegression(LaplacePrior(), random="intercept"),
    PersonalizedLinearRegression(GaussianMixturePrior(), random="intercept"),
    PersonalizedLinearRegression(DiscretePrior(), random="intercept"),
    PersonalizedLogisticRegression(GaussianPrior(covariance_type="diag"), random=["intercept"]),
    PersonalizedLogisticRegression(GaussianPrior(mean=0.0, covariance=1.0)),
    PersonalizedPoissonRegression(random="intercept", family="negative_binomial", tol=1e-7),
    CollaborativeMean(decision="test"),
    CollaborativeMean(mechanism="pm1", noise_variance=1.0),
    PPSGDRegressor(alpha=0, average=True, random_state=0),
    PPSGDRegressor(alpha=math.inf, batch_size=2, weighting="clients", random_state=0),
    PPSGDRegressor(sampling="fixed", client_fraction=0.3, clip_norm=1.0, random_state=0),
    PPSGDClassifier(loss="squared_error", client_fraction=0.3, random_state=0),
]
if not WITHOUT_TORCH:
    VARIANTS += [
        neural_network.FedAvgClassifier(
            fine_tune_steps=5, proximal=1.0, label_prior="client", **SHORTER
        ),
        neural_network.FedAvgClassifier(head="bayes", client_fraction=0.5, **SHORTER),
        neural_network.AdaPeDClassifier(
            personal_start="global", global_loss=1.0, train_unsampled=True, **SHORTER
        ),
        neural_network.LocalNetRegressor(**FLAT),
    ]
# Wrappers, for scikit-learn's checks. The client column is one of their float features there, so
# every row is a client and the noise variance has to be known.
WRAPPERS = [ClientColumn(GaussianMean(noise_variance=1.0), 0)]
# Private configurations, for our checks only.
PRIVATE = [
    GaussianMean(epsilon=1.0, clip_norm=8.0, random_state=0),
    GaussianMean(epsilon=1.0, clip_norm=8.0, trust="local", noise_variance=1.0, random_state=0),
    GaussianMean("discrete", noise_variance=1.0, epsilon=8.0, clip_norm=8.0, random_state=0),
    GaussianMean(
        "gaussian_mixture",
        noise_variance=1.0,
        epsilon=8.0,
        clip_norm=8.0,
        trust="local",
        random_state=0,
    ),
    CollaborativeMean(epsilon=8.0, bounds=(-8.0, 8.0), random_state=0),
    CollaborativeMean(
        epsilon=8.0, bounds=(-8.0, 8.0), mechanism="tree", decision="test", random_state=0
    ),
    BernoulliMean(epsilon=1.0, random_state=0),
    BernoulliMean(epsilon=1.0, mechanism="two_bit", random_state=0),
    BernoulliMean(epsilon=1.0, delta=1e-3, trust="central", random_state=0),
    PoissonMean(epsilon=1.0, cap=60, random_state=0),
    PoissonMean("grid", epsilon=1.0, cap=60, random_state=0),
    PoissonMean(epsilon=1.0, cap=60, delta=1e-3, trust="central", random_state=0),
    PersonalizedLinearRegression(
        GaussianPrior(covariance=4.0),
        epsilon=1.0,
        feature_bound=2.0,
        target_bound=8.0,
        random_state=0,
    ),
    PersonalizedLinearRegression(
        GaussianPrior(covariance=4.0),
        random="intercept",
        noise_variance=1.0,
        epsilon=1.0,
        feature_bound=2.0,
        target_bound=8.0,
        unit="row",
        random_state=0,
    ),
    PersonalizedLinearRegression(
        random="intercept", epsilon=1.0, feature_bound=2.0, target_bound=8.0, random_state=0
    ),
    PersonalizedLinearRegression(
        epsilon=1000.0, feature_bound=2.0, target_bound=8.0, random_state=0
    ),
    PersonalizedLogisticRegression(
        epsilon=1.0, feature_bound=2.0, max_rows_per_client=10, n_rounds=4, random_state=0
    ),
    PersonalizedPoissonRegression(
        epsilon=1.0,
        feature_bound=2.0,
        max_rows_per_client=10,
        rate_range=(0.1, 10.0),
        n_rounds=4,
        random_state=0,
    ),
    PersonalizedLogisticRegression(
        GaussianPrior(covariance=1.0),
        random="all",
        epsilon=1.0,
        feature_bound=2.0,
        max_rows_per_client=10,
        n_rounds=4,
        random_state=0,
    ),
    PersonalizedPoissonRegression(
        random=["intercept", 1],
        epsilon=1000.0,
        feature_bound=2.0,
        max_rows_per_client=10,
        rate_range=(0.1, 10.0),
        n_rounds=4,
        random_state=0,
    ),
]
NOISE = {"clip_norm": 1.0, "learning_rate": 0.1, "n_rounds": 20, "random_state": 0}
PRIVATE_ROUNDS = [
    PPSGDRegressor(epsilon=1.0, n_rounds=20, random_state=0),
    PPSGDRegressor(epsilon=1.0, **NOISE),
    PPSGDRegressor(noise_multiplier=2.0, average=True, client_fraction=0.5, **NOISE),
    PPSGDRegressor(noise_multiplier=2.0, clip_quantile=0.5, weighting="clients", **NOISE),
    PPSGDRegressor(epsilon=4.0, sampling="fixed", client_fraction=0.5, **NOISE),
    PPSGDClassifier(epsilon=1.0, n_rounds=20, random_state=0),
    PPSGDClassifier(epsilon=1.0, **NOISE),
    PPSGDClassifier(noise_multiplier=1.0, alpha=math.inf, loss="squared_error", **NOISE),
]
CLIPPED = {"epsilon": 4.0, "clip_norm": 1.0, **SHORTER}
SAMPLED = {"client_fraction": 0.5}
PRIVATE_NETS = {
    "FedAvgClassifier": {"label_prior": DirichletPrior(), "head": 1.0},
    "AdaPeDClassifier": {"label_prior": "client", **SAMPLED},
    "AdaMixNetClassifier": {},
    "APFLRegressor": {"mixing": "adaptive"},
    "DittoClassifier": SAMPLED,
    "FedEMClassifier": SAMPLED,
    "FedMutualClassifier": SAMPLED,
    "FedPerClassifier": {},
    "FedRepRegressor": {},
    "PerFedAvgRegressor": {},
    "PFedMeClassifier": SAMPLED,
    "PPSGDNetClassifier": SAMPLED,
    "QuPeDClassifier": {},
    "ScaffoldClassifier": SAMPLED,
}
if not WITHOUT_TORCH:
    PRIVATE_ROUNDS += [
        *(getattr(neural_network, name)(**CLIPPED, **more) for name, more in PRIVATE_NETS.items()),
        neural_network.FedAvgRegressor(
            noise_multiplier=2.0, clip_norm=1.0, fine_tune_steps=2, **SHORTER
        ),
        neural_network.FedAvgClassifier(head="bayes", label_prior="client", **CLIPPED),
        neural_network.LocalNetClassifier(epsilon=4.0, label_prior=DirichletPrior(), **SHORTER),
        neural_network.AdaPeDClassifier(
            train_unsampled=2, noise="per_step", **CLIPPED | SAMPLED | {"epsilon": 8.0}
        ),
    ]
PRIVATE += PRIVATE_ROUNDS
# Its noise cannot be drawn again, so nothing that compares two fits applies.
UNREPEATABLE = [
    GaussianMean(
        mechanism="discrete_gaussian",
        trust="local",
        noise_variance=1.0,
        epsilon=4.0,
        clip_norm=8.0,
        random_state=0,
    )
]
RELEASING = [
    *PRIVATE,
    GaussianMean(
        mechanism="quantizer", n_bits=8, clip_norm=8.0, noise_variance=1.0, random_state=0
    ),
]


def with_slow(estimators):
    """All of them; slow are those after the first private one of a class, and other variants."""
    fast = {id(estimator) for estimator in FAST}
    private = [estimator for estimator in estimators if estimator not in (*ESTIMATORS, *VARIANTS)]
    firsts = {type(one): one for one in private[::-1] if not in_field(one)}
    fast |= {id(first) for first in firsts.values()}
    later = [estimator for estimator in estimators if id(estimator) not in fast]
    return [*(one for one in estimators if id(one) in fast), *slow(later)]


LARGEST_COUNT = 10**9  # of a row that PoissonMean takes


def of_counts(estimator):
    """Whether targets are whole numbers, which have no scale."""
    return isinstance(estimator, PoissonMean | PersonalizedPoissonRegression)


def in_field(estimator):
    return isinstance(estimator, tuple(map(type, FIELD)))


def others(estimator):
    """Whether an estimator is one of the field, or hands rows on to scikit-learn's boosting."""
    return in_field(estimator) or estimator in COMPOSED


def first_of_each_class(estimators):
    return list({type(one): one for one in estimators[::-1]}.values())[::-1]


def every_one_of(estimators):
    """Parameters of a test, of which those beyond the fast ones are slow."""
    return pytest.mark.parametrize("estimator", with_slow(estimators), ids=repr)


classifiers = [estimator for estimator in FIELD if is_classifier(estimator)]
PUBLIC = [*FAST, *classifiers, *COMPOSED]
CONFIGURATIONS = [*ESTIMATORS, *VARIANTS, *RELEASING, *UNREPEATABLE]
# One of each way to read rows, for checks of what is done once for all estimators of the kind.
FAMILIES = [
    *(GaussianMean(), PersonalizedLinearRegression(random="intercept"), ROUNDS[1]),
    *(*STREAMS, *NEURAL[:1], COMPOSED[2]),
]
every = every_one_of(PUBLIC)
every_family = pytest.mark.parametrize("estimator", FAMILIES, ids=repr)
every_private = every_one_of(PRIVATE)
every_release = every_one_of([*PRIVATE, *UNREPEATABLE])
every_configuration = every_one_of([*PUBLIC, *VARIANTS, *RELEASING, *UNREPEATABLE])
every_weighted = every_one_of([one for one in PUBLIC if has_fit_parameter(one, "sample_weight")])
every_mean = pytest.mark.parametrize("estimator", MEANS, ids=repr)


def make_table(estimator, n_clients=12, seed=0):
    """Rows of clients of unequal size, a client of one row among them (common size if private)."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, n_clients)
    sizes[0] = 1
    common = isinstance(estimator, BernoulliMean) and math.isfinite(estimator.epsilon)
    if common and estimator.mechanism != "two_bit":
        sizes[:] = 6
    groups = rng.permutation(np.repeat(np.arange(n_clients), sizes))
    centres = rng.normal(size=n_clients)
    if is_classifier(estimator):
        y = (rng.random(len(groups)) < 1 / (1 + np.exp(-centres[groups]))).astype(int)
    elif of_counts(estimator):
        y = rng.poisson(np.exp(centres[groups]))
    else:
        y = 3 * centres[groups] + rng.normal(size=len(groups))
    return rng.normal(size=(len(groups), 2)), y, groups


def fit_quietly(estimator, X, y, **params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pfl_sklearn.PrivacyWarning)
        warnings.filterwarnings("ignore", "The released noise variance")
        warnings.filterwarnings("ignore", ".* clients have one row, on which they adapt")
        warnings.filterwarnings("ignore", "The re(leased clusters|ports) do not")
        return clone(estimator).fit(X, y, **params)


@functools.cache
def plain_fit(estimator):
    """A fit to its table that no test changes."""
    X, y, groups = make_table(estimator)
    return fit_quietly(estimator, X, y, groups=groups)


def fit_as_it_is(estimator, X, y, groups):
    return clone(estimator).fit(X, y, groups=groups)


def estimates(model):
    """What a fit says of its clients: arrays with clients first."""
    names = ("means_", "stds_", "coef_", "intercept_", "coef_std_", "intercept_std_", "parameters_")
    return [getattr(model, name) for name in names if hasattr(model, name)]


def population(model):
    """What a fit says of the population, as one vector."""
    names = ("population_mean_", "population_coef_", "population_intercept_")
    names += ("population_parameters_",)
    return np.concatenate(
        [np.ravel(getattr(model, name)) for name in names if hasattr(model, name)]
    )


def assert_same_estimates(first, second):
    """The same bits: both fits are of one machine and kernel of the linear algebra."""
    for one, other in zip(estimates(first), estimates(second), strict=True):
        np.testing.assert_array_equal(one, other)


def response(model, X, groups=None):
    method = "predict_proba" if hasattr(model, "predict_proba") else "predict"
    return getattr(model, method)(X, groups=groups)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # separable classes
# Some tables have fewer rows than columns, and their targets are no counts.
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.NotEstimableWarning")
@pytest.mark.filterwarnings("ignore:(y|sample_weight) holds fractions:UserWarning")
@pytest.mark.filterwarnings("ignore:The counts are overdispersed:UserWarning")
@parametrize_with_checks(
    [*MEANS, *REGRESSIONS, *STREAMS],
    expected_failed_checks=lambda estimator: getattr(
        get_tags(estimator), "expected_failed_checks", {}
    ),
)
def test_sklearn_checks(estimator, check):
    check(estimator)


# Networks share the code that these checks reach, but for the targets and what clients keep.
OTHER_STATES = {"AdaPeDClassifier", "LocalNetRegressor", "FedEMClassifier"}
CHECKED_NETS = [
    clone(net).set_params(**SHORT)
    for net in [*NEURAL, *FIELD]
    if "FedAvg" in repr(net) or type(net).__name__ in OTHER_STATES
]
FAILED_BY_STACKS = {
    "check_sample_weight_equivalence_on_dense_data": "its folds are other ones",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
@pytest.mark.filterwarnings("ignore::pfl_sklearn.linear_model.SeparationWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:TableEncoder leaves out columns")
@parametrize_with_checks(
    [
        ROUNDS[0],
        clone(ROUNDS[1]).set_params(n_rounds=20),
        *CHECKED_NETS,
        *COMPOSED,
    ],
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


@pytest.mark.parametrize("kind", CONTAINERS)
@every_family
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
    with pytest.warns(SingleClientWarning, match=r"groups=.*\b44 rows"):
        model = clone(estimator).fit(X, y)
    assert model.means_ == pytest.approx([np.mean(y)])
    assert model.shrinkage_[0] == 0
    assert math.isnan(model.icc_)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = clone(estimator).fit(X, y, groups=np.full(len(y), "only"))
    np.testing.assert_array_equal(response(model, X), response(named, X))


@pytest.mark.parametrize("estimator", [*PRIVATE[: -len(PRIVATE_ROUNDS)], *UNREPEATABLE], ids=repr)
def test_a_private_fit_at_infinite_epsilon_is_the_ordinary_one(estimator):
    X, y, groups = make_table(estimator)
    shared = ("prior", "random", "noise_variance", "bounds", "decision")
    given = {name: value for name, value in estimator.get_params().items() if name in shared}
    plain = type(estimator)(**given).fit(X, y, groups=groups)
    without = clone(estimator).set_params(epsilon=math.inf).fit(X, y, groups=groups)
    assert_same_estimates(without, plain)
    assert without.privacy_.epsilon == math.inf


@every_private
def test_noise_differs_between_fits_and_repeats_with_a_seed(estimator):
    X, y, groups = make_table(estimator)

    def fitted(seed):
        seeded = clone(estimator).set_params(random_state=seed)
        return tuple(population(fit_quietly(seeded, X, y, groups=groups)))

    assert fitted(0) == fitted(0) != fitted(1)
    # Noise may push a fit to a bound, or to equal chances of two bits, in up to 16 % of fits: ten
    # fits are the same with a chance below 1e-7. As a rule the second one differs already.
    first = fitted(None)
    assert any(fitted(None) != first for _ in range(9))


@pytest.mark.parametrize("estimator", UNREPEATABLE, ids=repr)
def test_a_seed_does_not_repeat_noise_of_the_operating_system(estimator):
    X, y, groups = make_table(estimator)
    fits = [fit_quietly(estimator, X, y, groups=groups) for _ in range(3)]
    same = [np.array_equal(population(fits[0]), population(other)) for other in fits[1:]]
    assert not all(same)  # noise on a grid repeats by chance once in 10,000 pairs: twice, 1e-8
    assert not any("random_state" in warning for warning in fits[0].privacy_.warnings)


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
    return {
        each: [joblib.hash(getattr(one, name)) for name in names] for each, one in alone.items()
    }


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


@pytest.mark.parametrize(
    "estimator",
    [one for one in [*PRIVATE, *UNREPEATABLE] if has_fit_parameter(one, "sample_weight")],
    ids=repr,
)
def test_weights_are_refused_in_private_fits(estimator):
    X, y, groups = make_table(estimator)
    with pytest.raises(ValueError, match=r"sample_weight.*epsilon"):
        clone(estimator).fit(X, y, groups=groups, sample_weight=np.ones(len(y)))


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
    with pytest.raises(ValueError, match=r"level.*\(0, 1\).*\b95\b"):
        model.summary(level=95)


def _many_rows(X, y, groups):
    """The same with 20,000 rows more, of four of the clients."""
    rows = np.concatenate([np.arange(len(y)), np.tile(np.flatnonzero(groups < 4), 20_000)[:20_000]])
    return X[rows], y[rows], groups[rows]


def _equal_sizes(X, y, groups):
    """12,000 rows, as many of each client."""
    rows = np.arange(12_000)
    return X[rows % len(y)], y[rows % len(y)], rows // 3_000


def _of_clients(X, y, groups, clients):
    rows = np.isin(groups, clients)
    return X[rows], np.append(y[rows][:-1], abs(1 - y[rows][0])), groups[rows]


def _one_row(values, value):
    changed = np.array(values, dtype=float)
    changed[3] = value
    return changed


# Tables of finite numbers. Targets that are labels or counts have no scale.
SCALES = (1e-300, 1e-150, 1e-140, 1e-20, 1e100, 1e150)
TABLES = {
    **{f"y x {c}": lambda X, y, g, c=c: (X, c * y, g) for c in SCALES},
    **{f"X x {c}": lambda X, y, g, c=c: (c * X, y, g) for c in SCALES},
    "y + 1e12": lambda X, y, g: (X, y + 1e12, g),
    "y of one row 1e160": lambda X, y, g: (X, _one_row(y, 1e160), g),
    "y of one row 1e308": lambda X, y, g: (X, _one_row(y, 1e308), g),
    "X of one row 1e160": lambda X, y, g: (_one_row(X, 1e160), y, g),
    "X of one row 1e308": lambda X, y, g: (_one_row(X, 1e308), y, g),
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
    r"is more than the number of clients|\d clients and \d+ coefficients that vary"
)
# What is documented to be NaN or infinite, and where.
TABLE_OF_COMPONENTS = {"summary.std_error", "summary.sd", "summary.correlation"}
UNBOUNDED = {"history_.clip_norm", "history_.loss"}  # no bound, nobody took part, or overflow
NOT_IDENTIFIED = {"population_coef_std_", "population_intercept_std_", "population_covariance_"}
OF_ONE_CLIENT = {
    *("icc_", "marginal_r2_", "conditional_r2_"),
    *("std of unseen", "summary.estimate", "log_likelihood_"),
    *("prior_.covariance", "prior_.covariances", "prior_.weights"),
}
NO_OWN_VARIANCE = {  # of single rows, where the released noise variance is of no use
    *("stds_", "std of known", "credible_interval", "summary.std", "summary.lower"),
    *("summary.upper", "coef_std_", "intercept_std_"),
}
NOT_HEARD = {"received_means_", "received_stds_"}  # of those whose turn has not come
NO_MESSAGE = {"population_mean_", "population_mean_std_", "population_std_", "predict of unseen"}
NO_MESSAGE |= {"std of unseen"}
NO_STANDARD_ERRORS = LaplacePrior | GaussianMixturePrior | DiscretePrior
NO_POOLING = {"prior_.covariance", "std of unseen", "summary.estimate"}
NO_POOLING |= {"icc_", "marginal_r2_", "conditional_r2_"}


def documented_exceptions(estimator, table):
    """Names of what may be NaN or infinite after a fit to a table."""
    found = {*TABLE_OF_COMPONENTS, *UNBOUNDED}
    private = estimator in (*RELEASING, *UNREPEATABLE)
    if private or "constant" in table:  # infinite for equal rows
        found |= {"log_likelihood_"}
    if isinstance(
        getattr(estimator, "prior", None), LaplacePrior | GaussianMixturePrior | DiscretePrior
    ):
        found |= {"log_likelihood_", *NOT_IDENTIFIED}
    if getattr(estimator, "mechanism", None) in ("pm1", "pm2"):
        found |= NOT_HEARD if table != "one client" else NOT_HEARD | NO_MESSAGE
    if "constant" in table or table in ("equal columns", "X + 1e9"):
        found |= NOT_IDENTIFIED | {"coef_std_", "intercept_std_", "credible_interval"}
    if table == "one client":
        found |= OF_ONE_CLIENT
    if private and getattr(estimator, "noise_variance", 0) is None:
        found |= NO_OWN_VARIANCE
    if estimator.get_params().get("prior__covariance") == math.inf:
        found |= NO_POOLING | NOT_IDENTIFIED | {"log_likelihood_"}
    if "log_likelihood_" in found:
        found |= {"aic_", "bic_"}
    return found


# The tables that most mistakes show on, for configurations of a family beyond its first.
TELLING = ("y x 1e-20", "y x 1e+100", "X of one row 1e308", "y constant", "one client")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "names"),
    [
        *((one, [*TABLES]) for one in FAST),
        *((one, TELLING) for one in CONFIGURATIONS if one not in (*FAST, *COMPOSED)),
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


# Finite values of a client, in turn over its rows, whose sums, squares or quotients overflow.
HOSTILE = {
    "signs": [1.7e308, -1.7e308],
    "one sign": [-1.7e308],
    "tiny": [1e-300, 5e-324],
    "edges": [1e150, 1e-140, 2.0**60, 5e-324, -1e160, 0.0, 1.7e308, 1e-300],
}


@every_private
@pytest.mark.filterwarnings("ignore::pfl_sklearn.UnseenClientsWarning")
def test_nothing_in_a_private_fit_depends_on_what_overflows(estimator):
    """No warning, no error, and nothing but numbers, whatever the rows of a client hold."""
    plain = make_table(estimator)
    own = plain[2] == np.argmax(np.bincount(plain[2]))
    documented = documented_exceptions(estimator, "huge values")
    if documented >= NO_OWN_VARIANCE:  # the released one may be of no use for new clients either
        documented |= {"std of unseen"}
    # Neural networks take seconds.
    names = ("signs", "edges") if hasattr(estimator, "local_steps") else HOSTILE
    for name in names:
        X, y, groups = plain[0].copy(), plain[1].astype(float), plain[2]
        values = np.resize(HOSTILE[name], np.count_nonzero(own))
        X[own] = values[:, None]
        if isinstance(estimator, PersonalizedPoissonRegression):
            values = np.clip(np.rint(values), 0.0, LARGEST_COUNT)
        if not is_classifier(estimator):
            y[own] = values
        model = fit_quietly(estimator, X, y, groups=groups)
        assert not set(not_finite(model, X[~own], groups[~own])) - documented, name


# A table for each size that the rows of a client may have.
SIZES = (1.0, 1e160, 1e308, 0.0, 1e-3, 10.0, 1e6)


def replaced(estimator, y, own, size, rng):
    """Features and targets of the rows `own` of a client, of some size."""
    shape = np.count_nonzero(own)
    features = size * rng.uniform(-1, 1, size=(shape, 2))
    if is_classifier(estimator):
        return features, rng.integers(0, 2, shape)
    if of_counts(estimator):
        return features, np.rint(min(size, LARGEST_COUNT) * rng.random(shape))
    return features, size * rng.uniform(-1, 1, size=(shape, *y.shape[1:]))


def what_others_learn(estimator, sizes=SIZES, fit=fit_as_it_is, client=3):
    """Names of what leaves a fit and differs once a client has other rows; {} for all tables."""
    X, y, groups = make_table(estimator)
    own, rng = groups == client, np.random.default_rng(0)
    fit = functools.partial(fit, estimator)
    first = what_leaves(fit, X, y, groups, client)
    for size in sizes:
        X[own], y[own] = replaced(estimator, y, own, size, rng)
        found = what_leaves(fit, X.copy(), y.copy(), groups, client)
        different = {name for name in {*first, *found} if first.get(name) != found.get(name)}
        if different:
            return different
    return {}


SELECTIONS = [
    PrivateSelectCV(
        GaussianMean(noise_variance=1.0),
        {"clip_norm": [1.0, 4.0, 8.0]},
        epsilon=4.0,
        expected_trials=2,
        score_range=(-20.0, 0.0),
        random_state=0,
    ),
]


# Private configurations that release nothing, as everything about the population is known.
KNOWN = [
    GaussianMean(GaussianPrior(0.0, 1.0), noise_variance=1.0, epsilon=1.0, clip_norm=1.0),
    BernoulliMean(BetaPrior(2.0, 2.0), epsilon=1.0),
    PoissonMean(GammaPrior(2.0, 1.0), epsilon=1.0),
    PersonalizedLinearRegression(
        GaussianPrior(0.0, 1.0),
        noise_variance=1.0,
        epsilon=1.0,
        feature_bound=1.0,
        target_bound=1.0,
    ),
    PPSGDRegressor(alpha=0, epsilon=1.0, **NOISE),
]


@pytest.mark.parametrize("estimator", KNOWN, ids=repr)
def test_nothing_of_a_client_leaves_where_nothing_is_released(estimator):
    assert not what_others_learn(estimator)


@pytest.mark.parametrize(
    "estimator", [*with_slow([*PRIVATE, *UNREPEATABLE]), *SELECTIONS], ids=repr
)
def test_the_mechanism_is_the_only_way_out_of_a_client(estimator, monkeypatch):
    """With mechanisms that ignore their input, nobody learns what one client's rows hold."""
    blind(monkeypatch)
    sizes = SIZES[:3] if hasattr(estimator, "local_steps") else SIZES  # nets take long
    assert not what_others_learn(estimator, sizes)


@every_private
def test_without_blinding_the_mechanism_is_a_way_out(estimator):
    seeds = (clone(estimator).set_params(random_state=seed) for seed in range(9))
    assert any(what_others_learn(seeded) for seeded in seeds)


def _fit_sparse_rows(estimator, X, y, groups):
    """Of which the zeros are stored, too: which features a client has is not what is replaced."""
    entries = np.arange(0, X.size + 1, X.shape[1])
    rows = csr_array((X.ravel(), np.tile(np.arange(X.shape[1]), len(X)), entries), shape=X.shape)
    return fit_as_it_is(estimator, rows, y, groups=groups)


@pytest.mark.parametrize("estimator", PRIVATE_ROUNDS[:3], ids=repr)
def test_the_mechanism_is_the_only_way_out_of_sparse_rows(estimator, monkeypatch):
    assert what_others_learn(estimator, fit=_fit_sparse_rows)
    blind(monkeypatch)
    assert not what_others_learn(estimator, fit=_fit_sparse_rows)


def changed(model, **attributes):
    """The model with other fitted attributes, as if its fit had set them."""
    model._set_fitted(attributes, dropped=())
    return model


@pytest.mark.parametrize("estimator", PRIVATE_ROUNDS[:4], ids=repr)
def test_sparse_rows_that_overflow_give_no_warning(estimator):
    X, y, groups = make_table(estimator)
    own = groups == 3
    for values in HOSTILE.values():
        X[own] = np.resize(values, np.count_nonzero(own))[:, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pfl_sklearn.PrivacyWarning)
            model = _fit_sparse_rows(estimator, X, y, groups)
        assert np.isfinite(model.population_coef_).all()


def _leaks_its_mean(estimator, X, y, groups):
    model = fit_as_it_is(estimator, X, y, groups=groups)
    return changed(model, population_mean_=model.population_mean_ + 1e-12 * np.mean(y))


def _leaks_a_count(estimator, X, y, groups):
    model = fit_as_it_is(estimator, X, y, groups=groups)
    n_clipped = np.sum(np.abs(model.local_means_) > 1.0)
    report = dataclasses.replace(model.privacy_, warnings=(f"{n_clipped} were clipped",))
    return changed(model, privacy_=report)


def _shares_its_mean(estimator, X, y, groups):
    model = fit_as_it_is(estimator, X, y, groups=groups)
    return changed(model, means_=model.means_ + 1e-9 * (model.means_[3] > model.means_))


def _warns_of_what_it_saw(estimator, X, y, groups):
    if np.max(np.abs(y)) > 100:
        warnings.warn("the targets are large", stacklevel=2)
    return fit_as_it_is(estimator, X, y, groups=groups)


@pytest.mark.parametrize(
    "fit", [_leaks_its_mean, _leaks_a_count, _shares_its_mean, _warns_of_what_it_saw]
)
def test_leaks_are_convicted(fit, monkeypatch):
    blind(monkeypatch)
    assert what_others_learn(PRIVATE[0], fit=fit)


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
    np.testing.assert_array_equal(
        got, response(clone(estimator).fit(X, y, groups=groups), X, groups)
    )
