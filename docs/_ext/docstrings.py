"""Which members of a class are shown."""

from functools import cached_property
from importlib import import_module


def _skip_inherited(app, what, name, obj, skip, options):
    """Leave out constants, and what classes inherit from elsewhere."""
    if what == "class" and not (callable(obj) or isinstance(obj, property | cached_property)):
        return True
    function = getattr(obj, "fget", None) or getattr(obj, "func", None) or obj
    module = getattr(function, "__module__", None) or ""
    return True if module and not module.startswith("pfl_sklearn") else None


def properties_of(full_name, attributes):
    """Of the attributes of a class, the properties that say something; parameters stand above."""
    module, _, name = full_name.rpartition(".")
    kind = getattr(import_module(module), name)
    found = [(each, getattr(kind, each, None)) for each in attributes]
    shown = property | cached_property
    return [each for each, value in found if isinstance(value, shown) and value.__doc__]


def setup(app):
    app.connect("autodoc-skip-member", _skip_inherited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
