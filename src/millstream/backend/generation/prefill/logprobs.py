"""Log-probabilities of a prompt's own tokens, for the requests that ask: the only prompts whose logits are computed."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.engine.generation.plan import ChunkLogprobs, Prefill
from millstream.types import TokenLogprob

PIECE = 128
"""Places whose logits are in memory at a time: a row of them is as long as the vocabulary."""


def scored(chunk: Prefill) -> bool:
    return chunk.request.prompt_logprobs is not None


def score(model: Any, caches: RowCaches, chunk: Prefill) -> ChunkLogprobs:
    """Read a chunk, and see how likely each token was that follows one of it. Waits for the device."""
    prompt, top = chunk.request.prompt, chunk.request.prompt_logprobs or 0
    found: list[TokenLogprob] = []
    for start in range(chunk.start, chunk.end, PIECE):
        end = min(start + PIECE, chunk.end)
        logits = model(mx.array([prompt[start:end]], dtype=mx.int32), cache=caches)[0]
        found += _read(logits, prompt[start + 1 : end + 1], top)
    return ChunkLogprobs(chunk.request.request_id, tuple(found))


def _read(logits: mx.array, tokens: tuple[int, ...], top: int) -> list[TokenLogprob]:
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    picked = mx.take_along_axis(logprobs, mx.array(tokens, dtype=mx.int32)[:, None], axis=-1)
    ranks = mx.sum(logprobs > picked, axis=-1) + 1
    values, places = cast(list[float], picked[:, 0].tolist()), cast(list[int], ranks.tolist())
    best: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if top:
        chosen = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
        names = cast(list[list[int]], chosen.tolist())
        likely = cast(list[list[float]], mx.take_along_axis(logprobs, chosen, axis=-1).tolist())
        pairs = [zip(*both, strict=True) for both in zip(names, likely, strict=True)]
        best = [tuple(sorted(each, key=lambda pair: -pair[1])) for each in pairs]
    return [TokenLogprob(*each) for each in zip(tokens, values, best, places, strict=True)]
