"""The forward pass of a batch, from tokens to logits: one token per row, or several in a flat pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.traced_step import TracedStep
from millstream.backend.kernels.matmul_tilings import WIDTHS
from millstream.backend.kernels.matmul_tuning import as_step_of

Forward = Callable[..., mx.array]


class ForwardPass:
    """Owner only. Runs a model on the caches of one batch, between their `begin_step` and `end_step`."""

    def __init__(self, model: Forward, caches: Any) -> None:
        self._model = model
        self._caches = caches

    def __call__(self, tokens: mx.array, cache: Any, **named: mx.array) -> mx.array:
        """The logits of `tokens`, (rows, length): (rows, length, vocabulary)."""
        return forward_pass(self._model, tokens, self._caches, cache, **named)


def forward_pass(model: Forward, tokens: mx.array, caches: Any, layers: Any, **named: mx.array) -> mx.array:
    if tokens.shape[1] == 1 or not isinstance(caches, TracedStep):
        return model(tokens, cache=layers, **named)
    shape, step = caches.shape, caches.size
    with as_step_of(step) if step <= WIDTHS[-1] else nullcontext():
        logits = model(shape.flat(tokens)[:, None], cache=layers, **named)
    return shape.by_row(logits, tokens.shape[0])
