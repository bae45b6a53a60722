"""Computes how much memory a model reserves before it is loaded."""

from __future__ import annotations

import math

from millstream.engine.generation.kv_budget import tokens_for_row
from millstream.model_facts import LEAST_TOKENS
from millstream.models.estimate import Estimate

DEFAULT_TOKENS = 16_384
"""KV cache tokens, over all rows, that a model reserves by default."""

MAX_DEFAULT_CONTEXT = 32_768
"""The longest context that one row gets memory for by default."""


def footprint(estimate: Estimate, *, rows: int, kv_memory: int | None) -> tuple[int, int]:
    """Returns the minimum memory that a model needs, and what it reserves if enough is free, both in bytes."""
    context = estimate.context_length or DEFAULT_TOKENS
    minimum = estimate.weight_bytes + estimate.kv_bytes_per_token * _row_tokens(min(context, LEAST_TOKENS))
    # The whole context should fit at least one row.
    kv_tokens = max(min(rows * context, DEFAULT_TOKENS), _row_tokens(min(context, MAX_DEFAULT_CONTEXT)))
    kv_bytes = estimate.kv_bytes_per_token * kv_tokens if kv_memory is None else kv_memory
    return minimum, max(minimum, estimate.weight_bytes + kv_bytes)


def _row_tokens(tokens: int) -> int:
    """The tokens' worth of memory in which one row may become so long, whatever layout the backend will choose: of a
    rectangle on a GPU, rows get three eighths (`GenerationFacts.tokens_in`). The prefix cache may take a quarter."""
    needed = max(tokens_for_row(tokens, "classes"), tokens_for_row(tokens, "rectangle") * 8 / 3)
    return math.ceil(needed * 4 / 3) + 1
