"""Requests for encoder engines, and vectors that can be told from each other, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millstream.engine.jobs.messages import Encode
from millstream.engine.jobs.plan import BatchPlan, BatchResult
from millstream.model_facts import EncoderFacts


def tokens_of(length: int, token: int = 1) -> bytes:
    return np.full(length, token, np.int32).tobytes()


def encode(request_id: int, lengths: Sequence[int], *, token: int = 1, first_parts: Sequence[int] = ()) -> Encode:
    """A request for inputs of these lengths."""
    return Encode(request_id, tuple(tokens_of(length, token) for length in lengths), tuple(first_parts))


def facts(batch_tokens: int = 64, free_tokens: int = 0) -> EncoderFacts:
    return EncoderFacts(
        context_length=512,
        width=2,
        weight_bytes=64,
        dtype="float32",
        device="cpu (none)",
        batch_tokens=batch_tokens,
        free_tokens=free_tokens,
    )


def computed(plan: BatchPlan) -> BatchResult:
    """Vectors that say whose they are: the request's number and the input's."""
    rows = [(each.request_id, each.index) for each in plan.inputs]
    return BatchResult(np.array(rows, np.float32).tobytes(), 2)
