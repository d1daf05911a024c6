"""Which members of a class are shown."""

from functools import cached_property


def _skip_inherited(app, what, name, obj, skip, options):
    """Leave out constants, and what classes inherit from elsewhere."""
    if what == "class" and not (callable(obj) or isinstance(obj, property | cached_property)):
        return True
    function = getattr(obj, "fget", None) or getattr(obj, "func", None) or obj
    module = getattr(function, "__module__", None) or ""
    return True if module and not module.startswith("pfl_sklearn") else None


def setup(app):
    app.connect("autodoc-skip-member", _skip_inherited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
