"""Objects that an object refers to, at any depth, and globals that functions use.

A function carries more than its arguments show: values in closures and defaults, the object of a
bound method, and the globals that its code names. Code of libraries is taken to hold no data: we
do not follow the globals of its functions, and we do not look into its classes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np

__all__ = ["captured_values", "is_library_code", "iter_reachable", "named_globals", "nested_code"]

_ATOMIC = (str, bytes, int, float, complex, bool, NoneType)  # not their subclasses: these may hold
_LIBRARIES = sys.stdlib_module_names | {
    *("numpy", "scipy", "pandas", "polars", "pyarrow", "joblib"),
    *("sklearn", "torch", "skorch", "pfl_sklearn"),
}


def iter_reachable(
    value: Any, enters: Callable[[Any], bool] = lambda item: True, imports: bool = True
) -> Iterator[Any]:
    """Every object inside something, at any depth and each once, the object itself first.

    We look into attributes, containers, arrays of objects, bound methods, partial functions,
    functions and classes, but not into modules or frames, which lead to whatever ran when an
    exception was raised. Objects for which `enters` is false are left out. With `imports`, modules
    that a function imports when called count once they are loaded.
    """
    pending, seen = [value], dict[int, Any]()
    while pending:
        item = pending.pop()
        if issubclass(type(item), ModuleType | FrameType) or type(item) in _ATOMIC:
            continue
        if id(item) in seen or not enters(item):
            continue
        seen[id(item)] = item  # which keeps it, so that no other object gets its id
        yield item
        if type(item) is FunctionType:
            pending += _function_referents(item, imports)
        else:
            pending += _referents(item)


def _referents(value: Any) -> list[Any]:
    """What an object that is no function holds."""
    # The garbage collector also knows what C objects hold (iterators, data frames, slots), and runs
    # no code of the object, which may answer to any name or to none.
    cls = type(value)
    if issubclass(cls, type):
        return [] if is_library_code(value) else [cls, *vars(value).values(), *value.__bases__]
    if hasattr(cls, "__globals__") and is_library_code(value):  # a function that Cython compiled
        return []
    referents = [cls, *gc.get_referents(value)]
    if issubclass(cls, np.ndarray) and value.dtype.hasobject:  # numpy does not tell it
        referents += value.ravel().tolist()
    return referents


def _function_referents(function: FunctionType, imports: bool) -> list[Any]:
    """What a function holds, and the globals that it names."""
    referents = [vars(function), *captured_values(function)]
    if is_library_code(function):
        return referents
    return [*referents, *(named for _, named in named_globals(function, imports))]


def captured_values(function: FunctionType) -> list[Any]:
    """Defaults of a function and the contents of its closure."""
    referents: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # that is empty
            referents.append(cell.cell_contents)
    return referents


def named_globals(function: FunctionType, imports: bool = False) -> list[tuple[str, Any]]:
    """Names and values of the globals that the code of a function names, alone or in modules.

    These are modules among the globals, defaults and the contents of the closure; with `imports`
    also those that the function itself imports.
    """
    names = {name for code in nested_code(function) for name in code.co_names}
    values: list[tuple[str, Any]] = []
    defaults, by_name, *cells = captured_values(function)
    pending: list[Any] = [*(defaults or ()), *(by_name or {}).values(), *cells]
    if imports:
        pending += _loaded_modules(names, function.__globals__.get("__package__") or "")
    spaces = [function.__globals__]
    seen = set()
    while spaces:
        space = spaces.pop()
        if id(space) in seen:
            continue
        seen.add(id(space))
        named = [(name, space[name]) for name in names if name in space]
        pending += [item for _, item in named]
        values += named
        spaces += [vars(item) for item in pending if issubclass(type(item), ModuleType)]
    return values


def _loaded_modules(names: set[str], package: str) -> list[Any]:
    """Loaded modules with these names, also relative to a package."""
    parts = package.split(".")
    above = ["", *(".".join(parts[:end]) + "." for end in range(1, len(parts) + 1))]
    return [sys.modules.get(f"{prefix}{name}") for prefix in above for name in names]


def nested_code(function: FunctionType) -> list[CodeType]:
    """Code of a function and of everything that is defined inside it."""
    codes = [function.__code__]
    for code in codes:  # which grows meanwhile
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return codes


def is_library_code(value: Any) -> bool:
    """Whether a function or class is one of Python's or of a library that we know."""
    # A decorated function names the module of the inner function, so its globals decide.
    space = {} if isinstance(value, type) else value.__globals__
    named = space.get("__name__") or value.__module__
    return str(named).partition(".")[0] in _LIBRARIES
