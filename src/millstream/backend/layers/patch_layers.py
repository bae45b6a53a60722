"""Replaces a function that the layers of one model call.

mlx-lm's layers find their helpers as globals of their module. A layer gets a subclass whose `__call__` is the same code
with one global replaced: no module of mlx-lm is changed, and no other model is affected.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any


def patch_function(model: Any, name: str, function: Any, also: str | None = None) -> int:
    """Have every layer of `model` that calls `name` call `function` instead; with `also`, only those that use that name
    too. Returns how many there are."""
    made: dict[type, type] = {}
    callers = callers_of(model, name, also)
    for module in callers:
        kind = type(module)
        if kind not in made:
            made[kind] = _patched_class(kind, vars(kind)["__call__"], name, function)
        module.__class__ = made[kind]
    return len(callers)


def callers_of(model: Any, name: str, also: str | None = None) -> list[Any]:
    """The layers whose code uses the global `name`, and also, as a global or an attribute, `also` if it is given."""
    found = []
    for _, module in model.named_modules():
        call = vars(type(module)).get("__call__")
        if not isinstance(call, types.FunctionType) or name not in _globals_in(call.__code__):
            continue
        if also is None or also in call.__code__.co_names:
            found.append(module)
    return found


@functools.cache
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """Without attributes: a layer that calls `mx.fast.name` has a function of its own."""
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")


def _patched_class(kind: type, call: types.FunctionType, name: str, function: Any) -> type:
    names = {**call.__globals__, name: function}
    ours = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    ours.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": ours})
