"""How much memory a model asks for, before it is loaded."""

from __future__ import annotations

from millstream.model_facts import LEAST_TOKENS
from millstream.models.estimate import Estimate

USUAL_TOKENS = 16_384
"""Tokens that a model gets memory for, all rows together, under a budget that does not say otherwise."""

LONG_TOKENS = 32_768
"""The longest context that gets memory unasked."""


def footprint(estimate: Estimate, *, rows: int, kv_memory: int | None) -> tuple[int, int]:
    """The least memory that a model can be served with, and what it gets if there is enough."""
    context = estimate.context_length or USUAL_TOKENS
    least = estimate.weight_bytes + estimate.kv_bytes_per_token * min(context, 2 * LEAST_TOKENS)
    # All of the context should fit one row at least; of the memory, rows get between a good third and three quarters.
    usual = estimate.kv_bytes_per_token * max(min(rows * context, USUAL_TOKENS), min(context, LONG_TOKENS) * 8 // 3)
    return least, max(least, estimate.weight_bytes + (usual if kv_memory is None else kv_memory))
