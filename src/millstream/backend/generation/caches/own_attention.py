"""Caches of a prompt that have a say in attention: those that it is read into in part, and those that are watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class OwnAttention:
    """The attention functions that replace mlx-lm's (`layers/`) call `attend` of such a cache."""

    def attend(
        self,
        attention: Callable[..., mx.array],
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        **options: Any,
    ) -> mx.array:
        """`attention`: the function that was called, for caches that have no say. `options`: sinks, soft caps."""
        raise NotImplementedError
