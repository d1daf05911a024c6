"""Steps of a pipeline that learn from the data, openly or inside their functions."""

import functools
import itertools
import math
import operator
import re
import sys
import types
from collections import deque
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
from sklearn import config_context
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.feature_extraction import FeatureHasher
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.frozen import FrozenEstimator
from sklearn.kernel_approximation import AdditiveChi2Sampler
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline, make_union
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    Normalizer,
    StandardScaler,
    robust_scale,
)

from pfl_sklearn import ClientColumn, GaussianMean, privacy_of
from pfl_sklearn.compose import ClientSelector
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.priors import DirichletPrior
from pfl_sklearn.privacy import search_cost
from pfl_sklearn.privacy._spending import stated_cost

CLIENTS = make_gaussian_clients(200, 8, random_state=0)
TABLE = np.column_stack([CLIENTS.groups, CLIENTS.data])
MEAN = GaussianMean(epsilon=1.0, delta=1e-6, clip_norm=5.0, noise_variance=1.0)
SCALER = StandardScaler().fit(CLIENTS.data)
MODELS = {"scalers": [SCALER]}
SHIFT = np.array([0.5])
FITTED = MEAN.fit(CLIENTS.data, CLIENTS.target, groups=CLIENTS.groups)


def from_a_global(X):
    return SCALER.transform(X)


def from_containers(X):
    return MODELS["scalers"][0].transform(X)


def from_a_function_inside(X):
    def inner(Z):
        return (lambda rows: SCALER.transform(rows))(Z)

    return inner(X)


def through_another(X):
    return through_each_other(X) if X is None else from_a_global(X)


def through_each_other(X):
    return through_another(X)


def endless(X):
    return endless(X) if X is None else X


def from_a_default(X, scaler=SCALER):
    return scaler.transform(X)


def from_a_keyword(X, *, scaler=SCALER):
    return scaler.transform(X)


def from_a_closure(scaler):
    return lambda X: scaler.transform(X)


def fitting(X):
    from sklearn.preprocessing import StandardScaler as Scaler

    return Scaler().fit_transform(X)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Called:
    def __init__(self, scaler):
        self.scaler = scaler

    def __call__(self, X):
        return self.scaler.transform(X)


class Slotted(Called):
    __slots__ = ("scaler",)


class Private:
    __slots__ = ("__scaler",)

    def __init__(self, scaler):
        self.__scaler = scaler


class Number(float):
    """A number that carries an estimator."""


class Attributed(dict):
    def __init__(self, scaler):
        self.scaler = scaler


class Answering:
    """Answers to any name, but holds nothing."""

    __slots__ = ()

    def __getattr__(self, name):
        return 5

    def __call__(self, X):
        return X


class Refusing(Answering):
    __slots__ = ()

    @property
    def __class__(self):
        raise RuntimeError("nobody may ask")

    @property
    def __self__(self):
        raise RuntimeError("nobody may ask")


class Kind(type):
    shared = [SCALER]


class OfKind(metaclass=Kind):
    """A class whose own class holds an estimator."""


class Methods:
    scaler = SCALER

    @staticmethod
    def static(X):
        return SCALER.transform(X)

    @classmethod
    def of_class(cls, X):
        return cls.scaler.transform(X)


class Refitting:
    def __call__(self, X):
        return StandardScaler().fit(X).transform(X)


class Storing(FunctionTransformer):
    """A subclass that keeps something of the data."""

    def fit(self, X, y=None):
        super().fit(X, y)
        self.mean_ = np.mean(X)
        return self


class Untagged(TransformerMixin, BaseEstimator):
    """Somebody's transformer that says that it needs no fit."""

    def fit(self, X, y=None):
        self.n_features_in_ = np.shape(X)[1]
        return self

    def transform(self, X):
        return X

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags


def numbered():
    number = Number(1.0)
    number.scaler = SCALER
    return number


LEARNING_FUNCTIONS = {
    "bound fit": StandardScaler().fit_transform,
    "bound": SCALER.transform,
    "global": from_a_global,
    "containers": from_containers,
    "function inside": from_a_function_inside,
    "through another": through_another,
    "default": from_a_default,
    "keyword": from_a_keyword,
    "closure": from_a_closure(SCALER),
    "partial": functools.partial(lambda X, scaler: scaler.transform(X), scaler=SCALER),
    "cached": functools.lru_cache(from_a_global),
    "decorated": decorated(from_a_global),
    "vectorized": np.vectorize(from_a_global),
    "called": Called(SCALER),
    "slotted": Slotted(SCALER),
    "static method": Methods.static,
    "class method": Methods.of_class,
    "queue": functools.partial(print, deque([SCALER])),
    "read-only": functools.partial(print, types.MappingProxyType({"scaler": SCALER})),
    "series": functools.partial(print, pd.Series([SCALER])),
    "frame": functools.partial(print, pd.DataFrame({"scaler": [SCALER]})),
    "records": functools.partial(print, np.array([(SCALER,)], dtype=[("scaler", object)])),
    "iterator": functools.partial(next, itertools.cycle([SCALER])),
    "generator": functools.partial(next, (each for each in [SCALER])),
    "map": functools.partial(next, map(SCALER.transform, [CLIENTS.data])),
    "ufunc of Python": np.frompyfunc(SCALER.transform, 1, 1),
    "private slot": functools.partial(print, Private(SCALER)),
    "own kind of number": functools.partial(print, numbered()),
    "own kind of dict": functools.partial(print, Attributed(SCALER)),
    "class of a class": lambda X: OfKind.shared[0].transform(X),
    "class attribute": lambda X: Methods.scaler.transform(X),
}
FITTING_FUNCTIONS = {
    "fitting": (fitting, "fit_transform"),
    "refitting": (Refitting(), "fit"),
    "of scikit-learn": (robust_scale, "fit_transform"),
    "of scikit-learn, named": (lambda X: robust_scale(X), "fit_transform"),
}


def caught():
    """An exception, whose traceback leads to what was there when it was raised."""
    scaler = SCALER
    try:
        return int(scaler.__class__.__name__)
    except ValueError as error:
        return error


HARMLESS_FUNCTIONS = {
    "ufunc": np.log1p,
    "none": None,
    "numpy": np.nan_to_num,
    "numpy inside": lambda X: np.clip(X, 0, 1) / np.linalg.norm(np.ones(3)),
    "scipy": scipy.special.expit,
    "distribution": scipy.stats.norm.cdf,  # an object with a method fit
    "distribution inside": lambda X: scipy.stats.norm.cdf(X),
    "method of an array": np.eye(1).__rmatmul__,
    "call of a method": operator.methodcaller("clip", 0, 1),
    "stateless": Normalizer().transform,
    "endless": lambda X: endless(X),
    "compiled": pd.api.types.infer_dtype,
    "compiled inside": lambda X: pd.api.types.infer_dtype(X),
    "class of functions": lambda X: isinstance(X, types.FunctionType),
    "draws": np.random.default_rng(0).normal,
    "mock": Mock(spec=dict),
    "any name": Answering(),
    "refusing": functools.partial(print, Refusing()),
    "caught": functools.partial(print, caught()),
}


def report_behind(step):
    """Report of a pipeline with a private estimator that costs epsilon = 1."""
    return privacy_of(make_pipeline(step, FrozenEstimator(FITTED)))


def leaks(step, match):
    """The report names the step and what it learns."""
    report = report_behind(step)
    assert report.epsilon == math.inf
    name = type(step).__name__
    assert f"step {name.lower()!r} ({name}) {match}" in report.warnings[-1]


@pytest.mark.parametrize("function", LEARNING_FUNCTIONS.values(), ids=LEARNING_FUNCTIONS)
def test_a_function_that_holds_an_estimator_leaks(function):
    leaks(FunctionTransformer(function), "holds a StandardScaler")


def test_an_estimator_in_a_module_leaks(monkeypatch):
    """Of a module that the function imports itself, and of one inside another."""
    shop = types.ModuleType("shop")
    shop.shelf = types.ModuleType("shop.shelf")
    shop.shelf.scaler = SCALER
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setitem(sys.modules, "shop.shelf", shop.shelf)

    def imports(X):
        from shop.shelf import scaler

        return scaler.transform(X)

    def reaches(X):
        import shop

        return shop.shelf.scaler.transform(X)

    def around():
        import shop

        return lambda X: shop.shelf.scaler.transform(X)

    def given(X, shop=shop, *, shelf=shop.shelf):
        return (shop or shelf).scaler.transform(X)

    namespace = {"__name__": "shop.tools", "__package__": "shop"}
    exec("def relative(X):\n    from .shelf import scaler\n    return scaler", namespace)
    for function in (imports, reaches, around(), given, namespace["relative"]):
        leaks(FunctionTransformer(function), "holds a StandardScaler")


@pytest.mark.parametrize(("function", "call"), FITTING_FUNCTIONS.values(), ids=FITTING_FUNCTIONS)
def test_a_function_that_fits_leaks(function, call):
    leaks(FunctionTransformer(function), "learns from the data without noise")
    assert f" calls {call};" in report_behind(FunctionTransformer(function)).warnings[-1]


@pytest.mark.parametrize(
    "params",
    [
        {"inverse_func": SCALER.inverse_transform},
        {"kw_args": {"scaler": SCALER}},
        {"inv_kw_args": {"scalers": np.array([SCALER, None], dtype=object)}},
        {"feature_names_out": from_a_default},
    ],
    ids=lambda params: next(iter(params)),
)
def test_an_estimator_among_the_arguments_of_a_function_leaks(params):
    """What release() would publish, whether or not the fit used it."""
    step = FunctionTransformer(lambda X, scaler=None: X, **params)
    leaks(step, "holds a StandardScaler")


@pytest.mark.parametrize("step", [Storing(), Untagged(), make_union(FunctionTransformer())])
def test_unknown_steps_count_as_leaks(step):
    leaks(step, "is fitted to the same data without noise")


class Shifting(Pipeline):
    """A pipeline that keeps something of the data itself."""

    def fit(self, X, y=None, **params):
        self.mean_ = np.mean(X)
        return super().fit(X, y, **params)


class Thawing(FrozenEstimator):
    """The same of a frozen estimator."""


@pytest.mark.parametrize(
    "wrapper", [Shifting([("mean", FrozenEstimator(FITTED))]), Thawing(FITTED)]
)
def test_subclasses_of_known_wrappers_are_unprotected(wrapper):
    report = privacy_of(wrapper)
    assert report.epsilon == math.inf
    assert type(wrapper).__name__ in report.warnings[-1]
    assert stated_cost(wrapper).events is None
    leaks(Thawing(FunctionTransformer()), "is fitted to the same data without noise")


@pytest.mark.parametrize("function", HARMLESS_FUNCTIONS.values(), ids=HARMLESS_FUNCTIONS)
def test_functions_of_constants_cost_nothing(function):
    assert report_behind(FunctionTransformer(function)).epsilon == 1.0


@pytest.mark.parametrize(
    "step",
    [
        Normalizer(),
        Binarizer(),
        AdditiveChi2Sampler(),
        FeatureHasher(),
        HashingVectorizer(),
        FrozenEstimator(FunctionTransformer(np.log1p)),
        FunctionTransformer(operator.matmul, kw_args={"weights": np.eye(3)}),
    ],
    ids=lambda step: type(step).__name__,
)
def test_stateless_steps_of_scikit_learn_cost_nothing(step):
    assert report_behind(step).epsilon == 1.0


@pytest.mark.parametrize(
    ("step", "assumed"),
    [
        (FunctionTransformer(lambda X: X - SHIFT), True),
        (HashingVectorizer(tokenizer=str.split), True),
        (FunctionTransformer(), False),
        (Normalizer(), False),
    ],
)
def test_constants_of_functions_are_assumed_to_be_the_users(step, assumed):
    report = report_behind(step)
    assert report.epsilon == 1.0
    found = [text for text in report.assumptions if text.startswith("step ")]
    assert len(found) == assumed
    assert all("every row separately" in text and "constants" in text for text in found)


@pytest.mark.parametrize("step", [FunctionTransformer(StandardScaler().fit_transform), Storing()])
def test_release_publishes_no_step_that_learns(step):
    model = ClientColumn(make_pipeline(step, MEAN), 0).fit(TABLE, CLIENTS.target)
    assert model.privacy_.epsilon == math.inf
    with pytest.raises(ValueError, match=f"release.*{type(step).__name__}"):
        model.release()


@pytest.mark.parametrize("step", [FunctionTransformer(from_a_global), Storing()])
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_selections_and_searches_judge_the_same_way(step):
    pipeline = make_pipeline(step, MEAN)
    culprit = rf"step '{type(step).__name__.lower()}' \({type(step).__name__}\)"
    selection = PrivateSelectCV(
        ClientColumn(pipeline, 0), {}, epsilon=2.0, score_range=(-1.0, 0.0), client_column=0
    )
    with pytest.raises(ValueError, match=culprit):
        selection.fit(TABLE, CLIENTS.target)
    score = ClientScorer("neg_mean_squared_error", client_column=0)
    column = ClientColumn(pipeline, 0)
    search = GridSearchCV(column, {}, cv=ClientKFold(2, client_column=0), scoring=score)
    cost = search_cost(search.fit(TABLE, CLIENTS.target))
    assert cost.epsilon == math.inf
    assert re.search(culprit, cost.fits[0].reason)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_a_selector_judges_the_same_way():
    with config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(FunctionTransformer(from_a_global), MEAN)
        pipeline.fit(CLIENTS.data, CLIENTS.target, groups=CLIENTS.groups)
    public = FrozenEstimator(Ridge().fit([[0.0], [1.0]], [0.0, 1.0]))
    candidates = [("private", FrozenEstimator(pipeline)), ("public", public)]
    selector = ClientSelector(candidates, prior=DirichletPrior([0.5, 0.5], 2.0))
    report = selector.fit(CLIENTS.data, CLIENTS.target, groups=CLIENTS.groups).privacy_
    assert report.epsilon == math.inf
    assert "'functiontransformer' (FunctionTransformer) holds a Stand" in report.warnings[0]


@pytest.mark.parametrize(
    ("step", "said"),
    [(AdditiveChi2Sampler(), "refuses negative values and warns"), (Normalizer(), "warns of sums")],
)
def test_what_a_step_refuses_or_warns_of_is_reported(step, said):
    report = report_behind(step)
    assert report.epsilon == 1.0
    assert any(f"for finite numbers (it {said}" in each for each in report.assumptions)
