"""What objects hold, at any depth, and what the code of functions names.

A function carries more than its arguments show: values in closures and defaults, the object of a
bound method, and the globals that its code names. Code of libraries is taken to hold no data: we
do not follow the globals of its functions, and we do not look into its classes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np

__all__ = ["codes_of", "everything_in", "held_by", "is_of_library", "named_globals"]

_PLAIN = ModuleType | str | bytes | int | float | complex | None
_LIBRARIES = sys.stdlib_module_names | {
    *("numpy", "scipy", "pandas", "polars", "pyarrow", "joblib"),
    *("sklearn", "torch", "skorch", "pfl_sklearn"),
}


def everything_in(
    value: Any, enters: Callable[[Any], bool] = lambda each: True, imports: bool = True
) -> Iterator[Any]:
    """Every object inside of something, at any depth and each once; first of all itself.

    We look into attributes, containers, arrays of objects, bound methods, partial functions, and
    into functions and classes. Objects that `enters` is false for are left out. Modules that a
    function `imports` when it is called count once they are loaded.
    """
    left, seen = [value], dict[int, Any]()
    while left:
        each = left.pop()
        if isinstance(each, _PLAIN) or id(each) in seen or not enters(each):
            continue
        seen[id(each)] = each  # which keeps it, so that no other object gets its id
        yield each
        if isinstance(each, FunctionType):
            left += _of_function(each, imports)
        else:
            left += _inside(each)


def _inside(value: Any) -> list[Any]:
    """What an object that is no function holds."""
    if isinstance(value, type):
        return [] if is_of_library(value) else [*vars(value).values(), *value.__bases__]
    held = [type(value), *getattr(value, "__dict__", {}).values(), *_in_slots(value)]
    if isinstance(value, dict | MappingProxyType):
        held += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        held += value
    elif isinstance(value, np.ndarray):
        held += value.ravel().tolist() if value.dtype == object else []
    elif isinstance(value, partial):
        held += [value.func, value.args, value.keywords]
    for name in ("__self__", "__func__", "fget"):  # methods, static ones too, and properties
        if hasattr(type(value), name):  # asked of the class: an object may answer to any name
            held.append(getattr(value, name, None))
    return held


def _of_function(function: FunctionType, imports: bool) -> list[Any]:
    """What a function holds, and the globals that it names."""
    held = [vars(function), *held_by(function)]
    if is_of_library(function):
        return held
    return [*held, *(named for _, named in named_globals(function, imports))]


def held_by(function: FunctionType) -> list[Any]:
    """Defaults of a function and the contents of its closure."""
    held: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # that is empty
            held.append(cell.cell_contents)
    return held


def _in_slots(value: Any) -> list[Any]:
    """Values of an object's slots."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [getattr(value, name) for name in names if hasattr(value, name)]


def named_globals(function: FunctionType, imports: bool = False) -> list[tuple[str, Any]]:
    """Names and values of the globals that the code of a function names, alone or in modules.

    With `imports` also in modules that the function itself imports.
    """
    names = {name for code in codes_of(function) for name in code.co_names}
    found: list[tuple[str, Any]] = []
    modules: list[Any] = [function.__globals__]
    if imports:
        modules += [vars(sys.modules[name]) for name in names if sys.modules.get(name)]
    seen = set()
    while modules:
        module = modules.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        named = [(name, module[name]) for name in names if name in module]
        modules += [vars(each) for _, each in named if isinstance(each, ModuleType)]
        found += named
    return found


def codes_of(function: FunctionType) -> list[CodeType]:
    """Code of a function and of everything that is defined inside it."""
    codes = [function.__code__]
    for code in codes:  # which grows meanwhile
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return codes


def is_of_library(value: Any) -> bool:
    """Whether a function or class is one of Python's or of a library that we know.

    A decorated function names the module of the function inside, so its globals decide.
    """
    named = getattr(value, "__globals__", {}).get("__name__") or value.__module__
    return str(named).partition(".")[0] in _LIBRARIES
