"""Fitted attributes are set in one step, and a report vouches for the values it was set with."""

import ast
import copy
import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import pickle
import pkgutil
import re
import warnings
from functools import partial
from itertools import cycle
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline

import pfl_sklearn
from pfl_sklearn import ClientColumn, PrivacyWarning, privacy_of
from pfl_sklearn._fitted import FittedMixin
from pfl_sklearn._rounds.checkpoint import Checkpoint
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientMeans,
    ClientSelector,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
    TableEncoder,
)
from pfl_sklearn.compose._stack.recent import RecentTargets
from pfl_sklearn.compose._stack.residual import ResidualRegressor
from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PPSGDClassifier,
    PPSGDRegressor,
)
from pfl_sklearn.model_selection import PrivateSelectCV
from pfl_sklearn.online import CollaborativeMean
from pfl_sklearn.priors import DirichletPrior, GaussianPrior
from pfl_sklearn.priors._prior import Prior
from pfl_sklearn.privacy import BudgetExceeded, PrivacyLedger, PrivacyReport
from pfl_sklearn.privacy._spending import unit_of
from pfl_sklearn.statistics import ClientStatistics
from tests.helpers.interruption import (
    interrupt_at_line,
    refused_at_the_end,
    states_at_lines,
    stored_at_the_end,
)
from tests.helpers.slow import slow
from tests.helpers.torch import WITHOUT_TORCH

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

BOUNDS = {"feature_bound": 2.0, "target_bound": 4.0}
NOISE = {"epsilon": 1.0, "delta": 1e-6, "random_state": 0}
LINE = PersonalizedLinearRegression(random="intercept", **BOUNDS, **NOISE)
MEAN = GaussianMean(noise_variance=1.0, clip_norm=3.0, **NOISE)
OF_ROUNDS = {"random": "intercept", "feature_bound": 2.0, "max_rows_per_client": 4, "n_rounds": 3}
FOREIGN = r"privacy_ of this {}\b.* not the report of its fitted values"
rng = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(20), 4)
X = rng.normal(size=(80, 2))
CENTRES = 0.5 * X[:, 0] + rng.normal(size=20)[GROUPS]
Y = CENTRES + 0.3 * rng.normal(size=80)
COUNTS = rng.poisson(np.exp(CENTRES))
PRIVATE = [
    LINE,
    PersonalizedLogisticRegression(**OF_ROUNDS, **NOISE),
    PersonalizedPoissonRegression(rate_range=(0.1, 10.0), **OF_ROUNDS, **NOISE),
    MEAN,
    BernoulliMean(**NOISE | {"delta": 0.0}),
    PoissonMean(cap=40, **NOISE | {"delta": 0.0}),
    PPSGDRegressor(n_rounds=3, **NOISE),
]


def targets(estimator):
    """Targets of the 80 rows of the kind that an estimator takes."""
    if isinstance(estimator, PoissonMean | PersonalizedPoissonRegression):
        return COUNTS
    return (Y > 0).astype(int) if is_classifier(estimator) else Y


def of_rows(model, rows=slice(None)):
    return model.fit(X[rows], targets(model)[rows], groups=GROUPS[rows])


# One writer -------------------------------------------------------------------------------------

PACKAGE = Path(pfl_sklearn.__file__).parent
FIGURE = "handles of a figure, as scikit-learn's displays have them"
CACHE = "filled on the first use, and computed again if it is not there"
BUFFER = "arrays of a fit that runs"
POINT = "a point of a search that runs"
COPY = "a copy of a net, before anybody has it"
# Of estimators none but parameters and copies that are about to be handed on.
EXCEPTIONS = {
    "_columns.py validate_data": "scikit-learn's by its name, whose callers are found",
    "_fitted.py _replace": "the writer",
    "_fitted.py FittedMixin._column_attributes": "validates with a copy of the model",
    "compose/_table_encoder.py TableEncoder._read_table": "validates with a copy of the encoder",
    "base.py ClientMixin.set_params": "parameters",
    "base.py ClientMixin._population_copy": "callbacks of a copy, which not every class can unset",
    "metrics/_client_scores.py population_model": "a copy to score, of any package's wrapper",
    "metrics/_responses.py Responses.only": "a stand-in for a model, which fits nothing",
    "_parameters.py with_parameters": "attributes of a class",
    "_parameters.py _merge_fields": "attributes of a class",
    "_parallel.py _ProcessLimits": "limits of this process",
    "inspection/_client_gain.py ClientGainDisplay.plot": FIGURE,
    "inspection/_coefficients.py CoefficientDisplay.plot": FIGURE,
    "inspection/_convergence.py ConvergenceDisplay.plot": FIGURE,
    "inspection/_funnel.py FunnelDisplay.plot": FIGURE,
    "inspection/_predictive_check.py PredictiveCheckDisplay.plot": FIGURE,
    "inspection/_privacy_accuracy.py PrivacyAccuracyDisplay.plot": FIGURE,
    "inspection/_residuals.py ResidualsDisplay.plot": FIGURE,
    "inspection/_shrinkage.py ShrinkageDisplay.plot": FIGURE,
    "inspection/_stream_display.py StreamDisplay.plot": FIGURE,
    "linear_model/_mixed/_groupings/_equations.py IterativeEquations": POINT,
    "linear_model/_mixed/_groupings/_link_equations.py LinkPoints": POINT,
    "linear_model/_mixed/_groupings/_variances.py SuccessiveEquations.at": POINT,
    "linear_model/_mixed/_posterior.py AveragedPosterior": CACHE,
    "linear_model/_mixed/_table.py SharedStacks": CACHE,
    "metrics/_monitor.py ClientMonitor.on_fit_task_end": "scores that a callback collects",
    "neural_network/_engine/_chain.py Chain.__call__": BUFFER,
    "neural_network/_engine/_components.py mixture_of": COPY,
    "neural_network/_engine/_engine.py Engine.__setstate__": COPY,
    "neural_network/_engine/_models.py StackedModels.step": BUFFER,
    "neural_network/_engine/_models.py LoneModel": BUFFER,
    "neural_network/_engine/_recipe.py twin": COPY,
    "neural_network/_engine/_recipe.py as_fitted": COPY,
    "neural_network/_engine/_recipe.py initialized": COPY,
    "online/_received_means.py ByStream.move": "arrays of a stream, which is copied before",
    "online/_messages.py Senders.__setstate__": "what was pickled",
    "privacy/_accounting/_selection.py _accounting.Accountant": "what was spent",
    "statistics/_chunks.py MomentSums._places": "sums that are added up",
}


class Writers(ast.NodeVisitor):
    """Where a module writes attributes that a fit could have set: names of functions in `found`.

    These are all attributes of an estimator of its own, and of other objects those with an
    underscore before or behind the name.
    """

    def __init__(self, estimators):
        self.estimators, self.context, self.found = estimators, [], set()

    def visit_ClassDef(self, node):
        self.context.append(node.name)
        self.generic_visit(node)
        self.context.pop()

    visit_FunctionDef = visit_ClassDef

    def visit_Attribute(self, node):
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        begins = own and self.context[-1] in ("__init__", "__setstate__")
        named_so = node.attr.endswith("_") or node.attr.startswith("_")
        if not isinstance(node.ctx, ast.Load) and not begins:
            self._note(named_so or (own and self._in_estimator))
        self._note(node.attr == "__dict__")
        self.generic_visit(node)

    def visit_Subscript(self, node):
        self._note(not isinstance(node.ctx, ast.Load) and is_vars(node.value))
        self.generic_visit(node)

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        self._note(name in ("setattr", "delattr", "__setattr__", "__delattr__"))
        # A dict that has been given a name could be changed by that name.
        self._note(is_vars(node) and self._in_estimator and ast.unparse(node) == "vars(self)")
        # Whatever is called on it may change it; items and keys do not.
        held = isinstance(node.func, ast.Attribute) and is_vars(node.func.value)
        self._note(held and name not in ("items", "keys", "values", "get", "copy"))
        # By default scikit-learn's validation sets the names and the number of columns.
        resets = not any(
            each.arg == "reset" and getattr(each.value, "value", True) is False
            for each in node.keywords
        )
        self._note(name == "validate_data" and resets)
        self.generic_visit(node)

    @property
    def _in_estimator(self):
        return not self.estimators.isdisjoint(self.context)

    def _note(self, writes):
        if writes:
            self.found.add(".".join(self.context))


def is_vars(node):
    """Whether an expression is the dict of attributes of some object."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars"


def writers(source, estimators):
    visitor = Writers(estimators)
    visitor.visit(ast.parse(source))
    return visitor.found


def classes_of_package():
    for module in pkgutil.walk_packages(pfl_sklearn.__path__, "pfl_sklearn."):
        if not (WITHOUT_TORCH and "neural_network" in module.name):
            yield from vars(importlib.import_module(module.name)).values()


@pytest.mark.slow
def test_nothing_else_writes_what_a_fit_has_set():
    estimators = {
        kind.__name__
        for value in classes_of_package()
        if isinstance(value, type) and issubclass(value, BaseEstimator | FittedMixin)
        for kind in value.__mro__
        if kind.__module__.startswith("pfl_sklearn")
    }
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} {place}"
        for path in PACKAGE.rglob("*.py")
        for place in writers(path.read_text(), estimators)
    }
    # An exception holds for a function, or for all of a class.
    excused = {place: {place, place.rpartition(".")[0]} & EXCEPTIONS.keys() for place in found}
    assert [place for place, by in excused.items() if not by] == []
    assert set().union(*excused.values()) == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "statement",
    [
        "self.mean_ = 1",
        "self.mean = 1",
        "self._mean += 1",
        "self.a, (self.b, c) = value",
        "del self.mean_",
        "other.mean_ = 1",
        "other._mean = 1",
        "setattr(self, name, 1)",
        "object.__setattr__(self, name, 1)",
        "self.__dict__ = {}",
        "self.__dict__.update(mean_=1)",
        "vars(other)[name] = 1",
        "del vars(other)[name]",
        "vars(other).update(mean_=1)",
        "attributes = vars(self)",
        "validate_data(self, X)",
        "validate_data(self, X, reset=True)",
        "for self.mean_ in values: pass",
        "with noise as self.mean_: pass",
    ],
)
def test_other_writers_are_found(statement):
    source = f"class Mean:\n    def fit(self):\n        {statement}"
    assert writers(source, {"Mean"}) == {"Mean.fit"}


# Every estimator, in one step -------------------------------------------------------------------
def frozen():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return FrozenEstimator(of_rows(clone(LINE)))


def private_selector():
    prior = DirichletPrior([0.5, 0.5], 5.0)
    return ClientSelector([("a", frozen()), ("b", frozen())], prior=prior, cv=2)


def private_search():
    return PrivateSelectCV(
        GaussianMean(noise_variance=1.0, delta=1e-6, clip_norm=3.0),
        {"clip_norm": [1.0, 3.0]},
        epsilon=2.0,
        expected_trials=2,
        score_range=(-10.0, 0.0),
        random_state=0,
    )


LINES = [("a", LinearRegression()), ("b", LinearRegression(fit_intercept=False))]
# With more noise than that, the steps of a client may diverge.
ROUNDS = {"n_rounds": 1, "local_steps": 1, "clip_norm": 1.0, **NOISE, "epsilon": 100.0}
# Of every public estimator one, with a private fit if it has any.
REGISTRY = {
    **{type(estimator).__name__: estimator for estimator in PRIVATE},
    "PPSGDClassifier": PPSGDClassifier(n_rounds=3, **NOISE),
    "CollaborativeMean": CollaborativeMean(bounds=(-4.0, 4.0), **NOISE),
    "ClientAsFeature": ClientAsFeature(LinearRegression()),
    "ClientMeans": ClientMeans(),
    "ClientColumn": ClientColumn(PPSGDRegressor(n_rounds=3, **NOISE), 0),
    "ClientSelector": private_selector(),
    "PersonalizedStackingClassifier": PersonalizedStackingClassifier(
        [("line", LogisticRegression())],
        final_estimator=PersonalizedLogisticRegression(GaussianPrior(covariance=1.0)),
        cv=2,
        fallback=False,
    ),
    "PersonalizedStackingRegressor": PersonalizedStackingRegressor(
        [("line", LinearRegression())],
        final_estimator=PersonalizedLinearRegression(
            GaussianPrior(covariance=1.0), noise_variance=1.0, uncertainty="plug_in"
        ),
        cv=2,
        fallback=False,
    ),
    "PrivateSelectCV": private_search(),
    "TableEncoder": TableEncoder(levels={}, medians={}),
}
BOTH = "APFL AdaMixNet Ditto FedAvg FedEM FedPer FedRep LocalNet PFedMe PPSGDNet PerFedAvg Scaffold"
NETS = [each + kind for each in re.findall(r"\w+", BOTH) for kind in ("Classifier", "Regressor")]
NETS += ["AdaPeDClassifier", "FedMutualClassifier", "QuPeDClassifier"]
if not WITHOUT_TORCH:
    from pfl_sklearn import neural_network

    REGISTRY |= {name: getattr(neural_network, name)(**ROUNDS) for name in NETS}
    for name in ("FedAvgClassifier", "FedAvgRegressor"):  # else clients have nothing of their own
        REGISTRY[name].set_params(fine_tune_steps=1)
# Behind stacks, and not public.
REGISTRY |= {
    "RecentTargets": RecentTargets(clone(LINE).set_params(epsilon=math.inf)),
    "ResidualRegressor": ResidualRegressor(
        PersonalizedLinearRegression(random="intercept"), LinearRegression()
    ),
}
STORING = ("fit", "fit_counts", "fit_statistics", "partial_fit", "personalize")
# Of a clone, of parameters, or of the container that steps hand on.
RETURNING = {"for_client", "release", "set_output", "set_params", "without"}


def fitting_classes():
    """Public classes that can be fitted, but for priors, whose fits are new priors."""
    return {
        value
        for value in classes_of_package()
        if inspect.isclass(value)
        and value.__module__.startswith("pfl_sklearn")
        and hasattr(value, "fit")
        and not issubclass(value, Prior)
        and not value.__name__.startswith(("_", "Base"))
        and value.__name__ != "PersonalizedStacking"  # the base of both
    }


def test_the_registry_has_every_public_estimator():
    public = {kind.__name__ for kind in fitting_classes()}
    inner = {"RecentTargets", "ResidualRegressor"}
    assert public | inner == REGISTRY.keys() | {"TreesOfLevels", "EncoderForTrees"}  # of stacks
    for name, estimator in REGISTRY.items():
        assert isinstance(estimator, FittedMixin) and type(estimator).__name__ == name
        returns = {
            method
            for method in dir(type(estimator))
            if not method.startswith("_") and returns_self(type(estimator), method)
        }
        assert returns <= {*STORING, *RETURNING}


def returns_self(kind, name):
    method = inspect.getattr_static(kind, name)
    method = inspect.unwrap(getattr(method, "fn", method))  # available_if
    returned = getattr(method, "__annotations__", {}).get("return")
    return str(returned).removeprefix("typing.") == "Self"


# Four rows of each client. The last clients of LATER and OWN are new; nets train with fewer.
FIRST, LATER, OWN, ASKED = slice(0, 64), slice(8, 80), slice(60, 68), slice(12, 20)
OF_NETS = {(0, 64): slice(0, 16), (8, 80): slice(4, 24), (60, 68): slice(12, 20)}
COUNTS_OF = {"BernoulliMean": (COUNTS, COUNTS + 1), "PoissonMean": (COUNTS,)}


def call(model, method, rows):
    """Let a model learn from some of the rows."""
    if type(model).__name__ in NETS:
        rows = OF_NETS[rows.start, rows.stop]
    x, y, groups = X[rows], targets(model)[rows], GROUPS[rows]
    if isinstance(model, ClientColumn):
        return getattr(model, method)(np.column_stack([groups, x]), y)
    if isinstance(model, TableEncoder | RecentTargets):
        x = pd.DataFrame(x, columns=["a", "b"])
    if isinstance(model, TableEncoder):
        return model.fit(x)
    if method == "fit_counts":
        counts = COUNTS_OF[type(model).__name__]
        return model.fit_counts(*(each[rows] for each in counts), groups=groups)
    if method == "fit_statistics":
        bounds = BOUNDS if y.dtype == float else {}
        return model.fit_statistics(ClientStatistics.from_rows(x, y, groups=groups, **bounds))
    return getattr(model, method)(x, y, groups=groups)


def first_fit(estimator, method):
    """A model to which a method is then applied again."""
    model = clone(estimator)
    if method == "partial_fit" and hasattr(model, "fit_statistics"):
        model.set_params(epsilon=math.inf)  # no private fit keeps statistics
        return call(model, method, FIRST)
    return call(model, "fit" if method == "personalize" else method, FIRST)


def without_noise(model):
    """The model, to be fitted again without privacy."""
    if isinstance(model, ClientSelector):
        return model.set_params(estimators=LINES)
    if isinstance(model, ClientColumn):
        return model.set_params(estimator__epsilon=math.inf)
    if isinstance(model, TableEncoder):
        return model.set_params(levels=None, medians=None)
    return model.set_params(epsilon=math.inf) if hasattr(model, "epsilon") else model


def digest(value):
    return hashlib.sha256(pickle.dumps(value)).hexdigest()  # joblib's takes ten times as long


def bits(model):
    """All that a model holds and says, and what it hands out."""
    rows, groups = X[ASKED], GROUPS[ASKED]
    frame = pd.DataFrame(rows, columns=["a", "b"])
    if isinstance(model, TableEncoder):
        return digest([model.transform(frame), vars(model)])
    if isinstance(model, ClientMeans):
        return digest([model.transform(rows, groups=groups), vars(model)])
    if isinstance(model, ClientColumn):
        said = [model.predict(np.column_stack([groups, rows])), model.privacy_]
    else:
        rows = frame if isinstance(model, RecentTargets) else rows
        said = [model.predict(rows, groups=groups), model.privacy_]
    if hasattr(model, "for_client"):
        said.append(held(model.for_client(3)))
    if math.isfinite(model.privacy_.epsilon):
        said.append(held(model.release()))
    return digest([said, vars(model)])  # with what these calls keep for the next


def released_bits(model):
    """All that a released model says; of a copy of the model the same."""
    released = model.release()
    names = [name for name in released._population_attributes if hasattr(released, name)]
    values = [getattr(released, name) for name in names]
    return joblib.hash([released.privacy_, released.predict(X), *values])


def held(copied):
    """Attributes of a copy, but for compiled nets: these hold addresses."""
    return {name: value for name, value in vars(copied).items() if name != "_engines"}


def check_one_step(model, act, written_on=None):
    """A model learns all at once, at the very end of an act; until then it is as it was.

    So every line of the act leaves the last fit or the new one, if it is interrupted, and whatever
    refuses to go on, be it the last warning, leaves the last one.
    """
    written_on = model if written_on is None else written_on
    before = bits(model)
    assert refused_at_the_end(written_on, act, KeyboardInterrupt) == []
    assert bits(model) == before
    written, lines = stored_at_the_end(written_on, act)
    assert written == ["__dict__"]
    # Else a refit could be refused where it has been stored. A checkpoint goes when it has been.
    behind = re.compile(r"return \w+|if checkpoint is not None:")
    assert [line for line in lines if not behind.fullmatch(line)] == []


def ways_of(name):
    """Methods that change a fitted estimator, one behind the other where one fit will do."""
    kind = type(REGISTRY[name])
    methods = [method for method in STORING if hasattr(kind, method)]
    if name not in NETS:
        return [(name, (method,)) for method in methods]
    # A classifier has all but the targets in common with its regressor.
    if name.endswith("Regressor") and name != "FedAvgRegressor":
        return [(name, ("fit",))]
    own = [] if name.startswith("Scaffold") else ["personalize"]  # clients of it have no models
    return [(name, (*own, "partial_fit", "fit"))]


WAYS = [way for name in REGISTRY for way in ways_of(name)]
SLOW_NETS = {*NETS} - {"AdaPeDClassifier", "FedAvgRegressor"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "methods"),
    [
        *(way for way in WAYS if way[0] not in SLOW_NETS),
        *slow([way for way in WAYS if way[0] in SLOW_NETS]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_refit_leaves_the_last_fit_or_the_new_one(name, methods):
    model = first_fit(REGISTRY[name], methods[0])
    for method in methods:
        of_column = (name, method) == ("ClientColumn", "personalize")
        if method.startswith("fit"):
            without_noise(model)
        rows = OWN if method == "personalize" else LATER
        act = partial(call, model, method, rows)
        check_one_step(model, act, model.estimator_ if of_column else model)
    if method.startswith("fit") and name not in ("ClientMeans", "TableEncoder"):
        assert model.privacy_.epsilon == math.inf
        with pytest.raises((ValueError, AttributeError), match=r"release.*epsilon|no attribute"):
            model.release()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", PRIVATE, ids=repr)
def test_a_refit_leaves_nothing_of_another_fit(estimator):
    model = without_noise(first_fit(estimator, "fit"))
    fresh = call(clone(model), "fit", LATER)
    assert vars(call(model, "fit", LATER)).keys() == vars(fresh).keys()


class ClumsyMean(GaussianMean):
    """Sets one attribute by itself, `when` fit is near its end."""

    when = "before"

    def _set_fitted(self, attributes, dropped=None):
        if self.when == "before":
            self.population_mean_ = attributes.get("population_mean_")
        if self.when == "in place" and hasattr(self, "means_"):
            self.means_ += 1.0
        super()._set_fitted(attributes, dropped)
        if self.when == "behind":
            self.population_mean_ = attributes.get("population_mean_")
        if self.when == "late":
            warnings.warn("this comes late", stacklevel=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["before", "in place", "behind", "late"])
def test_a_clumsy_fit_is_convicted(when, monkeypatch):
    folders = str(PACKAGE), str(Path(__file__).parent)  # the package may be installed elsewhere
    monkeypatch.setattr("tests.helpers.interruption.FOLDER", folders)
    model = first_fit(ClumsyMean(), "fit")
    model.when = when
    with pytest.raises(AssertionError):
        check_one_step(model, lambda: call(model, "fit", LATER))


# Lines from the end of fit: what is computed last, and before and after the attributes are set.
PLACES = (1, 2, 3, 6, 12, 25, 60)


@pytest.mark.parametrize("method", ["fit", "fit_statistics"])
def test_no_exact_fit_is_released_under_an_earlier_report(method):
    """Interrupted at lines indeed, for the estimators above are not."""
    private = first_fit(MEAN, method)
    before, n_new = released_bits(private), 0
    for place, error in zip(PLACES, cycle([KeyboardInterrupt, MemoryError]), strict=False):
        model = copy.deepcopy(private).set_params(epsilon=math.inf)
        fitted = dict(vars(model))

        def refit(model=model, fitted=fitted):
            model.__dict__ = dict(fitted)
            call(model, method, LATER)

        interrupt_at_line(refit, place, error)
        if math.isinf(model.privacy_.epsilon):
            n_new += 1
            with pytest.raises(ValueError, match=r"release.*epsilon"):
                model.release()
        else:
            assert released_bits(model) == before
            assert vars(model) == fitted
    assert 0 < n_new < len(PLACES)


def test_a_second_private_fit_is_not_released_under_the_report_of_the_first():
    first = of_rows(clone(LINE))
    second = clone(LINE).set_params(epsilon=1000.0)
    model = copy.deepcopy(first).set_params(epsilon=1000.0)
    states = states_at_lines(model, lambda: of_rows(model))
    assert [state["privacy_"].epsilon for state in states] == [1.0, 1000.0]
    assert released_bits(model) == released_bits(of_rows(second))


# A refit that is refused ------------------------------------------------------------------------
def of_seed(model, monkeypatch, folder):
    """Noise of a seed, whose warning is an error here."""
    return PrivacyWarning


def of_budget(model, monkeypatch, folder):
    """A ledger that has no room."""
    model.set_params(
        ledger=PrivacyLedger(folder / "ledger.jsonl", budget=(1e-3, 1e-9), unit=unit_of(model))
    )
    return BudgetExceeded


def of_disk(model, monkeypatch, folder):
    """A disk that is full in the last round."""

    def full(checkpoint, state):
        raise OSError("No space left on device")

    monkeypatch.setattr(Checkpoint, "_write", full)
    model.set_params(checkpoint=folder / "rounds", checkpoint_every=model.n_rounds)
    return OSError


ON_ROUNDS = ["PPSGDRegressor", *([] if WITHOUT_TORCH else ["FedAvgRegressor"])]
PAID = [type(each).__name__ for each in PRIVATE]
PAID += [*ON_ROUNDS[1:], "CollaborativeMean", "PrivateSelectCV"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "refusal"),
    [(name, refusal) for name in PAID for refusal in (of_seed, of_budget)]
    + [(name, of_disk) for name in ON_ROUNDS],
)
def test_a_refused_refit_leaves_the_last_fit(name, refusal, monkeypatch, tmp_path):
    model = first_fit(REGISTRY[name], "fit")
    error = refusal(model, monkeypatch, tmp_path)
    before = bits(model)
    with warnings.catch_warnings(), pytest.raises(error):
        warnings.simplefilter("error" if refusal is of_seed else "ignore", PrivacyWarning)
        call(model, "fit", LATER)
    assert bits(model) == before


# A report and its values -----------------------------------------------------------------------
def stored(model):
    return pickle.loads(pickle.dumps(model))


def stored_by_joblib(model, path):
    joblib.dump(model, path)
    return joblib.load(path)


@pytest.mark.parametrize("estimator", PRIVATE, ids=repr)
def test_copies_keep_the_report_of_their_values(estimator, tmp_path):
    model = of_rows(clone(estimator))
    again = stored_by_joblib(model, tmp_path / "model")
    for one in (model, copy.copy(model), copy.deepcopy(model), stored(model), again):
        one.predict(X, groups=GROUPS)
        released, own = one.release(), one.for_client(3)
        for handed in (released, stored(released), released.release(), own, own.release()):
            assert handed.privacy_ == model.privacy_
            assert privacy_of(handed).epsilon == model.privacy_.epsilon
    report = PrivacyReport.from_dict(json.loads(model.privacy_.to_json()))
    model.privacy_ = report  # the same promise
    assert model.release().privacy_ == report


def check_refused(model, name):
    for act in (model.release, lambda: model.for_client(3), lambda: privacy_of(model)):
        with pytest.raises(ValueError, match=FOREIGN.format(name)):
            act()


@pytest.mark.parametrize("estimator", PRIVATE, ids=repr)
def test_a_report_of_another_fit_is_no_promise(estimator):
    y, name = targets(estimator), type(estimator).__name__
    private = of_rows(clone(estimator))
    exact = of_rows(clone(estimator).set_params(epsilon=math.inf))
    exact.privacy_ = private.privacy_
    check_refused(exact, name)
    check_refused(stored(exact), name)
    values = "_population" if hasattr(private, "_population") else private._population_attributes[0]
    other = copy.deepcopy(private)
    setattr(other, values, getattr(private, values) + 1e-12)
    check_refused(other, name)
    check_refused(stored(other), name)
    if hasattr(other, "personalize"):
        with pytest.raises(ValueError, match=FOREIGN.format(name)):
            other.personalize(X[:4], y[:4], groups=GROUPS[:4])
    claims = copy.deepcopy(private)
    claims.privacy_ = dataclasses.replace(private.privacy_, epsilon=0.5)
    check_refused(claims, name)


def test_a_report_around_a_model_is_of_that_model():
    exact = of_rows(clone(LINE).set_params(epsilon=math.inf))
    selector = of_rows(private_selector())
    assert selector.release().release().privacy_.epsilon == privacy_of(selector).epsilon == 2.0
    assert selector.for_client(3).release().privacy_ == selector.privacy_
    selector.named_estimators_["a"] = exact
    check_refused(selector, "ClientSelector")
    search = of_rows(private_search())
    assert stored(search).release().privacy_.epsilon == privacy_of(stored(search)).epsilon == 2.0
    search.best_estimator_ = of_rows(GaussianMean(noise_variance=1.0))
    with pytest.raises(ValueError, match=FOREIGN.format("PrivateSelectCV")):
        privacy_of(search)
    column = call(ClientColumn(make_pipeline(MEAN), 0), "fit", slice(None))
    column.estimator_[-1].population_mean_ = 0.0
    with pytest.raises(ValueError, match=FOREIGN.format("GaussianMean")):
        column.release()
