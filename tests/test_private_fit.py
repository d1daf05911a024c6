"""The contract of private fits, over one registry: parameters, charges, refusals, seeds, leaks."""

import ast
import dataclasses
import functools
import inspect
import math
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone, is_classifier
from sklearn.frozen import FrozenEstimator
from sklearn.utils.validation import has_fit_parameter

import pfl_sklearn
from pfl_sklearn import (
    BernoulliMean,
    CollaborativeMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedPoissonRegression,
    PoissonMean,
    PrivacyWarning,
)
from pfl_sklearn._parameters import PrivateFit, parameter, with_parameters
from pfl_sklearn.compose import ClientSelector
from pfl_sklearn.linear_model._base import BasePersonalizedRegression
from pfl_sklearn.model_selection import PrivateSelectCV
from pfl_sklearn.priors import DirichletPrior, GaussianPrior
from pfl_sklearn.privacy import BudgetExceeded, PrivacyLedger
from pfl_sklearn.privacy._spending import unit_of
from tests.helpers.blinded import blind, what_leaves
from tests.helpers.finite import not_finite
from tests.helpers.ledgers import numbers
from tests.helpers.public_interface import documented_parameters, private_estimators
from tests.helpers.registry import (
    KNOWN,
    LARGEST_COUNT,
    LINE,
    MEANS,
    PRIVATE,
    PRIVATE_ROUNDS,
    PUBLISHED,
    RELEASING,
    SPREAD,
    UNREPEATABLE,
    WITHOUT_VARIANCE,
    assert_same_estimates,
    documented_exceptions,
    every_one_of,
    first_of_each_class,
    fit_as_it_is,
    fit_quietly,
    in_field,
    make_table,
    of_counts,
    population,
    with_slow,
)
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore:no round of .* lowered the loss of held-out rows")
every_private = every_one_of(PRIVATE)
# Nets look at the shape of their rows before the charge.
WITHOUT_NETS = [one for one in [*PRIVATE, *UNREPEATABLE] if not hasattr(one, "local_steps")]
every_charged = every_one_of(WITHOUT_NETS)
PRIVATE_MEANS_AND_LINES = PRIVATE[: -len(PRIVATE_ROUNDS)]
FIRSTS = [one for one in first_of_each_class(PRIVATE) if not in_field(one)]

# Parameters ---------------------------------------------------------------------------------------
COMMON = list(inspect.signature(PrivateFit).parameters)
KINDS = private_estimators()
# Whatever these estimators are made of, in the package.
CLASSES = sorted(
    {each for kind in KINDS for each in kind.__mro__ if each.__module__.startswith("pfl_")},
    key=lambda each: each.__qualname__,
)


def test_the_estimators_are_of_every_kind():
    assert COMMON[:4] == ["epsilon", "delta", "ledger", "random_state"]
    modules = {each.__module__.split(".")[1] for each in KINDS}
    assert modules == {"estimation", "linear_model", "model_selection", "neural_network", "online"}
    assert len(KINDS) > 30


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_a_private_estimator_has_the_common_parameters(kind):
    assert issubclass(kind, PrivateFit)
    texts, base = documented_parameters(kind.__doc__), documented_parameters(PrivateFit.__doc__)
    for name in COMMON:
        field = kind._fields_of_parameters[name]
        assert field.type is PrivateFit._fields_of_parameters[name].type
        assert kind._parameter_constraints[name] is PrivateFit._parameter_constraints[name]
        # Nothing is released by nets that train alone: their texts say so.
        assert texts[name].startswith(base[name]) or kind.__name__.startswith("LocalNet")


def second_declarations(kind):
    """What a class says of the common parameters besides a default, a text and a place."""
    node = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    for each in node.body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if names & set(COMMON):
            keywords = {keyword.arg for keyword in getattr(each.value, "keywords", [])}
            changes = isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)
            if not changes or not keywords <= {"default", "text", "also"}:
                yield ast.unparse(each)
        elif "_parameter_constraints" in names and isinstance(each.value, ast.Dict):
            keys = {key.value for key in each.value.keys if isinstance(key, ast.Constant)}
            yield from keys & set(COMMON)
    own = documented_parameters(ast.get_docstring(node) or "")
    yield from own.keys() & set(COMMON)


@pytest.mark.parametrize("kind", CLASSES, ids=repr)
def test_no_class_declares_a_common_parameter_again(kind):
    assert list(second_declarations(kind)) == [] or kind is PrivateFit


def test_second_declarations_are_found():
    class Again:
        """One that declares them.

        Parameters
        ----------
        ledger : object
            Of its own.
        """

        epsilon: float = 1.0
        delta = 0.0
        random_state = parameter(ranges=[None])
        _parameter_constraints = {"random_state": []}

    assert len(list(second_declarations(Again))) == 5


# In a process of its own, where all estimators are made from the wider list.
_WIDER = """
import inspect
import pfl_sklearn._parameters as parameters

@parameters.with_parameters
class Wider(parameters.PrivateFit):
    _places_are_open = True
    public_note: str | None = parameters.parameter(
        default=None, ranges=[str, None], text="str or None\\n  What one publishes of it."
    )

parameters.PrivateFit = Wider
from sklearn.base import clone
from tests.helpers.public_interface import documented_parameters, private_estimators

for kind in private_estimators():
    assert list(inspect.signature(kind).parameters)[-1] == "public_note"
    assert kind._parameter_constraints["public_note"] == [str, None]
    assert documented_parameters(kind.__doc__)["public_note"] == "What one publishes of it."
    needed = {"estimator": None, "param_distributions": {}} if "Select" in kind.__name__ else {}
    assert clone(kind(**needed, public_note="all")).public_note == "all"
print(len(private_estimators()))
"""


@pytest.mark.slow
def test_a_further_parameter_of_private_fits_is_one_field():
    done = subprocess.run([sys.executable, "-c", _WIDER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(KINDS)


def test_a_default_or_a_place_of_its_own():
    assert list(inspect.signature(BernoulliMean).parameters)[3:6] == ["epsilon", "delta", "trust"]
    assert BernoulliMean().delta == 0.0
    assert PersonalizedLinearRegression().delta == 1e-5


def test_sentences_follow_the_text_of_a_base():
    @with_parameters
    class Louder(PrivateFit):
        """One that adds to texts."""

        epsilon = parameter(also="It is that of one client.")
        delta = parameter(text="float\n  Any.", also="And more.")

    @with_parameters
    class Loudest(Louder):
        """One that adds to what was added."""

        epsilon = parameter(also="All of it.")
        ledger = parameter()

    texts = documented_parameters(PrivateFit.__doc__)
    louder, loudest = (documented_parameters(each.__doc__) for each in (Louder, Loudest))
    assert louder["epsilon"] == f"{texts['epsilon']} It is that of one client."
    assert loudest["epsilon"] == f"{texts['epsilon']} It is that of one client. All of it."
    assert louder["delta"] == "Any. And more."
    assert loudest["ledger"] == texts["ledger"]
    assert list(loudest)[:3] == ["ledger", "epsilon", "delta"]


# Charges ------------------------------------------------------------------------------------------
class Untouchable:
    """Data that must not be looked at."""

    def _touched(self, *args):
        raise RuntimeError("touched")

    __getattr__ = __len__ = __iter__ = __array__ = __getitem__ = _touched


class OnlyShape(Untouchable):
    """A table of which the numbers of rows and columns and their names may be seen, no value."""

    def __init__(self, X):
        self.shape, self.columns = X.shape, range(X.shape[1])


def fit_untouchable(estimator, ledger):
    """Regressions check public numbers first: those of columns and of ids."""
    X, y, groups = Untouchable(), Untouchable(), Untouchable()
    if isinstance(estimator, BasePersonalizedRegression):
        table, _, groups = make_table(estimator)
        X = OnlyShape(table)
    model = clone(estimator).set_params(ledger=ledger)
    try:
        return model.fit(X, y, groups=groups)
    finally:
        assert not hasattr(model, "privacy_")


def fit_charged(estimator, ledger):
    X, y, groups = make_table(estimator)
    return fit_quietly(clone(estimator).set_params(ledger=ledger), X, y, groups=groups)


# Further mechanisms, relations and known parameters.
ENTRIES = [
    GaussianMean(GaussianPrior(mean=0.0), noise_variance=1.0, epsilon=1.5, clip_norm=4.0),
    GaussianMean(GaussianPrior(covariance=1.0), epsilon=1.5, clip_norm=4.0),
    BernoulliMean(epsilon=1.5, mechanism="two_bit", delta=0.01),
    BernoulliMean(epsilon=1.5, mechanism="one_bit", method="printed"),
    BernoulliMean(epsilon=1.5, delta=1e-4, trust="central"),
    *(
        PersonalizedLinearRegression(SPREAD, epsilon=1.5, relation=relation, **LINE, **more)
        for relation, more in (
            ("replace_one", {"fit_intercept": False, "noise_variance": 1.0}),
            ("add_remove", {}),
            ("add_remove", {"fit_intercept": False, "noise_variance": 1.0}),
        )
    ),
]
SUMMED = [one for one in PRIVATE_MEANS_AND_LINES if not isinstance(one, CollaborativeMean)]
SUMMED = [one for one in SUMMED if not isinstance(one, BernoulliMean) or one.trust == "local"]


@pytest.mark.parametrize("estimator", [*SUMMED, *ENTRIES], ids=repr)
def test_the_entry_of_a_fit_is_what_its_report_promises(estimator, tmp_path):
    report = fit_charged(estimator, None).privacy_
    under = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    if "add_remove" in under:
        under["zero_out"] = under["add_remove"]
    for relation in ("replace_one", "zero_out", "add_remove"):
        settings = {"delta": report.delta or 1e-7, "relation": relation, "unit": report.unit}
        ledger = PrivacyLedger(tmp_path / relation, **settings)
        fit_charged(estimator, ledger)
        (entry,) = ledger.entries
        assert entry["what"] == type(estimator).__name__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            total = ledger.total()
        counted = "zero_out" if relation == "add_remove" else relation
        if relation == report.relation:
            assert total == pytest.approx(report.epsilon, rel=1e-9)
        elif counted not in under:
            assert total == math.inf
        else:
            # Never less; more only where the number of features or trials would have to be known.
            assert under[counted] * (1 - 1e-9) <= total <= under[counted] * 1.5


@every_charged
def test_a_refused_fit_looks_at_no_data(estimator, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(0.1, 2e-3), unit=unit_of(estimator))
    with pytest.raises(BudgetExceeded, match=type(estimator).__name__):
        fit_untouchable(estimator, ledger)
    if hasattr(estimator, "fit_counts"):
        model = clone(estimator).set_params(ledger=ledger)
        with pytest.raises(BudgetExceeded, match=type(estimator).__name__):
            model.fit_counts(Untouchable(), Untouchable())
        assert not hasattr(model, "privacy_")
    assert ledger.entries == []


@every_charged
def test_a_fit_that_fails_on_its_data_stays_recorded(estimator, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", unit=unit_of(estimator))
    with pytest.raises(RuntimeError, match="touched"):
        fit_untouchable(estimator, ledger)
    assert numbers(ledger) == [1]


@pytest.mark.parametrize(
    "estimator",
    [
        *MEANS,
        PersonalizedLinearRegression(SPREAD),
        RELEASING[-1],
        clone(KNOWN[0]).set_params(epsilon=math.inf),
    ],
    ids=repr,
)
def test_a_fit_without_privacy_spends_without_bound(estimator, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger")
    fit_charged(estimator, ledger)
    name = type(estimator).__name__
    with pytest.warns(PrivacyWarning, match=rf"entry 1 \({name}\).*delta = 1e-05"):
        assert ledger.total() == math.inf
    limited = PrivacyLedger(tmp_path / "limited", budget=1e9)
    with pytest.raises(BudgetExceeded, match=r"epsilon = inf\b.*\b1e\+09\b"):
        fit_charged(estimator, limited)


@pytest.mark.parametrize("estimator", KNOWN, ids=repr)
def test_a_fit_with_a_known_population_costs_nothing(estimator, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(1e-3, 1e-9))
    assert fit_charged(estimator, ledger).privacy_.epsilon == 0
    assert [entry["events"] for entry in ledger.entries] == [[]]


@pytest.mark.parametrize(
    "estimator",
    [
        GaussianMean(epsilon=1.0),
        GaussianMean(epsilon=1.0, delta=0.0, clip_norm=4.0),
        BernoulliMean(epsilon=1.0, trust="central"),
        PoissonMean(epsilon=1.0),
        PoissonMean(epsilon=1.0, cap=40, trust="central"),
        PersonalizedLinearRegression(epsilon=1.0),
    ],
    ids=repr,
)
def test_parameters_that_make_no_fit_cost_nothing(estimator, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger")
    with pytest.raises(ValueError, match=r"clip_norm|delta|feature_bound|cap"):
        fit_charged(estimator, ledger)
    assert ledger.entries == []


def test_what_is_no_ledger_is_refused():
    with pytest.raises(ValueError, match="The 'ledger' parameter of GaussianMean must be"):
        fit_charged(GaussianMean(), "ledger.jsonl")


class Meddling:
    """Targets that give an estimator another epsilon when they are read, as a thread may."""

    def __init__(self, values, model):
        self.values, self.model, self.shape = values, model, values.shape

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        self.model.set_params(epsilon=200.0)
        return self.values.astype(dtype or float)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator", [one for one in FIRSTS if not hasattr(one, "local_steps")], ids=repr
)
def test_a_fit_spends_what_it_was_charged_for(estimator, tmp_path):
    (X, y, groups), unit = make_table(estimator), unit_of(estimator)
    ledger = PrivacyLedger(tmp_path / "ledger", (5.0, 1e-3), unit=unit)
    model = clone(estimator).set_params(epsilon=2.0, delta=1e-5, ledger=ledger)
    model.fit(X, Meddling(y, model), groups=groups)
    assert model.epsilon == 200.0  # for the next fit
    assert model.privacy_.epsilon == pytest.approx(2.0, rel=1e-6)


# Refusals and seeds -------------------------------------------------------------------------------

SELECTOR = ClientSelector(
    [("public", FrozenEstimator(KNOWN[5])), ("own", KNOWN[5])],
    prior=DirichletPrior([0.5, 0.5], 10.0),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", [*FIRSTS, KNOWN[5], SELECTOR], ids=repr)
@pytest.mark.parametrize("cell", ["4711 secret", None, math.nan, math.inf], ids=repr)
def test_a_refusal_shows_no_value_and_no_row(estimator, cell):
    """Nor do the errors before it that a traceback shows."""
    X, y, groups = make_table(estimator)
    refused = 0
    for where in ("frame", "array", "y"):
        features, targets = pd.DataFrame(X, columns=["a", "b"]).astype(object), y
        if where == "y":
            targets = y.astype(object)
            targets[3] = cell
        else:
            features.iloc[3, 1] = cell
            features = features.to_numpy() if where == "array" else features
        try:
            clone(estimator).fit(features, targets, groups=groups)
        except (TypeError, ValueError) as error:
            refused += 1
            while error is not None:
                assert "4711" not in str(error)
                assert "row 3" not in str(error)
                shown = None if error.__suppress_context__ else error.__context__
                error = error.__cause__ or shown
    # Means and streams read no X.
    reads_X = not isinstance(estimator, (*map(type, MEANS), CollaborativeMean))
    assert refused == (3 if reads_X else 1)


@every_private
def test_a_seed_is_warned_of_once(estimator):
    X, y, groups = make_table(estimator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clone(estimator).fit(X, y, groups=groups)
    seeds = [each for each in caught if "random_state=None" in str(each.message)]
    assert [each.category for each in seeds] == [PrivacyWarning]


# Those of a large epsilon estimate what the others know, which takes long.
NOISY = [one for one in [*PRIVATE_MEANS_AND_LINES, *UNREPEATABLE] if one.epsilon < 1000]


@pytest.mark.parametrize("estimator", NOISY, ids=repr)
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


@pytest.mark.parametrize(
    "estimator",
    [one for one in [*PRIVATE, *UNREPEATABLE] if has_fit_parameter(one, "sample_weight")],
    ids=repr,
)
def test_weights_are_refused_in_private_fits(estimator):
    X, y, groups = make_table(estimator)
    with pytest.raises(ValueError, match=r"sample_weight.*epsilon"):
        clone(estimator).fit(X, y, groups=groups, sample_weight=np.ones(len(y)))


# Leaks --------------------------------------------------------------------------------------------

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
    if documented >= WITHOUT_VARIANCE:  # the released one may be of no use for new clients either
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
SIZES = (1.0, 1e308, 0.0, 1e160, 1e6)


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
    )
]


@pytest.mark.parametrize("estimator", KNOWN, ids=repr)
def test_nothing_of_a_client_leaves_where_nothing_is_released(estimator):
    assert not what_others_learn(estimator)


@pytest.mark.parametrize(
    "estimator",
    [
        *with_slow([*PRIVATE, *UNREPEATABLE]),
        *(one for one in PUBLISHED if getattr(one, "clients", None) is None),
        *slow([one for one in PUBLISHED if getattr(one, "clients", None) is not None]),
        *SELECTIONS,
    ],
    ids=repr,
)
def test_the_mechanism_is_the_only_way_out_of_a_client(estimator, monkeypatch):
    """With mechanisms that ignore their input, nobody learns what one client's rows hold."""
    blind(monkeypatch)
    sizes = SIZES[:2] if hasattr(estimator, "local_steps") else SIZES  # nets take long
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


SPARSE = [*PRIVATE_ROUNDS[:2], *slow(PRIVATE_ROUNDS[2:4])]


@pytest.mark.parametrize("estimator", SPARSE, ids=repr)
def test_the_mechanism_is_the_only_way_out_of_sparse_rows(estimator, monkeypatch):
    assert what_others_learn(estimator, fit=_fit_sparse_rows)
    blind(monkeypatch)
    assert not what_others_learn(estimator, fit=_fit_sparse_rows)


def changed(model, **attributes):
    """The model with other fitted attributes, as if its fit had set them."""
    model._set_fitted(attributes, dropped=())
    return model


@pytest.mark.parametrize("estimator", SPARSE, ids=repr)
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
