"""Log-probabilities of prompt tokens, for requests that ask: the only prompts whose logits are computed."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.engine.generation.plan import ChunkLogprobs, Prefill
from millstream.types import TokenLogprob

TOKENS_PER_PASS = 128
"""Bounds the logits in memory: per token, they are as long as the vocabulary."""


def wants_logprobs(chunk: Prefill) -> bool:
    return chunk.request.prompt_logprobs is not None


def prefill_with_logprobs(model: Any, caches: RowCaches, chunk: Prefill) -> ChunkLogprobs:
    """Prefill a chunk and return the log-probability of the token after each of its tokens. Waits for the device."""
    prompt, top = chunk.request.prompt, chunk.request.prompt_logprobs or 0
    found: list[TokenLogprob] = []
    for start in range(chunk.start, chunk.end, TOKENS_PER_PASS):
        end = min(start + TOKENS_PER_PASS, chunk.end)
        logits = model(mx.array([prompt[start:end]], dtype=mx.int32), cache=caches)[0]
        found += _token_logprobs(logits, prompt[start + 1 : end + 1], top)
    return ChunkLogprobs(chunk.request.request_id, tuple(found))


def _token_logprobs(logits: mx.array, tokens: tuple[int, ...], top: int) -> list[TokenLogprob]:
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, mx.array(tokens, dtype=mx.int32)[:, None], axis=-1)
    rank_array = mx.sum(logprobs > chosen, axis=-1) + 1
    values, ranks = cast(list[float], chosen[:, 0].tolist()), cast(list[int], rank_array.tolist())
    best: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if top:
        best_tokens = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
        ids = cast(list[list[int]], best_tokens.tolist())
        best_values = cast(list[list[float]], mx.take_along_axis(logprobs, best_tokens, axis=-1).tolist())
        pairs = [zip(*both, strict=True) for both in zip(ids, best_values, strict=True)]
        best = [tuple(sorted(each, key=lambda pair: -pair[1])) for each in pairs]
    return [TokenLogprob(*each) for each in zip(tokens, values, best, ranks, strict=True)]
