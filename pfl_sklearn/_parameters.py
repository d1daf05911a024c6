"""Parameters of estimators on rounds: a field is a parameter with its default, range and text.

From the fields of a class and its bases come the constructor, its signature, the ranges that
scikit-learn checks, and the section "Parameters" of the docstring.
"""

import dataclasses
import inspect
import re
import textwrap
from typing import Any, TypeVar, dataclass_transform

from sklearn.base import ClassifierMixin

from pfl_sklearn._docs import filled

C = TypeVar("C", bound=type)


def parameter(
    *, default: Any, ranges: Any = None, text: str | None = None, kw_only: bool = True
) -> Any:
    """Field of a class under :func:`with_parameters`.

    Parameters
    ----------
    default : object
        Default value. It may not be a list, a dict or a set, which all estimators would share.
    ranges : list or "no_validation", default=None
        What scikit-learn's validation accepts. None: what a base says of the parameter.
    text : str, default=None
        Entry of the docstring without name and default: the first line says type and range, the
        others what the parameter does. None: the text of a base.
    kw_only : bool, default=True
        Whether the parameter is given by keyword only.
    """
    metadata = {"ranges": ranges, "text": text}
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata)


@dataclass_transform(field_specifiers=(parameter,))
def with_parameters(cls: C) -> C:
    """Make a dataclass of an estimator's class, whose fields are the parameters.

    Positional parameters come first. Then those that the class itself adds, those of its base, and
    so on, each class's in their order, so that what is common to all estimators comes last.
    """
    for name, field in list(vars(cls).items()):
        if isinstance(field, dataclasses.Field):
            _inherit_metadata(field, cls.__mro__[1:], name)
    dataclasses.dataclass(eq=False, repr=False)(cls)
    fields: dict[str, Any] = {each.name: each for each in dataclasses.fields(cls)}
    for name, field in fields.items():
        # Class-level defaults would appear as properties in documentation. A class may have a
        # property or constant of its own under a parameter's name, which stays.
        if vars(cls).get(name, dataclasses.MISSING) is field.default:
            delattr(cls, name)
    names = _in_order(cls, fields)
    ranges = {name: fields[name].metadata["ranges"] for name in names}
    cls._parameter_constraints = {  # type: ignore[attr-defined]
        name: allowed for name, allowed in ranges.items() if allowed is not None
    }
    init: Any = vars(cls)["__init__"]
    # On the constructor rather than the class, whose subclasses would inherit it with their own.
    signature = inspect.signature(init)
    kept = [signature.parameters[name] for name in ("self", *names)]
    init.__signature__ = signature.replace(parameters=kept)
    if cls.__doc__:  # None under python -OO
        entries = "\n".join(_entry(fields[name]) for name in names)
        cls._doc_template = _with_sections(cls)  # type: ignore[attr-defined]
        texts = {**getattr(cls, "_texts", {}), "parameters": entries}
        cls.__doc__ = filled(_for_kind(cls, cls._doc_template), texts)  # type: ignore[attr-defined]
    return cls


def _for_kind(cls: type, template: str) -> str:
    """Template in which classifiers refer to classifiers, and regressors have no classes."""
    if issubclass(cls, ClassifierMixin):
        return template.replace("%(kind)s", "Classifier")
    return template.replace("%(kind)s", "Regressor").replace("%(classes)s\n", "")


def _with_sections(cls: type) -> str:
    """Docstring of a class, with the sections of its base's if it has no parameters of its own."""
    own = inspect.cleandoc(cls.__doc__ or "")
    inherited = getattr(cls, "_doc_template", "")
    if "%(parameters)s" in own or "Parameters\n---" not in inherited:
        return own
    summary, _, example = own.partition("\n\nExamples\n")
    shared = inherited.partition("\n\n")[2]  # without the base's own first line
    return f"{summary}\n\n{shared}" + (f"\n\nExamples\n{example}" if example else "")


def _inherit_metadata(field: Any, bases: tuple[type, ...], name: str) -> None:
    """Take from the nearest base what a field leaves out."""
    inherited = (getattr(base, "__dataclass_fields__", {}).get(name) for base in bases)
    before: Any = next((each.metadata for each in inherited if each is not None), {})
    said = {key: value for key, value in field.metadata.items() if value is not None}
    field.metadata = {"ranges": None, "text": None, **before, **said}


def _in_order(cls: type, fields: dict[str, Any]) -> list[str]:
    """Names of parameters: positional ones, then by class from `cls` upwards.

    A parameter stands where the base is that has it first: who replaces a text moves nothing.
    """
    home: dict[str, type] = {}
    for each in reversed(cls.__mro__):
        for name in inspect.get_annotations(each):
            if "__dataclass_fields__" in vars(each) and name in fields:
                home.setdefault(name, each)
    ordered = [name for each in cls.__mro__ for name in home if home[name] is each]
    return sorted(ordered, key=lambda name: fields[name].kw_only)


def _entry(field: Any) -> str:
    """Entry of a parameter in the section "Parameters"."""
    kind, _, rest = textwrap.dedent(field.metadata["text"] or "object").strip("\n").partition("\n")
    text = textwrap.indent(textwrap.dedent(rest).rstrip(), "    ")
    return f"{field.name} : {kind}, default={_written(field.default)}\n{text}"


def _written(default: Any) -> str:
    """A default value as one would write it in a call."""
    if isinstance(default, str):
        return f'"{default}"'
    return re.sub(r"e-0(\d)", r"e-\1", repr(default))
