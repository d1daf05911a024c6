"""Parameters as fields: a field is a parameter with its default, range and text.

From the fields of a class and its bases come the constructor, its signature, the ranges that
scikit-learn checks, and the section "Parameters" of the docstring, unless the class writes that
section itself. Those that all estimators with a private fit have are fields of
:class:`PrivateFit`.
"""

import copy
import dataclasses
import inspect
import math
import re
import textwrap
from numbers import Integral, Real
from typing import Any, TypeVar, dataclass_transform

from pfl_sklearn._compat import ClassifierMixin, Interval, StrOptions
from pfl_sklearn._typing import RandomState
from pfl_sklearn.privacy._ledger import PrivacyLedger

# Ranges that many parameters share.
POSITIVE = Interval(Real, 0, None, closed="neither")
NOT_NEGATIVE = Interval(Real, 0, None, closed="left")
AT_LEAST_ONE = Interval(Integral, 1, None, closed="left")
FROM_0_TO_1 = Interval(Real, 0, 1, closed="both")
BETWEEN_0_AND_1 = Interval(Real, 0, 1, closed="neither")
BELOW_ONE = Interval(Real, 0, 1, closed="left")  # such as delta: 0 is pure, 1 protects nobody
EPSILON = Interval(Real, 0, math.inf, closed="right")
CLASS_WEIGHT = [dict, StrOptions({"balanced"}), None]

C = TypeVar("C", bound=type)
_SECTIONS = (
    *("Parameters", "Attributes", "Raises", "Warns"),
    *("See Also", "Notes", "References", "Examples"),
)


def parameter(
    *,
    default: Any = dataclasses.MISSING,
    ranges: Any = None,
    text: str | None = None,
    also: str | None = None,
    kw_only: bool = True,
) -> Any:
    """Field of a class under :func:`with_parameters`.

    For a parameter that a base has, say what differs: ``epsilon = parameter(text=...)``, without a
    type, replaces the text alone, and ``epsilon = parameter(also=...)`` adds to it.

    Parameters
    ----------
    default : object, default=MISSING
        Default value; if it is missing, that of a base. It may not be a list, a dict or a set,
        which all estimators would share.
    ranges : list or "no_validation", default=None
        What scikit-learn's validation accepts. None: what a base says of the parameter.
    text : str, default=None
        Entry of the docstring without name and default: the first line says type and range, the
        others what the parameter does. None: the text of a base.
    also : str, default=None
        Sentences that follow the text of a base.
    kw_only : bool, default=True
        Whether the parameter is given by keyword only.
    """
    said = {"ranges": ranges, "text": text, "also": also}
    metadata = {key: value for key, value in said.items() if value is not None}
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata)


# One parameter of every estimator that predicts for clients.
UNSEEN = parameter(
    default="warn",
    ranges=[StrOptions({"warn", "population", "error"})],
    text="""
        {"warn", "population", "error"}
            What to do for clients that ``fit`` did not see. "warn" and "population" use the
            population model; "warn" says so when they have at least half of the rows. "error"
            raises an error.
    """,
)

# One of the mixed models, of any family.
FIT_INTERCEPT = parameter(
    default=True,
    ranges=["boolean"],
    text="""
        bool
            Whether the model has an intercept; otherwise rows are modelled through the origin.
    """,
)


@dataclass_transform(kw_only_default=True, field_specifiers=(parameter,))
def with_parameters(cls: C) -> C:
    """Give an estimator's class the constructor of a dataclass, whose fields are the parameters.

    The class itself is no dataclass: dask would rebuild estimators from their fields and lose what
    was fitted, and pandas would spread them over columns.

    Positional parameters come first. Then those that the class itself adds, those of its base, and
    so on, each class's in their order, so that what is common to all estimators comes last. Those
    of :class:`PrivateFit` stand where the first class that inherits from it mentions them.

    Raises
    ------
    TypeError
        If a base has a constructor of its own, which that of the fields would replace.
    """
    for base in cls.__mro__[1:-1]:
        # The constructor of scikit-learn's compositions takes nothing, so nothing is lost.
        loses = "__init__" in vars(base) and inspect.signature(base).parameters
        if loses and "_fields_of_parameters" not in vars(base):
            raise TypeError(
                f"{cls.__name__} would lose the parameters of {base.__name__}.__init__; give "
                f"{cls.__name__} an __init__ and no with_parameters, or {base.__name__} fields."
            )
    own_names, fields = _merge_fields(cls)
    # The class itself is no dataclass, nor is any base, not even while this one is made.
    made: Any = dataclasses.make_dataclass(
        cls.__name__, [(name, field.type, field) for name, field in fields.items()], kw_only=True
    )
    init: Any = made.__init__
    init.__module__, init.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    cls.__init__ = init  # type: ignore[misc]
    cls._fields_of_parameters = fields  # type: ignore[attr-defined]
    for name in own_names & vars(cls).keys():
        # Class-level defaults would appear as properties in documentation.
        delattr(cls, name)
    names = _parameter_order(cls, fields)
    metadata = {name: field.metadata for name, field in fields.items()}
    ranges = {name: data["ranges"] for name, data in metadata.items() if "ranges" in data}
    cls._parameter_constraints = {  # type: ignore[attr-defined]
        **ranges,
        **getattr(cls, "_parameter_constraints", {}),  # may be the class's own, without fields
        **{name: ranges[name] for name in own_names & ranges.keys()},
    }
    # On the constructor rather than the class, whose subclasses would inherit it with their own.
    signature = inspect.signature(init)
    ordered = [signature.parameters[name] for name in ("self", *names)]
    init.__signature__ = signature.replace(parameters=ordered)
    if cls.__doc__:  # None under python -OO
        cls._own_doc = cls.__doc__  # type: ignore[attr-defined]
        cls.__doc__ = _docstring(cls, {name: _parameter_entry(fields[name]) for name in names})
    return cls


def _docstring(cls: type, entries: dict[str, str]) -> str:
    """Docstring of a class, from its own one and those of its bases.

    `entries` are the texts of the fields, by name. Attributes, errors and notes of bases follow the
    class's own, except notes of private bases, which explain the method. References are those of
    the nearest class that has any. A class without a paragraph under its summary gets that of a
    private base.
    """
    ours = [
        ancestor
        for ancestor in cls.__mro__
        if not ancestor.__module__.startswith(("sklearn", "builtins"))
    ]
    said = {
        ancestor: _sections(vars(ancestor).get("_own_doc", ancestor.__doc__) or "")
        for ancestor in ours
    }
    # A class that writes the section itself gives its fields no texts; a subclass may add fields.
    written = next(
        (ancestor for ancestor, sections in said.items() if "Parameters" in sections), None
    )
    if written is not None:
        listed = vars(written).get("_fields_of_parameters", {})
        entries = {name: text for name, text in entries.items() if name not in listed}
    parameters = [*entries.values(), *([] if written is None else [said[written]["Parameters"]])]
    private_first = sorted(ours, key=lambda ancestor: ancestor.__name__[0] != "_")
    merged = {"Parameters": "\n".join(parameters)}
    joined = dict.fromkeys(("Attributes", "Raises", "Warns"), (ours, "\n"))
    for name, (order, between) in (joined | {"Notes": (private_first, "\n\n")}).items():
        merged[name] = between.join(
            said[ancestor][name] for ancestor in order if name in said[ancestor]
        )
    for name in ("See Also", "References"):
        merged[name] = next((ancestor[name] for ancestor in said.values() if name in ancestor), "")
    merged["Examples"] = said[cls].get("Examples", "")
    head = said[cls][""]
    if "\n\n" not in head:
        private = [said[ancestor][""] for ancestor in ours[1:] if ancestor.__name__[0] == "_"]
        head = "\n\n".join([head, *(text.partition("\n\n")[2] for text in private)]).rstrip()
    parts = [f"{name}\n{'-' * len(name)}\n{merged[name]}" for name in _SECTIONS if merged[name]]
    kind = "Classifier" if issubclass(cls, ClassifierMixin) else "Regressor"
    return "\n\n".join([head, *parts]).replace("%(kind)s", kind)


def _sections(docstring: str) -> dict[str, str]:
    """Bodies of the sections of a docstring by name; what comes before them has the name ""."""
    pattern = rf"\n\n({'|'.join(_SECTIONS)})\n-+\n"
    head, *others = re.split(pattern, inspect.cleandoc(docstring))
    return {"": head, **dict(zip(others[::2], others[1::2], strict=True))}


def _merge_fields(cls: type) -> tuple[set[str], dict[str, Any]]:
    """Names of the class's own fields, and all fields by name."""
    # A field inherits from the nearest base what it leaves out. A bare annotation or a new default
    # also makes a field, as in any dataclass.
    inherited: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        inherited |= vars(base).get("_fields_of_parameters", {})
    types, own_fields = dict(inspect.get_annotations(cls)), {}
    valued = [name for name, said in vars(cls).items() if _is_field(said) or name in types]
    # In the order of the class's body, in which annotations without a value have no place.
    names = dict.fromkeys([*(name for name in types if name not in valued), *valued])
    for name in names:
        if "ClassVar" in str(types.get(name)):
            continue
        before, said = inherited.get(name), vars(cls).get(name, dataclasses.MISSING)
        said = copy.copy(said) if _is_field(said) else parameter(default=said)
        if before is not None:
            default = before.default if said.default is dataclasses.MISSING else said.default
            metadata = {**before.metadata, **said.metadata}
            if "also" in said.metadata:
                text = _indented_lines(metadata.get("text", "object"), metadata["also"])
                metadata["text"] = "\n".join(text)
            said = dataclasses.field(default=default, kw_only=before.kw_only, metadata=metadata)
            types.setdefault(name, before.type)
        said.type = types[name]
        own_fields[name] = said
    cls.__annotations__ = {name: types[name] for name in names}
    return set(own_fields), inherited | own_fields


def _is_field(value: Any) -> bool:
    return isinstance(value, dataclasses.Field)


def _parameter_order(cls: type, fields: dict[str, Any]) -> list[str]:
    """Names of parameters: positional ones, then by class from `cls` upwards."""
    # A parameter keeps the place of the base that declares it first, so replacing its text moves
    # nothing. Parameters of PrivateFit stand next to the bounds that go with them.
    home: dict[str, type] = {}
    for ancestor in reversed(cls.__mro__):
        for name in inspect.get_annotations(ancestor):
            if "_fields_of_parameters" not in vars(ancestor) or name not in fields:
                continue
            if name in home and "_places_are_open" in vars(home[name]):
                del home[name]  # it goes behind what this class mentioned before
            home.setdefault(name, ancestor)
    ordered = [name for ancestor in cls.__mro__ for name in home if home[name] is ancestor]
    return sorted(ordered, key=lambda name: fields[name].kw_only)


def _parameter_entry(field: Any) -> str:
    """Entry of a parameter in the section "Parameters"."""
    kind, *text = _indented_lines(field.metadata.get("text", "object"))
    if field.default is not dataclasses.MISSING:
        kind += f", default={_format_default(field.default)}"
    return "\n".join([f"{field.name} : {kind}", *text])


def _indented_lines(text: str, also: str = "") -> list[str]:
    """Lines of a text, what follows the type and range indented, and of what is added to it."""
    kind, _, rest = textwrap.dedent(text).strip("\n").partition("\n")
    added = [textwrap.dedent(part).strip() for part in (rest, also)]
    return [kind, *textwrap.indent("\n".join(filter(None, added)), "    ").splitlines()]


def _format_default(default: Any) -> str:
    """A default value as one would write it in a call."""
    if isinstance(default, str):
        return f'"{default}"'
    return re.sub(r"e-0(\d)", r"e-\1", repr(default))


@with_parameters
class PrivateFit:
    """Parameters of all estimators that have a private fit; a new one is a field here."""

    _places_are_open = True  # where a signature has them is up to the class that mentions them

    epsilon: float = parameter(
        default=math.inf,
        ranges=[EPSILON],
        text="""
            float in (0, inf]
                Privacy loss of what the fit releases, in nats. Infinity: no privacy.
        """,
    )
    delta: float = parameter(
        default=1e-5,
        ranges=[BELOW_ONE],
        text="""
            float in [0, 1)
                Delta of the privacy statement; choose it below one over the number of clients
                (or rows) that are protected. Gaussian noise needs one above 0 when `epsilon` is
                finite.
        """,
    )
    ledger: PrivacyLedger | None = parameter(
        default=None,
        ranges=[PrivacyLedger, None],
        text="""
            PrivacyLedger or None
                File that records every fit before the fit reads any data, and refuses a fit beyond
                its budget.
        """,
    )
    random_state: RandomState = parameter(
        default=None,
        ranges=["random_state"],
        text="""
            int, RandomState instance or None
                Seed of the privacy noise. None draws it from the operating system. Noise from a
                seed is reproducible, so it does not protect against anyone who knows the seed; the
                report says so.
        """,
    )
