"""Replaces a function that the layers of one model call.

mlx-lm's layers find their helpers as globals of their module. A layer gets a subclass whose `__call__` is the same code
with one global replaced: no module of mlx-lm is changed, and no other model is affected.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any


def patch_function(model: Any, name: str, function: Any, also: str | None = None, instead_of: Any = None) -> int:
    """Have every layer of `model` that calls `name` call `function` instead; with `also`, only those that use that name
    too, with `instead_of`, only those for whom the name means that. Returns how many there are."""
    made: dict[type, type] = {}
    callers = callers_of(model, name, also, instead_of)
    for module in callers:
        kind = type(module)
        if kind not in made:
            made[kind] = _patched_class(kind, _methods_using(kind, name, also), name, function)
        module.__class__ = made[kind]
    return len(callers)


def callers_of(model: Any, name: str, also: str | None = None, meaning: Any = None) -> list[Any]:
    """The layers whose code uses the global `name`, and also, as a global or an attribute, `also` if it is given."""
    found = []
    for _, module in model.named_modules():
        methods = _methods_using(type(module), name, also).values()
        if methods and (meaning is None or all(each.__globals__.get(name) is meaning for each in methods)):
            found.append(module)
    return found


def _methods_using(kind: type, name: str, also: str | None) -> dict[str, types.FunctionType]:
    """Methods of the class itself. Layers call their helpers from `__call__`, or from a part of it."""
    functions = {key: each for key, each in vars(kind).items() if isinstance(each, types.FunctionType)}
    return {
        key: each
        for key, each in functions.items()
        if name in _globals_in(each.__code__) and (also is None or also in each.__code__.co_names)
    }


@functools.cache
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """Without attributes: a layer that calls `mx.fast.name` has a function of its own."""
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")


def _patched_class(kind: type, methods: dict[str, types.FunctionType], name: str, function: Any) -> type:
    ours = {}
    for key, method in methods.items():
        names = {**method.__globals__, name: function}
        copy = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
        copy.__kwdefaults__ = method.__kwdefaults__
        ours[key] = copy
    return type(kind.__name__, (kind,), ours)
