"""Measures at load which shape of blocks is fastest for a weight on this device.

All shapes cut K alike, so a choice changes no number: it may differ from load to load. Small weights keep the shape
that `matmul_tilings` gives them: a launch takes longer than what could be won.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from millstream.backend.kernels import matmul_tilings
from millstream.backend.kernels.matmul_tilings import WIDTHS, Tiling
from millstream.backend.kernels.weights import Dense

log = logging.getLogger(__name__)

MIN_BYTES = 24 << 20
"""Of a weight that is worth measuring: its reading takes longer than a launch."""
COPIES = 6
"""Weights of one shape in a measurement, if a model has so many: together they are more than a cache holds."""
GAIN = 0.05
"""How much less time than the usual shape another one must take."""

Measure = Callable[[Sequence[mx.array], Tiling, int], float]
_chosen: dict[tuple[int, int, int], Tiling] = {}


def tiling_for(outputs: int, inputs: int, width: int) -> Tiling:
    """The tiling for a weight whose tiles may be shared: the measured one, or the usual one."""
    found = _chosen.get((outputs, inputs, width))
    return found or matmul_tilings.choose(outputs, inputs, width, head=0, shared=True)


def tune(weights: Iterable[mx.array], measure: Measure) -> None:
    """Choose for every shape among these weights. Call it before functions with kernels are compiled."""
    shapes: dict[tuple[int, int], list[mx.array]] = defaultdict(list)
    for weight in weights:
        if weight.nbytes >= MIN_BYTES and len(alike := shapes[weight.shape[0], weight.shape[1]]) < COPIES:
            alike.append(weight)
    for (outputs, inputs), alike in shapes.items():
        for width in WIDTHS:
            if (outputs, inputs, width) not in _chosen:
                _chosen[outputs, inputs, width] = _fastest(alike, outputs, inputs, width, measure)


def _fastest(alike: Sequence[mx.array], outputs: int, inputs: int, width: int, measure: Measure) -> Tiling:
    usual, *others = matmul_tilings.candidates(outputs, inputs, width)
    least = {usual: measure(alike, usual, width) * (1 - GAIN)}
    least |= {tiling: measure(alike, tiling, width) for tiling in others}
    best = min(least, key=lambda tiling: least[tiling])
    log.debug("Blocks of %s for %d rows of %dx%d (%s)", best, width, outputs, inputs, least)
    return best


def seconds(run: Callable[[mx.array, Dense, Tiling, int], mx.array]) -> Measure:
    """Measures by `run`, which multiplies rows and one weight: the shortest of a few chains of launches."""

    @functools.cache
    def chain(tiling: Tiling, width: int) -> Callable[..., list[mx.array]]:
        def launches(x: mx.array, *arrays: mx.array) -> list[mx.array]:
            pairs = zip(arrays[::2], arrays[1::2], strict=True)
            return [run(x, Dense(weight, tickets), tiling, width) for weight, tickets in pairs]

        return mx.compile(launches)  # type: ignore[no-any-return]

    def measure(weights: Sequence[mx.array], tiling: Tiling, width: int) -> float:
        x = mx.zeros((width, 1, weights[0].shape[1]), dtype=weights[0].dtype)
        # Launches that are not in a row may overlap: each has counters of its own.
        counters = matmul_tilings.most_shared(weights[0].shape[0])
        arrays = [array for weight in weights for array in (weight, mx.zeros((counters,), dtype=mx.uint32))]
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            mx.eval(chain(tiling, width)(x, *arrays))
            taken.append(time.perf_counter() - start)
        return min(taken)

    return measure
