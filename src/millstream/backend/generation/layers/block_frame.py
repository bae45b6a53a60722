"""How a block joins its parts: where its norms stand, what it adds to its input, and in which order.

A block is watched once, with stand-ins for its mixer (attention, convolution, a recurrent layer) and its MLP: arrays
keep their identity from one module to the next, so the call itself tells which norm reads what. The arithmetic between
the modules cannot be seen: it is guessed, and `block_check` compares the numbers of the guess with the block's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

MASK, CACHE = object(), object()
"""Stand for a mask and a cache: how a block passes them on is seen, and no stand-in uses them."""
RESIDUAL_FACTORS, OUTPUT_FACTORS = ("residual_multiplier", "residual_scale"), ("layer_scalar",)
"""Attributes of a block that say what is multiplied before a residual is added, and at the end."""


class NotUnderstood(Exception):
    """A block is not of the form that can be fused. Says why, as the end of a sentence about the block."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm module of a block. RMS norms have a `weight`, which is what the numbers are multiplied with (Gemma's keep
    that less one); others are called."""

    module: Any
    weight: mx.array | None = None
    eps: float = 0.0

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.module(x)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """h = x + factor * after_mixer(mixer(before_mixer(x))); h + factor * after_mlp(mlp(before_mlp(h))), times `scale`.
    A norm that is not there is None, and so is the MLP of blocks that have none."""

    mixer: str
    mlp: str | None
    before_mixer: Norm | None = None
    after_mixer: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    factor: float = 1.0
    scale: mx.array | None = None
    pass_on: tuple[str, ...] = ()
    """How mask and cache reach the mixer: their names, or empty if by position."""

    @property
    def names(self) -> tuple[str | None, ...]:
        """Its parts, and whether each norm is there."""
        norms = (self.before_mixer, self.after_mixer, self.before_mlp, self.after_mlp)
        return self.mixer, self.mlp, *(None if norm is None else type(norm.module).__name__ for norm in norms)

    def call_mixer(self, module: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
        out: mx.array = module(x, mask=mask, cache=cache) if self.pass_on else module(x, mask, cache)
        return out

    def add(self, x: mx.array, new: mx.array, norm: Norm | None) -> mx.array:
        """What comes after a part: its norm, its factor, the residual."""
        new = new if norm is None else norm(new)
        return x + (new if self.factor == 1.0 else new * self.factor)

    def run(self, x: mx.array, mix: Callable[[mx.array], mx.array], feed: Callable[[mx.array], mx.array]) -> mx.array:
        """The block, with any functions for its parts."""
        h = self.add(x, mix(x if self.before_mixer is None else self.before_mixer(x)), self.after_mixer)
        if self.mlp is not None:
            h = self.add(h, feed(h if self.before_mlp is None else self.before_mlp(h)), self.after_mlp)
        return h if self.scale is None else h * self.scale


@dataclass(slots=True, eq=False)
class WatchedCall:
    name: str
    x: mx.array
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    out: mx.array


class _Watched(nn.Module):  # type: ignore[misc]
    """Stands for a module of a block, and tells of its calls."""

    def __init__(
        self, name: str, tell: Callable[[WatchedCall], None], function: Callable[[mx.array], mx.array]
    ) -> None:
        super().__init__()
        self._name, self._tell, self._function = name, tell, function

    def __call__(self, x: mx.array, *arguments: Any, **named: Any) -> mx.array:
        out = self._function(x)
        self._tell(WatchedCall(self._name, x, arguments, named, out))
        return out


@contextmanager
def replaced(block: Any, stand_ins: dict[str, Any]) -> Iterator[None]:
    """A block with other modules for a while."""
    own = {name: block[name] for name in stand_ins}
    try:
        for name, module in stand_ins.items():
            block[name] = module
        yield
    finally:
        for name, module in own.items():
            block[name] = module


def watched_calls(module: Any, children: dict[str, Any], run: Callable[[], Any]) -> tuple[list[WatchedCall], Any]:
    """The calls of some children while `run` runs, and what it returned."""
    calls: list[WatchedCall] = []
    with replaced(module, {name: _Watched(name, calls.append, child) for name, child in children.items()}):
        return calls, run()


def norm_of(module: Any) -> Norm:
    """A norm module, with the weight of RMS norms if it is one: by its numbers."""
    weight, eps = module.get("weight"), getattr(module, "eps", None)
    if weight is None or eps is None or "bias" in module:
        return Norm(module)
    x = 3 * mx.random.normal((4, weight.shape[0]), key=mx.random.key(7)) + 0.5
    expected = module(x).astype(mx.float32)
    for candidate in (weight, 1 + weight):
        if _near(mx.fast.rms_norm(x, candidate, eps).astype(mx.float32), expected):
            mx.eval(candidate)
            return Norm(module, candidate, eps)
    return Norm(module)


def _near(got: mx.array, expected: mx.array) -> bool:
    return bool((mx.linalg.norm(got - expected) <= 1e-4 * mx.linalg.norm(expected)).item())


def is_norm(module: Any) -> bool:
    """True for a module that has one or two vectors and nothing else."""
    if not isinstance(module, nn.Module) or not module or not set(module) <= {"weight", "bias"}:
        return False
    return all(isinstance(value, mx.array) and value.ndim == 1 for value in module.values())


def hidden_size(block: Any) -> int:
    """The size of a block's input. Raises `NotUnderstood` if its norms do not tell."""
    sizes = {module["weight"].shape[0] for module in block.values() if is_norm(module)}
    if len(sizes) != 1:
        raise NotUnderstood("has no norms that tell its size")
    return int(sizes.pop())


def stand_in(size: int, seed: int) -> Callable[[mx.array], mx.array]:
    """A function in the place of a mixer or an MLP: its output is unlike its input, and different for every element."""
    factors = mx.random.normal((size,), key=mx.random.key(seed))
    return lambda x: mx.roll(x, 1 + size // 3, -1) * factors


def watched_frame(block: Any, rows: int) -> tuple[Frame, mx.array, mx.array]:
    """The frame of a block, an input, and what the block makes of it with stand-ins for its parts: see `frame_guess`.
    In float32, whatever type the block has. Raises `NotUnderstood`."""
    size = hidden_size(block)
    children = {name: module for name, module in block.items() if isinstance(module, nn.Module)}
    norms = {name: module for name, module in children.items() if is_norm(module)}
    parts = [name for name in children if name not in norms]
    if not 1 <= len(parts) <= 2:
        raise NotUnderstood(f"has other parts than a mixer and an MLP ({', '.join(parts)})")
    x = mx.random.normal((rows, 1, size), key=mx.random.key(1))
    calls: list[WatchedCall] = []
    stand_ins: dict[str, Any] = {name: _Watched(name, calls.append, module) for name, module in norms.items()}
    for seed, name in enumerate(parts):
        stand_ins[name] = _Watched(name, calls.append, stand_in(size, 100 + seed))
    with replaced(block, stand_ins):
        out = block(x, MASK, CACHE)
    if not isinstance(out, mx.array):
        raise NotUnderstood("gives more than its output")
    return _frame(block, calls, parts), x, out


def frame_guess(frame: Frame, block: Any, x: mx.array) -> mx.array:
    """What the frame makes of `x` with the stand-ins that `watched_frame` used."""
    parts = [name for name, module in block.items() if isinstance(module, nn.Module) and not is_norm(module)]
    functions = {name: stand_in(x.shape[-1], 100 + seed) for seed, name in enumerate(parts)}
    return frame.run(x, functions[frame.mixer], functions.get(frame.mlp or "", lambda each: each))


def _frame(block: Any, calls: list[WatchedCall], parts: list[str]) -> Frame:
    by_part = {call.name: call for call in calls if call.name in parts}
    order = [call.name for call in calls if call.name in parts]
    if order != list(by_part) or len(order) != len(parts):
        raise NotUnderstood("does not call each of its parts once")
    mixer, mlp = order[0], order[1] if len(order) == 2 else None
    mixing = by_part[mixer]
    if mixing.arguments == (MASK, CACHE) and not mixing.named:
        pass_on: tuple[str, ...] = ()
    elif not mixing.arguments and mixing.named == {"mask": MASK, "cache": CACHE}:
        pass_on = ("mask", "cache")
    else:
        raise NotUnderstood(f"gives {mixer} other things than a mask and a cache")
    if mlp is not None and (by_part[mlp].arguments or by_part[mlp].named):
        raise NotUnderstood(f"gives {mlp} more than its input")

    def before(part: str) -> Norm | None:
        made = next((call for call in calls if call.name not in parts and call.out is by_part[part].x), None)
        return None if made is None else norm_of(block[made.name])

    def after(part: str) -> Norm | None:
        read = next((call for call in calls if call.name not in parts and call.x is by_part[part].out), None)
        return None if read is None else norm_of(block[read.name])

    frame = Frame(mixer, mlp, before(mixer), after(mixer), pass_on=pass_on)
    if mlp is not None:
        frame = dataclasses.replace(frame, before_mlp=before(mlp), after_mlp=after(mlp))
    factor = next((getattr(block, name) for name in RESIDUAL_FACTORS if hasattr(block, name)), 1.0)
    scale = next((block[name] for name in OUTPUT_FACTORS if name in block), None)
    return dataclasses.replace(frame, factor=float(factor), scale=scale)
