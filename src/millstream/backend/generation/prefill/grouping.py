"""Which prompts share a prefill pass."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.backend.generation.prefill.logprobs import wants_logprobs
from millstream.engine.generation.plan import Prefill


def group_by_length(chunks: Sequence[Prefill], min_length_ratio: float) -> list[list[Prefill]]:
    """Group the chunks, longest first, so that none is shorter than `min_length_ratio` of its group's longest. In a
    group they keep their order."""
    groups: list[list[Prefill]] = []
    for chunk in sorted(chunks, key=length_of, reverse=True):
        if groups and length_of(chunk) >= min_length_ratio * length_of(groups[-1][0]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    place = {id(chunk): index for index, chunk in enumerate(chunks)}
    return [sorted(group, key=lambda chunk: place[id(chunk)]) for group in groups]


def can_share(chunk: Prefill) -> bool:
    """Whether the chunk may share a forward pass with others."""
    return not chunk.request.media and not wants_logprobs(chunk) and not chunk.spans


def length_of(chunk: Prefill) -> int:
    return chunk.end - chunk.start
