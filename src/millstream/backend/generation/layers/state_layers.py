"""Layers that keep a state (convolutions, Mamba, gated delta) in a pass of several tokens per row, or of whole prompts.

A row that keeps only some of its new tokens needs its state after the last of these. So the module that reads a state
is called once for each token, and the states between the calls are collected (`StateLayer.steps`); each row picks its
own when the step ends. The linear layers at the module's ends run once for all tokens, so weights are read once. Which
modules these are is seen by watching one token.

Prompts that stand one after the other in a flat pass are for short convolutions alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from millstream.backend.generation.arena.views import RowShape, StateView
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.flat_caches import FlatStates
from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.caches.state_caches import StateLayer
from millstream.backend.generation.layers.block_frame import replaced, watched_calls
from millstream.backend.generation.layers.block_parts import conv_parts, weight_of
from millstream.backend.layers.patch_layers import callers_of
from millstream.backend.layers.projections import part_of
from millstream.backend.layers.state_ops import BY_MLX, StateOps


@dataclass(frozen=True, slots=True)
class _Ends:
    """The linear layers of a module that can run for all tokens at once, by name."""

    firsts: tuple[str, ...] = ()
    """They read the module's input as it is."""
    last: str | None = None
    """Its output is the module's."""


def adopt_state_layers(model: Any) -> str | None:
    """Have the modules that read states take passes of several tokens per row. Returns why that cannot be; None if it
    can, or if there are no such modules."""
    readers = _readers(model)
    attending = {id(module) for module in callers_of(model, "scaled_dot_product_attention")}
    for module in readers.values():
        if id(module) in attending:
            return "its attention has a state besides"
    for module in readers.values():
        module._ends = None
        kind: Any = type(module)
        module.__class__ = _verifying_class(kind)
    if readers:
        model(mx.zeros((1, 1), dtype=mx.int32), cache=new_row_caches(model))
    return None


class _WatchedStates(ArraysCache):  # type: ignore[misc]
    """Tells which module reads it: the innermost one whose code is running."""

    def __init__(self, size: int, tell: Any) -> None:
        super().__init__(size)
        self._tell = tell

    def __getitem__(self, index: int) -> Any:
        frame = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            self._tell(frame.f_locals["self"])
        return super().__getitem__(index)


def _readers(model: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}

    def watched(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(watched(each) for each in cache.caches))
        if type(cache) is not ArraysCache:
            return cache
        return _WatchedStates(len(cache.cache), lambda module: found.setdefault(id(module), module))

    caches = new_row_caches(model)
    if any(isinstance(leaf, ArraysCache) for cache in caches for leaf in _leaves(cache)):
        model(mx.zeros((1, 1), dtype=mx.int32), cache=[watched(cache) for cache in caches])
    return found


def _leaves(cache: Any) -> list[Any]:
    return [leaf for each in cache.caches for leaf in _leaves(each)] if isinstance(cache, CacheList) else [cache]


@functools.cache
def _verifying_class(kind: Any) -> type:
    """A subclass of `kind` that takes flat passes: of several tokens per row, or of prompts."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self._ends is None:
            self._ends, out = _ends(self, kind, arguments, named)
            return out
        given = (*arguments, *named.values())
        if (prompts := next((each for each in given if isinstance(each, FlatStates)), None)) is not None:
            return _flat_prompts(self, prompts, given[0])
        states = next((each for each in given if isinstance(each, StateLayer | StateView)), None)
        if states is None or states.shape.length == 1:
            return kind.__call__(self, *arguments, **named)
        return _token_by_token(self, kind, states, arguments, named)

    return type(kind.__name__, (kind,), {"__call__": call})


def _token_by_token(
    module: Any, kind: Any, states: StateLayer | StateView, arguments: Sequence[Any], named: dict[str, Any]
) -> Any:
    shape, x = states.shape, arguments[0] if arguments else next(iter(named.values()))
    if (conv := conv_parts(module)) is not None and x.ndim == 3 and states[0] is not None:
        joined = conv.joined(x)
        tokens = short_conv_pass(joined.reshape(-1, 1, joined.shape[-1]), states, conv.weight)
        return conv.out(tokens.reshape(*joined.shape[:2], -1))
    ends: _Ends = module._ends
    given = {name: _Given(shape.by_row(module[name](x), shape.live)) for name in ends.firsts}
    stand_ins: dict[str, Any] = {**given, **({ends.last: _Same()} if ends.last else {})}
    found = []
    with ExitStack() as stack:
        stack.enter_context(replaced(module, stand_ins))
        for token in range(shape.length):
            for each in given.values():
                each.token = token
            before = list(states.cache)
            parts = [_of_token(each, shape, token) for each in arguments]
            found.append(
                kind.__call__(module, *parts, **{n: _of_token(each, shape, token) for n, each in named.items()})
            )
            states.keep(token, before)
    if isinstance(found[0], tuple):
        return tuple(_flat(shape, [each[index] for each in found]) for index in range(len(found[0])))
    out = _flat(shape, found)
    return module[ends.last](out) if ends.last else out


def _flat_prompts(module: Any, states: FlatStates, x: mx.array) -> Any:
    if (conv := conv_parts(module)) is None:
        raise ValueError("its states are not those of short convolutions")
    return conv.out(short_conv_prompts(conv.joined(x), states, conv.weight))


def short_conv_prompts(projected: mx.array, states: FlatStates, weight: mx.array, ops: StateOps = BY_MLX) -> mx.array:
    """A short convolution over prompts that stand one after the other."""
    out, columns = ops.short_conv_prompts(projected, states.prompts.positions, weight)
    states.write(columns)
    return out


def short_conv_pass(
    projected: mx.array, states: StateLayer | StateView, weight: mx.array, ops: StateOps = BY_MLX
) -> mx.array:
    """A short convolution: the columns of all tokens are there, so nothing runs token by token."""
    shape, state = states.shape, states[0]
    assert state is not None, "a pass of several tokens follows a prompt"
    out, seen = ops.short_conv_steps(projected, state, weight, shape.length)
    kept = state.shape[1]
    states.steps = [[seen[:, token + 1 : token + 1 + kept]] for token in range(shape.length)]
    states[0] = states.steps[-1][0]
    return out


class _Given(nn.Module):  # type: ignore[misc]
    """Stands for a layer whose output is known for all tokens."""

    def __init__(self, outputs: mx.array) -> None:
        super().__init__()
        self._outputs = [outputs]
        self.token = 0

    def __call__(self, x: mx.array) -> mx.array:
        return self._outputs[0][:, self.token : self.token + 1]


class _Same(nn.Module):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        return x


def _of_token(value: Any, shape: PassShape | RowShape, token: int) -> Any:
    """What a module gets for one token of each row."""
    if not isinstance(value, mx.array) or value.ndim == 0 or value.shape[0] != shape.width:
        return value
    rows = value[: shape.live * shape.length].reshape(shape.live, shape.length, *value.shape[2:])
    return rows[:, token] if value.ndim == 1 else rows[:, token : token + 1]


def _flat(shape: PassShape | RowShape, found: list[Any]) -> Any:
    if not isinstance(found[0], mx.array):
        return found[-1]
    return shape.flat_rows(mx.concatenate(found, axis=1))


def _ends(module: Any, kind: Any, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[_Ends, Any]:
    """Which layers run once for all tokens, seen by watching a call; and what the call gives."""
    linears = {name: layer for name, layer in module.items() if isinstance(layer, nn.Module) and _is_linear(layer)}
    x = arguments[0] if arguments else next(iter(named.values()))
    calls, out = watched_calls(module, linears, lambda: kind.__call__(module, *arguments, **named))
    counts = {name: sum(call.name == name for call in calls) for name in linears}
    firsts = tuple(call.name for call in calls if call.x is x and counts[call.name] == 1)
    last = next((call.name for call in calls if call.out is out and counts[call.name] == 1), None)
    return _Ends(firsts, None if last in firsts else last), out


def _is_linear(layer: Any) -> bool:
    return weight_of(part_of(layer) or layer) is not None
