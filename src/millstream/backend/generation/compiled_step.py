"""The forward pass of a decode step, from tokens to logits, as one compiled function.

Python builds the graph of a step in 0.3 to 3 ms, for every step again: on a fast device that is longer than the step.
Traced once, the same graph is built by MLX alone. The function's arguments are the tokens and all arrays that the
caches read in a step; weights are part of it, so it lives no longer than its model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.traced_step import TracedStep
from millstream.backend.generation.forward_pass import forward_pass
from millstream.backend.kernels.compiled import compile_ahead, keeps_kernels

Forward = Callable[..., mx.array]


class CompiledStep:
    """Owner only. Functions for every kind of step that came up; batches of one model share them."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self._rehearsed: set[Hashable] = set()
        self._caches: TracedStep | None = None
        """Those of the step that is run: a function reads them while it is traced, and not later."""

    def run(self, tokens: mx.array, caches: Any, named: dict[str, mx.array]) -> mx.array | None:
        """The logits of a step, between `begin_step` and `end_step`; None if this step cannot be compiled. `tokens`:
        (rows,), or (rows, length) for logits of (rows, length, vocabulary). Raises what the model raises."""
        key = caches.step_key() if isinstance(caches, TracedStep) else None
        if key is None:
            return None
        arrays = caches.step_arrays()
        key = (key, tokens.ndim, tuple(named))
        if key not in self._functions:
            self._functions[key] = mx.compile(self._step)
        if keeps_kernels() and (key, tokens.shape) not in self._rehearsed:
            self._rehearse(tokens, caches, arrays, named)
            self._rehearsed.add((key, tokens.shape))
        self._caches = caches
        try:
            logits, results = self._functions[key](tokens, arrays, named)
        except BaseException:
            caches.bind(arrays)
            caches.forget_step()
            raise
        finally:
            self._caches = None
        caches.commit(results)
        out: mx.array = logits
        return out

    def _rehearse(
        self, tokens: mx.array, caches: TracedStep, arrays: list[mx.array], named: dict[str, mx.array]
    ) -> None:
        """Compile the kernels of a step at once: tracing it would compile one after the other."""
        self._caches = caches
        try:
            with compile_ahead():
                self._step(tokens, arrays, named)
        finally:
            self._caches = None
            caches.bind(arrays)
            caches.forget_step()

    def _step(self, tokens: mx.array, arrays: list[mx.array], named: dict[str, mx.array]) -> tuple[mx.array, Any]:
        caches = self._caches
        assert caches is not None, "only `run` calls the functions"
        caches.bind(arrays)
        if tokens.ndim == 1:
            logits = self._forward(tokens[:, None], cache=caches.layers, **named)[:, -1, :]
        else:
            logits = forward_pass(self._forward, tokens, caches, caches.layers, **named)
        return logits, caches.results()
