"""Every public name of the package, and the parameters of what can be called.

`python -m tests.helpers.public_interface` prints it as stored in
`tests/oracles/public_interface.json`.
"""

import functools
import importlib
import inspect
import json

from sklearn.base import BaseEstimator

PACKAGES = (
    "pfl_sklearn",
    "pfl_sklearn.base",
    "pfl_sklearn.compose",
    "pfl_sklearn.datasets",
    "pfl_sklearn.estimation",
    "pfl_sklearn.inspection",
    "pfl_sklearn.linear_model",
    "pfl_sklearn.metrics",
    "pfl_sklearn.model_selection",
    "pfl_sklearn.priors",
    "pfl_sklearn.privacy",
    "pfl_sklearn.privacy.auditing",
    "pfl_sklearn.statistics",
    "pfl_sklearn.theory",
)


def exported(package):
    """Public names of a package with their objects; a module without `__all__` has its own."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == package
    }


def public_interface():
    """Qualified names, each with its parameters, or with what it is if it takes none."""
    found = {}
    for package in PACKAGES:
        for name, value in exported(package).items():
            found[f"{package}.{name}"] = parameters_of(value)
            if inspect.isclass(value):
                found |= {f"{package}.{name}.{key}": val for key, val in members_of(value).items()}
    return found


def members_of(kind):
    names = [name for name in dir(kind) if not name.startswith("_") and name not in dir(Exception)]
    return {name: parameters_of(inspect.getattr_static(kind, name)) for name in names}


def private_estimators():
    """Public estimators with a parameter `epsilon`, by name."""
    found = {each for package in PACKAGES for each in exported(package).values()}
    kinds = [each for each in found if inspect.isclass(each) and issubclass(each, BaseEstimator)]
    private = [each for each in kinds if "epsilon" in inspect.signature(each).parameters]
    return sorted(private, key=lambda each: each.__name__)


def parameters_of(value):
    """Parameters in order, with defaults, and the stars between the kinds of them."""
    value = getattr(value, "fn", value)  # available_if
    value = getattr(value, "__func__", value)  # staticmethod, classmethod
    if not callable(value):
        return "attribute"
    if not is_ours(value):
        return "inherited"
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # exceptions
        return "inherited"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    text = [str(each) for each in bare]
    first_keyword = next((i for i, each in enumerate(bare) if each.kind is each.KEYWORD_ONLY), None)
    if first_keyword is not None and not any(each.startswith("*") for each in text[:first_keyword]):
        text.insert(first_keyword, "*")
    return text


def methods_of(kind):
    """Public methods of a class that this package defines, by name."""
    members = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {name: each for name, each in members.items() if callable(each) and is_ours(each)}


def properties_of(kind):
    """Public properties of a class that this package defines, by name."""
    found = {}
    for name in dir(kind):
        each = inspect.getattr_static(kind, name)
        if isinstance(each, functools.cached_property):
            source = each.func
        else:
            source = each.fget if isinstance(each, property) else None
        if not name.startswith("_") and is_ours(source):
            found[name] = each
    return found


def is_ours(value):
    return str(getattr(value, "__module__", None)).startswith("pfl_sklearn")


def documented_parameters(docstring):
    """Texts of the section "Parameters" of a numpydoc docstring, by name."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    if "Parameters" not in lines:
        return {}
    texts, names = {}, []
    for line in lines[lines.index("Parameters") + 2 :]:
        if line.startswith("-----"):  # the next section, whose title was taken for a name
            return {name: text for name, text in texts.items() if name not in names}
        if line and not line.startswith(" "):
            names = [name.strip(" *") for name in line.partition(" :")[0].split(",")]
            texts |= dict.fromkeys(names, "")
        else:
            texts |= {name: (texts[name] + " " + line.strip()).strip() for name in names}
    return texts


def dumps(interface):
    rows = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(interface.items()))
    return "{\n" + ",\n".join(rows) + "\n}"


if __name__ == "__main__":
    print(dumps(public_interface()))
