"""One registry of estimators for the common checks and the contract of private fits."""

import functools
import math
import warnings

import numpy as np
import pytest
from sklearn.base import clone, is_classifier
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression

import pfl_sklearn
from pfl_sklearn import (
    BernoulliMean,
    CollaborativeMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PoissonMean,
    PPSGDClassifier,
    PPSGDRegressor,
    neural_network,
)
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientSelector,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.priors import (
    BetaPrior,
    DirichletPrior,
    DiscretePrior,
    GammaPrior,
    GaussianMixturePrior,
    GaussianPrior,
    LaplacePrior,
)
from tests.helpers.slow import slow
from tests.helpers.torch import WITHOUT_TORCH

# Every public estimator: scikit-learn's checks and ours. Those that draw have a seed.
MEANS = [GaussianMean(), BernoulliMean(), PoissonMean()]
REGRESSIONS = [
    PersonalizedLinearRegression(random="intercept"),  # variances of slopes take long
    PersonalizedLogisticRegression(),
    PersonalizedPoissonRegression(),
]
GROUPED = [
    PersonalizedLinearRegression(random="intercept", groupings=[1]),
    PersonalizedLogisticRegression(random="intercept", groupings=[1]),
]
ROUNDS = [PPSGDRegressor(random_state=0), PPSGDClassifier(random_state=0)]
SHORTER = {"n_rounds": 2, "local_steps": 2, "random_state": 0}
FLAT = {"n_rounds": None, "tol": 0.3, "local_steps": 2, "random_state": 0}
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
# Around others. Few folds and known variances: their defaults are tested in tests/compose.
OF_INTERCEPTS = {"prior": GaussianPrior(covariance=1.0), "random": "intercept"}
LINE_OF_CLIENTS = PersonalizedLinearRegression(
    noise_variance=1.0, unseen="population", **OF_INTERCEPTS
)
LINES = [("line", LinearRegression()), ("own", LINE_OF_CLIENTS)]
CLASSIFIERS = [
    ("line", LogisticRegression()),
    ("own", PersonalizedLogisticRegression(**OF_INTERCEPTS)),
]
COMPOSED = [
    ClientAsFeature(HistGradientBoostingRegressor(max_iter=10), random_state=0),
    ClientAsFeature(HistGradientBoostingClassifier(max_iter=10), "target", random_state=0),
    PersonalizedStackingRegressor(
        LINES[:1], final_estimator=LINE_OF_CLIENTS, cv=2, fallback=False, random_state=0
    ),
    PersonalizedStackingClassifier(CLASSIFIERS[:1], cv=2, fallback=False, random_state=0),
    ClientSelector(LINES, cv=3, random_state=0),
    ClientSelector(CLASSIFIERS, how="best", cv=3, random_state=0),
]
FAST = [*MEANS, *REGRESSIONS, *GROUPED, *ROUNDS, *STREAMS, *NEURAL]
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
    PersonalizedLinearRegression(),
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
# Private configurations. Of those on rounds the first ones of a class are calibrated.
BALL = {"clip_norm": 8.0, "random_state": 0}
MIXTURE = {"noise_variance": 1.0, "epsilon": 8.0, **BALL}
STREAM = {"epsilon": 8.0, "bounds": (-8.0, 8.0), "random_state": 0}
COUNTS = {"epsilon": 1.0, "cap": 60, "random_state": 0}
BOX = {"feature_bound": 2.0, "random_state": 0}
LINE = {"target_bound": 8.0, **BOX}
LOGIT = {"max_rows_per_client": 10, "n_rounds": 4, **BOX}
RATES = {"rate_range": (0.1, 10.0), **LOGIT}
SPREAD = GaussianPrior(covariance=4.0)
PRIVATE = [
    GaussianMean(epsilon=1.0, **BALL),
    GaussianMean(epsilon=1.0, trust="local", noise_variance=1.0, **BALL),
    GaussianMean("discrete", **MIXTURE),
    GaussianMean("gaussian_mixture", trust="local", **MIXTURE),
    CollaborativeMean(**STREAM),
    CollaborativeMean(mechanism="tree", decision="test", **STREAM),
    BernoulliMean(epsilon=1.0, random_state=0),
    BernoulliMean(epsilon=1.0, mechanism="two_bit", random_state=0),
    BernoulliMean(epsilon=1.0, delta=1e-3, trust="central", random_state=0),
    PoissonMean(**COUNTS),
    PoissonMean("grid", **COUNTS),
    PoissonMean(delta=1e-3, trust="central", **COUNTS),
    PersonalizedLinearRegression(SPREAD, epsilon=1.0, **LINE),
    PersonalizedLinearRegression(
        SPREAD, random="intercept", noise_variance=1.0, epsilon=1.0, unit="row", **LINE
    ),
    PersonalizedLinearRegression(random="intercept", epsilon=1.0, **LINE),
    PersonalizedLinearRegression(epsilon=1000.0, **LINE),
    PersonalizedLogisticRegression(epsilon=1.0, **LOGIT),
    PersonalizedPoissonRegression(epsilon=1.0, **RATES),
    PersonalizedLogisticRegression(
        GaussianPrior(covariance=1.0), random="all", epsilon=1.0, **LOGIT
    ),
    PersonalizedPoissonRegression(random=["intercept", 1], epsilon=1000.0, **RATES),
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
    "AdaPeDClassifier": {"label_prior": "client"},
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
        mechanism="discrete_gaussian", trust="local", noise_variance=1.0, epsilon=4.0, **BALL
    ),
]
# They protect rows, and no client from others: tests/estimation/published has their contract.
PUBLISHED = [
    GaussianMean(unit="row", publish="clients", epsilon=4.0, bounds=(-8.0, 8.0)),
    GaussianMean(
        unit="row", publish="clients", epsilon=4.0, bounds=(-8.0, 8.0), clients=[*range(12)]
    ),
    BernoulliMean(unit="row", publish="clients", epsilon=4.0),
    PoissonMean(unit="event", publish="clients", epsilon=4.0),
]
RELEASING = [*PRIVATE, GaussianMean(mechanism="quantizer", n_bits=8, noise_variance=1.0, **BALL)]
# Private configurations that release nothing, as everything about the population is known.
KNOWN = [
    GaussianMean(GaussianPrior(0.0, 1.0), noise_variance=1.0, epsilon=1.0, clip_norm=1.0),
    GaussianMean(
        GaussianMixturePrior(2, means=[[0.0], [1.0]], covariances=1.0, weights=[0.5, 0.5]),
        **{**MIXTURE, "random_state": None},
    ),
    GaussianMean(
        DiscretePrior(2, points=[[0.0], [1.0]], weights=[0.5, 0.5]),
        **{**MIXTURE, "random_state": None},
    ),
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
CONFIGURATIONS = [*ESTIMATORS, *VARIANTS, *RELEASING, *UNREPEATABLE]


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


def first_of_each_class(estimators):
    return list({type(one): one for one in estimators[::-1]}.values())[::-1]


def every_one_of(estimators):
    """Parameters of a test, of which those beyond the fast ones are slow."""
    return pytest.mark.parametrize("estimator", with_slow(estimators), ids=repr)


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
    X = rng.normal(size=(len(groups), 2))
    if estimator in GROUPED:
        X[:, 1] = rng.integers(5, size=len(groups))
        if not is_classifier(estimator):
            y += X[:, 1]
    return X, y, groups


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


# What is documented to be NaN or infinite, and where.
TABLE_OF_COMPONENTS = {
    *("summary.std_error", "summary.sd", "summary.correlation", "summary.n_levels"),
}
UNBOUNDED = {"history_.clip_norm", "history_.loss"}  # no bound, nobody took part, or overflow
NOT_IDENTIFIED = {"population_coef_std_", "population_intercept_std_", "population_covariance_"}
OF_ONE_CLIENT = {
    *("icc_", "iccs_", "marginal_r2_", "conditional_r2_"),
    *("std of unseen", "summary.estimate", "log_likelihood_"),
    *("prior_.covariance", "prior_.covariances", "prior_.weights"),
}
WITHOUT_VARIANCE = {  # of single rows, where the released noise variance is of no use
    *("stds_", "std of known", "credible_interval", "summary.std", "summary.lower"),
    *("summary.upper", "coef_std_", "intercept_std_"),
}
NOT_RECEIVED = {"received_means_", "received_stds_"}  # of those whose turn has not come
NO_MESSAGE = {"population_mean_", "population_mean_std_", "population_std_", "predict of unseen"}
NO_MESSAGE |= {"std of unseen"}
NO_POOLING = {"prior_.covariance", "std of unseen", "summary.estimate"}
NO_POOLING |= {"icc_", "iccs_", "marginal_r2_", "conditional_r2_"}


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
        found |= NOT_RECEIVED if table != "one client" else NOT_RECEIVED | NO_MESSAGE
    if "constant" in table or table in ("equal columns", "X + 1e9"):
        found |= NOT_IDENTIFIED | {"coef_std_", "intercept_std_", "credible_interval"}
    if table == "one client":
        found |= OF_ONE_CLIENT
    if private and getattr(estimator, "noise_variance", 0) is None:
        found |= WITHOUT_VARIANCE
    if estimator.get_params().get("prior__covariance") == math.inf:
        found |= NO_POOLING | NOT_IDENTIFIED | {"log_likelihood_"}
    if "log_likelihood_" in found:
        found |= {"aic_", "bic_"}
    return found
