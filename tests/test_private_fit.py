"""Parameters of private fits: one field list, whatever the estimator."""

import ast
import inspect
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from pfl_sklearn._parameters import PrivateFit, parameter, with_parameters
from pfl_sklearn.estimation import BernoulliMean, GaussianMean
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PPSGDClassifier,
)
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.public_interface import documented_parameters, private_estimators

COMMON = list(inspect.signature(PrivateFit).parameters)
PRIVATE = private_estimators()
# Whatever these estimators are made of, in the package.
CLASSES = sorted(
    {each for kind in PRIVATE for each in kind.__mro__ if each.__module__.startswith("pfl_")},
    key=lambda each: each.__qualname__,
)


def test_the_estimators_are_of_every_kind():
    assert COMMON[:4] == ["epsilon", "delta", "ledger", "random_state"]
    modules = {each.__module__.split(".")[1] for each in PRIVATE}
    assert modules == {
        "estimation",
        "linear_model",
        "model_selection",
        "neural_network",
        "online",
    }
    assert len(PRIVATE) > 30


@pytest.mark.parametrize("kind", PRIVATE, ids=repr)
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
    assert int(done.stdout) == len(PRIVATE)


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
    "model",
    [
        PersonalizedLinearRegression(random="intercept", feature_bound=3.0, target_bound=3.0),
        PersonalizedLogisticRegression(feature_bound=3.0, max_rows_per_client=6),
        PersonalizedPoissonRegression(
            feature_bound=3.0, max_rows_per_client=6, rate_range=(0.1, 10.0)
        ),
        GaussianMean(noise_variance=1.0, clip_norm=3.0),
        BernoulliMean(),
        PPSGDClassifier(n_rounds=2, clip_norm=1.0, learning_rate=0.1),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_fit_spends_what_it_was_charged_for(model, tmp_path):
    rng = np.random.default_rng(0)
    groups, X = np.repeat(np.arange(60), 6), rng.normal(size=(360, 2))
    ledger = PrivacyLedger(tmp_path / "ledger", (5.0, 1e-3))
    model.set_params(epsilon=2.0, delta=1e-5, random_state=0, ledger=ledger)
    model.fit(X, Meddling((X[:, 0] > 0).astype(int), model), groups=groups)
    assert model.epsilon == 200.0  # for the next fit
    assert model.privacy_.epsilon == pytest.approx(2.0, rel=1e-6)
