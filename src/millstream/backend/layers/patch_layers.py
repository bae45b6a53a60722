"""Giving a model another function in place of one that its layers call.

mlx-lm's layers find their helpers as globals of the module they are written in. A layer gets a subclass whose
`__call__` is the same code with one global exchanged: no module of mlx-lm is changed, no other model is touched.
"""

from __future__ import annotations

import types
from typing import Any


def patch_function(model: Any, name: str, function: Any, beside: str | None = None) -> int:
    """Every layer of `model` that calls `name` calls `function` instead; how many there are. `beside`: only those that
    use this name as well."""
    made: dict[type, type] = {}
    callers = callers_of(model, name, beside)
    for module in callers:
        kind = type(module)
        if kind not in made:
            made[kind] = _with(kind, vars(kind)["__call__"], name, function)
        module.__class__ = made[kind]
    return len(callers)


def callers_of(model: Any, name: str, beside: str | None = None) -> list[Any]:
    """The layers whose call uses `name`, and `beside` as well if it is given."""
    found = []
    for _, module in model.named_modules():
        call = vars(type(module)).get("__call__")
        names = call.__code__.co_names if isinstance(call, types.FunctionType) else ()
        if name in names and (beside is None or beside in names):
            found.append(module)
    return found


def _with(kind: type, call: types.FunctionType, name: str, function: Any) -> type:
    names = {**call.__globals__, name: function}
    ours = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    ours.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": ours})
