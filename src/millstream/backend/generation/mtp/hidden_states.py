"""Keeps the hidden states of a model's forward passes: the arrays that the pass has anyway, nothing computed twice."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class HiddenStates:
    """Owner only. What went into or came out of a model's last norm in its last forward pass: (rows, tokens, size).

    In a compiled step these are tracers while it is traced: the function must return them (`take`), and hand in what it
    computed (`put`).
    """

    def __init__(self, norm: Any, *, after_norm: bool) -> None:
        self._last: mx.array | None = None
        kind = type(norm)

        def call(module: Any, x: mx.array) -> mx.array:
            out: mx.array = kind.__call__(module, x)
            self._last = out if after_norm else x
            return out

        self._norm, self._kind = norm, kind
        norm.__class__ = type(kind.__name__, (kind,), {"__call__": call})

    def remove(self) -> None:
        """Keep no hidden states any more."""
        self._norm.__class__ = self._kind
        self._last = None

    def take(self) -> mx.array | None:
        """The hidden states of the pass that was built last; each is given once."""
        last, self._last = self._last, None
        return last

    def put(self, hidden: mx.array | None) -> None:
        self._last = hidden
