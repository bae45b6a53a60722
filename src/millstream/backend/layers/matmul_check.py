"""Compares at load what the kernels give with MLX's own numbers: every form of call that a model makes, at every number
of rows that its steps may have, and in passes that stand for a step.

A form is the role and the size of a weight and all that stands before and after the product: norms, biases, RoPE, a
gate, a residual. One layer of each form is compared, with its own weights. What differs is not used: MLX computes it,
and the log says so. Speed is another question (`matmul_choice`), asked before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import matmul_tuning
from millstream.backend.kernels.compiled import rehearse
from millstream.backend.kernels.matmul_tilings import MOST_ROWS, WIDTHS
from millstream.backend.kernels.weights import Dense, Norm, Packed, Weight
from millstream.backend.layers import matmul_reference, packed_products
from millstream.backend.layers.fused_matmul import BY_CUBLAS, BY_KERNELS, Call, calls_of

log = logging.getLogger(__name__)

TOLERANCE = 0.02
"""How far numbers may be apart on the whole, relative to what is usual for their column: bfloat16 rounds to a 256th."""
WORST = 0.12
"""How far a single number may be, relative to that and to itself: the product of two numbers that are rounded, five
times as far from the mean as usual."""
ENDS = ("glu", "qkv_rope")
"""Roles whose calls end with a kernel of their own where MLX multiplies."""
FARTHEST = 3000
"""Position of a row, at most."""

_compared: set[Hashable] = set()
"""Forms of calls, and the numbers of rows that they were compared for."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a call is made."""

    rows: int
    step: int | None = None
    """Rows of the plain step that a pass stands for; None in a step."""
    ends: bool = False
    """The product is MLX's, and what stands after it ours: many rows, or a chunk of a prompt."""

    def __str__(self) -> str:
        if self.ends:
            return f"{self.rows} rows after MLX's product"
        return f"{self.rows} rows" + ("" if self.step is None else f" for a step of {self.step}")


def check_calls(run: Callable[[], object]) -> list[Call]:
    """Compare the calls that `run` makes for one row, uncompiled, but for forms that were compared before. Returns all
    of them."""
    calls = calls_of(run)
    new = {_form(call): call for call in calls}
    comparisons = [Comparison(call) for form, call in new.items() if form not in _compared]
    rehearse(lambda: [each.made(way) for each in comparisons for way in each.ways])
    started = time.perf_counter()
    for each in comparisons:
        each.settle()
    if comparisons:
        count, seconds = sum(len(each.ways) for each in comparisons), time.perf_counter() - started
        log.debug("compared %d forms of calls in %d ways in %.2f s", len(comparisons), count, seconds)
    _compared.update(new)
    return calls


class Comparison:
    """Of a call with what MLX gives."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.ways = ways_of(call)
        most = max(way.rows for way in self.ways)
        self._x = _random(1, most, call.inputs).astype(call.dtype)
        self._args = self._row_arguments(most)

    def settle(self) -> None:
        """Have MLX compute what differs from its numbers."""
        expected = [_columns(each) for each in _listed(self._by_mlx(self._args))]
        usual = [_usual(each) for each in expected]
        mx.eval(expected, usual)
        for way in self.ways:
            while (apart := self._distance(way, expected, usual)) is not None:
                instead = _fall_back(self._call, way)
                log.warning("our kernel for %s, %s, %s: %s", _words(self._call), way, apart, instead or "it stays")
                if instead is None or way.step is not None:
                    break

    def made(self, way: Way) -> list[mx.array]:
        """What a call gives in this way."""
        x, args = self._x[: way.rows], self._of_rows(self._args, way.rows)
        function = getattr(BY_CUBLAS if way.ends else BY_KERNELS, self._call.name)
        weight = [] if self._call.weight is None else [self._call.weight]
        step = contextlib.nullcontext() if way.step is None else matmul_tuning.as_step_of(way.step)
        with step:
            return _listed(function(x, *weight, *args, **self._call.named))

    def _distance(self, way: Way, expected: list[mx.array], usual: list[mx.array]) -> str | None:
        """Why the numbers do not agree; None if they do."""
        try:
            got = [_columns(each) for each in self.made(way)]
            pairs = zip(got, expected, usual, strict=True)
            found = [_apart(one, other[: way.rows], scale) for one, other, scale in pairs]
            mx.eval(found)
        except (RuntimeError, ValueError) as error:  # it cannot be compiled or launched
            return f"fails ({error})"
        overall, worst = (max(_number(pair[part]) for pair in found) for part in (0, 1))
        log.debug("%s, %s: apart by %.2g, at worst %.2g", _words(self._call), way, overall, worst)
        if overall <= TOLERANCE and worst <= WORST:
            return None
        return f"differs by {overall:.2g}, at worst {worst:.2g}"

    def _row_arguments(self, rows: int) -> tuple[Any, ...]:
        """The arguments of the call for so many rows."""
        call = self._call
        if call.name == "qkv_rope":
            offset = mx.random.randint(0, FARTHEST, (rows,), key=mx.random.key(2)).astype(call.args[0].dtype)
            return (offset, *call.args[1:])
        if call.name == "norm_add":
            return (call.args[0], _random(3, rows, call.inputs).astype(call.dtype))
        if call.name != "matmul_add":
            return ()
        assert call.weight is not None, "a product has a weight"
        # As large as what is added to it: rounding of a large one would hide the product, and a small one nothing.
        residual = _random(3, rows, call.weight.outputs)
        product = self._by_mlx((mx.zeros(residual.shape, dtype=call.dtype),)).astype(mx.float32)
        return ((residual * mx.sqrt(mx.square(product).mean())).astype(call.dtype),)

    def _of_rows(self, args: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
        call = self._call
        if call.name == "norm_add":
            return (args[0], args[1][:rows])
        return (args[0][:rows], *args[1:]) if args else ()

    def _by_mlx(self, args: tuple[Any, ...]) -> Any:
        call = self._call
        weight = [] if call.weight is None else [plain(call.weight, call.dtype)]
        return getattr(matmul_reference, call.name)(self._x, *weight, *args, **call.named)


def plain(weight: Weight, dtype: mx.Dtype) -> Dense:
    """A weight as MLX alone unpacks it."""
    return Dense(weight.weight if isinstance(weight, Dense) else packed_products.unpacked_by_mlx(weight, dtype))


def ways_of(call: Call) -> list[Way]:
    """How a model may make a call. Passes of a dense weight are bands of the kernel for the most rows, whatever they
    stand for; those of a packed weight take other kernels for few rows."""
    ways = [Way(rows) for rows in matmul_tuning.step_rows()]
    if call.weight is None:
        return ways
    passes = (*WIDTHS[1:], MOST_ROWS) if isinstance(call.weight, Packed) else (MOST_ROWS,)
    ways += [Way(rows, step) for step in WIDTHS for rows in passes if rows > step]
    # The product of a packed weight is ours also there: it is unpacked first.
    return [*ways, Way(MOST_ROWS, ends=True)] if call.name in ENDS or isinstance(call.weight, Packed) else ways


def _fall_back(call: Call, way: Way) -> str | None:
    """Take something else for this way, and say what; None if there is nothing."""
    weight, name = call.weight, call.name
    if way.ends or weight is None or name == "norm_add":
        return _without_end(name) or _unpacked(weight)
    if way.step is not None:
        tokens = max(width for width in WIDTHS if width < way.rows)
        matmul_tuning.limit_passes(way.step, tokens)
        return f"passes have {tokens} tokens at most"
    size, width = matmul_tuning.size_of(weight), matmul_tuning.step_width(way.rows)
    if isinstance(weight, Packed) and matmul_tuning.in_groups(weight, way.rows):
        matmul_tuning.decide_groups(size, width, False)
        return "bands are used instead of groups"
    if not matmul_tuning.refused(name, weight, way.rows):
        matmul_tuning.refuse(name, weight, way.rows)
        return "MLX's operations are used"
    return (_without_end(name) if way.rows > WIDTHS[-1] else None) or _unpacked(weight)


def _without_end(name: str) -> str | None:
    if name not in (*ENDS, "norm_add") or not matmul_tuning.takes_end(name):
        return None
    matmul_tuning.refuse_end(name)
    return "MLX computes what stands after products"


def _unpacked(weight: Weight | None) -> str | None:
    if not isinstance(weight, Packed) or packed_products.is_refused(weight):
        return None
    packed_products.refuse(weight)
    return "MLX multiplies with the packed weight"


def _form(call: Call) -> Hashable:
    weight = call.weight
    size = None if weight is None else (matmul_tuning.size_of(weight), weight.tickets is not None)
    others = (*call.args, *sorted(call.named.items()))
    return (call.name, size, call.dtype, matmul_tuning.step_rows(), *(_static(each) for each in others))


def _static(value: Any) -> Hashable:
    """What of an argument makes a kernel another one."""
    if isinstance(value, Norm):
        return (value.weight.shape, value.weight.dtype, value.eps)
    if isinstance(value, mx.array):
        return (value.shape, value.dtype)
    return tuple(_static(each) for each in value) if isinstance(value, tuple) else value


def _words(call: Call) -> str:
    if call.weight is None:
        return "the sum of a residual and a norm"
    packed = f", {call.weight.form}" if isinstance(call.weight, Packed) else ""
    return f"{call.name} of {call.weight.outputs}x{call.weight.inputs}{packed}"


def _listed(made: Any) -> list[mx.array]:
    return list(made) if isinstance(made, tuple) else [made]


def _random(seed: int, rows: int, size: int) -> mx.array:
    """One token per row."""
    numbers: mx.array = mx.random.normal((rows, 1, size), key=mx.random.key(seed))
    return numbers


def _columns(made: mx.array) -> mx.array:
    return made.astype(mx.float32).reshape(made.shape[0], -1)


def _usual(expected: mx.array) -> mx.array:
    """How large the numbers of a column are, by all rows; at least as large as those of columns on average: what is
    small by chance, or by its bias, has the rounding of others."""
    sizes = mx.sqrt(mx.square(expected).mean(axis=0))
    return mx.maximum(sizes, sizes.mean())


def _apart(got: mx.array, expected: mx.array, usual: mx.array) -> tuple[mx.array, mx.array]:
    """On the whole, and at worst."""
    # Both may be infinite.
    apart = mx.where(got == expected, 0.0, mx.abs(got - expected))
    return mx.sqrt(mx.square(apart / usual).mean()), (apart / (usual + mx.abs(expected))).max()


def _number(value: mx.array) -> float:
    """Not a number is no agreement."""
    number = float(value.item())  # type: ignore[arg-type]
    return math.inf if math.isnan(number) else number
