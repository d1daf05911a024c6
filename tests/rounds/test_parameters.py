"""Parameters that are fields: what a class and its bases say once appears wherever it is needed."""

import inspect
import pickle
import subprocess
import sys
from numbers import Real

import cloudpickle
import numpy as np
import pytest
from sklearn.base import BaseEstimator, clone

from pfl_sklearn import PPSGDRegressor
from pfl_sklearn._compat import Interval
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._rounds.estimator import BaseRounds
from pfl_sklearn.neural_network import DittoClassifier, DittoRegressor
from tests.helpers.public_interface import documented_parameters, exported

ON_ROUNDS = [
    each
    for each in exported("pfl_sklearn").values()
    if inspect.isclass(each) and issubclass(each, BaseRounds)
]


@with_parameters
class Base(BaseEstimator):
    """A base.

    See Also
    --------
    Other%(kind)s : another one.
    """

    component: object = parameter(kw_only=False, default=None, text="object\n  What it holds.")
    common: float = parameter(
        default=1.0, ranges=[Interval(Real, 0, None, closed="left")], text="float >= 0\n  Shared."
    )
    last: str = parameter(default="a", text="str\n  Declared last.")


@with_parameters
class Member(Base):
    """A member."""

    own: float = parameter(default=1e-5, text="float\n  Its own.")
    last: str = parameter(default="a", text="str\n  In other words.")
    constant = 3


def test_one_field_is_in_every_signature_range_and_text():
    for each in ON_ROUNDS:
        names = set(inspect.signature(each).parameters)
        assert set(inspect.signature(BaseRounds).parameters) < names
        assert names == documented_parameters(each.__doc__).keys()
        assert each._parameter_constraints.keys() <= names
        assert each._parameter_constraints["delta"] == BaseRounds._parameter_constraints["delta"]
    assert len(ON_ROUNDS) > 20  # the statement is not empty


def levels_below_rounds(kind):
    """Classes on the longest way from a class up to BaseRounds, which does not count."""
    bases = [base for base in kind.__bases__ if issubclass(base, BaseRounds)]
    return 0 if kind is BaseRounds else 1 + max(map(levels_below_rounds, bases))


def test_estimators_are_two_levels_below_rounds():
    """The base of their models, and themselves."""
    assert {levels_below_rounds(kind) for kind in ON_ROUNDS} == {2}


def test_a_new_parameter_of_a_base_reaches_its_members():
    @with_parameters
    class Wider(Base):
        """Wider."""

        added: int = parameter(default=7, ranges=["boolean"], text="int\n  A new one.")

    @with_parameters
    class Narrow(Wider):
        """Narrow."""

    assert inspect.signature(Narrow).parameters["added"].default == 7
    assert Narrow._parameter_constraints["added"] == ["boolean"]
    assert documented_parameters(Narrow.__doc__)["added"] == "A new one."
    assert Narrow().get_params() == {"component": None, "common": 1.0, "last": "a", "added": 7}


def test_order_and_docstring():
    assert list(inspect.signature(Member).parameters) == ["component", "own", "common", "last"]
    assert inspect.signature(Member).parameters["own"].kind is inspect.Parameter.KEYWORD_ONLY
    lines = inspect.cleandoc(Member.__doc__).splitlines()
    assert lines[0] == "A member."
    assert lines[2:7] == [
        "Parameters",
        "----------",
        "component : object, default=None",
        "    What it holds.",
        "own : float, default=1e-5",
    ]
    assert documented_parameters(Member.__doc__)["last"] == "In other words."
    assert documented_parameters(Base.__doc__)["last"] == "Declared last."
    assert "OtherRegressor : another one." in lines
    names = list(inspect.signature(DittoClassifier).parameters)
    assert names[:4] == ["estimator", "classes", "proximal", "local_steps"]
    assert names[-1] == "ledger"  # privacy comes last


def test_classes_keep_no_default():
    for kind in (Member, *ON_ROUNDS):
        assert [name for name in inspect.signature(kind).parameters if hasattr(kind, name)] == []
    assert Member.constant == 3


def test_copies_and_representations():
    model = DittoRegressor(proximal=2.0, epsilon=3.0)
    assert repr(model) == "DittoRegressor(epsilon=3.0, proximal=2.0)"
    for copied in (clone(model), pickle.loads(pickle.dumps(model))):
        assert copied.get_params() == model.get_params()
    assert cloudpickle.loads(cloudpickle.dumps(Member(own=2.0))).own == 2.0
    assert model.set_params(proximal=0.5).proximal == 0.5
    assert model != DittoRegressor(proximal=0.5, epsilon=3.0)  # as of any other estimator
    with pytest.raises(TypeError, match="positional"):
        DittoRegressor(None, 2.0)
    with pytest.raises(TypeError, match="proximall"):
        DittoRegressor(proximall=2.0)


class PlainSubclass(PPSGDRegressor):
    """A user's, with a constructor of its own."""

    def __init__(self, speed=0.1):
        super().__init__(learning_rate=speed, n_rounds=3, random_state=0)
        self.speed = speed


@with_parameters
class DecoratedSubclass(PPSGDRegressor):
    """A user's, with a further parameter."""

    speed: float = parameter(default=0.1, ranges=[Interval(Real, 0, 1, closed="neither")])


def test_subclasses_of_users():
    X, groups = np.arange(40.0)[:, None] / 40, np.repeat([0, 1], 20)
    assert list(inspect.signature(PlainSubclass).parameters) == ["speed"]
    assert clone(PlainSubclass(0.2)).get_params() == {"speed": 0.2}
    assert PlainSubclass().fit(X, X[:, 0], groups=groups).n_rounds_ == 3
    model = DecoratedSubclass(speed=2.0, n_rounds=3)
    with pytest.raises(ValueError, match=r"'speed' parameter of DecoratedSubclass.*2\.0"):
        model.fit(X, X[:, 0], groups=groups)
    with pytest.raises(ValueError, match=r"'delta' parameter of DecoratedSubclass.*3"):
        clone(model).set_params(speed=0.5, delta=3).fit(X, X[:, 0], groups=groups)


@with_parameters
class Restated(PPSGDRegressor):
    """A user's, which changes one thing of a parameter at a time."""

    n_rounds: int | None = 3
    max_rounds = parameter(default=50)
    epsilon = parameter(text="float\n  In nats.")
    speed: float = 0.5
    _parameter_constraints = {
        **PPSGDRegressor._parameter_constraints,
        "delta": [Interval(Real, 0, 0.1, closed="left")],
    }


def test_what_a_subclass_does_not_say_anew_is_that_of_its_base():
    base, texts = PPSGDRegressor._parameter_constraints, documented_parameters(Restated.__doc__)
    changed = {"n_rounds": 3, "max_rounds": 50, "speed": 0.5}
    assert Restated().get_params() == PPSGDRegressor().get_params() | changed
    for name in ("n_rounds", "max_rounds", "epsilon"):
        assert Restated._parameter_constraints[name] == base[name]
        assert not hasattr(Restated, name)
    assert texts["epsilon"] == "In nats."
    assert texts["n_rounds"] == documented_parameters(PPSGDRegressor.__doc__)["n_rounds"]
    assert "speed" not in Restated._parameter_constraints
    with pytest.raises(ValueError, match=r"'delta' parameter of Restated.*0\.2"):
        Restated(delta=0.2).fit([[0.0]], [0.0], groups=[0])


def test_a_constructor_that_fields_would_replace_is_refused():
    with pytest.raises(TypeError, match=r"Mine.*PlainSubclass.*__init__"):

        @with_parameters
        class Mine(PlainSubclass):
            """A user's."""

            more: int = parameter(default=1)


def test_a_class_without_a_docstring_has_no_other_text_before_its_parameters():
    @with_parameters
    class Silent(Base):
        more: int = parameter(default=1, text="int\n  One more.")

    assert not (Silent.__doc__ or "").startswith("Silent(")


@with_parameters
class Written(BaseEstimator):
    """A class that writes the section itself.

    Parameters
    ----------
    needed : int
        It has no default.
    other : float, default=1.0
        One more.
    """

    needed: int = parameter(kw_only=False)
    other: float = 1.0


def test_a_class_may_write_the_section_of_parameters_itself():
    @with_parameters
    class Further(Written):
        """A subclass, which has the section of its base."""

    for each in (Written, Further):
        texts = documented_parameters(each.__doc__)
        assert texts == {"needed": "It has no default.", "other": "One more."}
        assert each(3).get_params() == {"needed": 3, "other": 1.0}
        assert not hasattr(each, "other")
        with pytest.raises(TypeError, match="needed"):
            each()


@pytest.mark.slow
def test_classes_work_without_docstrings():
    code = "import pfl_sklearn as p; print(p.DittoRegressor(proximal=3))"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "DittoRegressor(proximal=3)"


@with_parameters
class _Family(Base):
    """A family.

    Notes
    -----
    What the method is.
    """


@with_parameters
class Twin(_Family):
    """One of a family.

    Notes
    -----
    What is special.
    """


def test_notes_begin_with_what_the_method_is():
    notes = Twin.__doc__.partition("Notes\n-----\n")[2]
    assert notes == "What the method is.\n\nWhat is special."
