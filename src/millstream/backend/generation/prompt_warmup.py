"""Warm-up of passes over whole prompts: each shape is traced once, at load and not beside the first streams."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.caches.widths import MAX_PADDED_CHUNK, flat_length, padded_chunk_length, padded_group
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.prefill.groups import RightPaddedGroup
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill

SECONDS, GROUP_SECONDS = 1.5, 4.0
"""How long flat passes are warmed up, and padded groups, whose shapes have two sizes."""
LENGTHS, GROUP_TOKENS = (128, 64, 256), 8192
"""Of prompts in padded groups: most chats begin so. Of a group, at most."""
MARGIN = 2
"""A pass may take so many times the memory that the last one foretells."""


class WarmRoom:
    """Which passes fit in the memory that is left, going by what the ones before took. MLX frees what a pass computed
    when its graph has run: a pass of an 8B model over 4,096 tokens takes 13 GB beside the weights."""

    def __init__(self, available_bytes: Callable[[], int]) -> None:
        self._available_bytes = available_bytes
        self._tokens = 0
        self._bytes = 0

    def fits(self, tokens: int) -> bool:
        """True of the first one: requests are served in passes as short."""
        return not self._tokens or MARGIN * self._bytes * tokens <= self._available_bytes() * self._tokens

    @contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """A pass over so many tokens. The longest one counts."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        yield
        if tokens >= self._tokens:
            self._tokens, self._bytes = tokens, max(0, mx.get_peak_memory() - before)


def warm_up_prompts(assembly: Assembly, layout: Layout, most: int, rows: int, room: WarmRoom) -> None:
    """Run passes over whole prompts in their shapes: flat ones of up to `most` tokens, or padded groups of up to `rows`
    prompts. For large models only the first ones, since what a pass of a new shape costs more is little beside the pass
    itself."""
    if assembly.flat_passes(layout) is not None:
        _warm_up_flat(assembly, layout, most, rows, room)
    elif layout.caches == "mixed" and layout.padded_chunks and layout.group_fill is not None:
        _warm_up_groups(assembly, layout, most, rows, room)


def _warm_up_flat(assembly: Assembly, layout: Layout, most: int, rows: int, room: WarmRoom) -> None:
    """Rows also join: a launch that writes them is traced for each shape of their arrays."""
    batch, prefiller = assembly.make(layout, PrefixStore())
    started, length = time.monotonic(), 0
    while (length := flat_length(length + 1)) <= most and time.monotonic() - started < SECONDS:
        count = min(rows, max(1, length // LENGTHS[0]))
        if length // count > MAX_PADDED_CHUNK or not room.fits(length):
            return
        prompts = _prompts(count, length // count)
        with room.measured(length):
            mx.eval(prefiller.prefill([Prefill(prompt, 0, len(prompt.prompt) - 1) for prompt in prompts]))
        batch.join(*prefiller.take(range(count)))
        mx.eval(batch.forward())
        batch.drop(set(range(count)))


def _warm_up_groups(assembly: Assembly, layout: Layout, most: int, rows: int, room: WarmRoom) -> None:
    """Rows also join: a launch that writes them is traced for each shape of their arrays."""
    batch, _ = assembly.make(layout, PrefixStore())
    started = time.monotonic()
    sizes = sorted({padded_group(count) for count in range(2, rows + 1)})
    for length, count in itertools.product(LENGTHS, sizes):
        if time.monotonic() - started >= GROUP_SECONDS:
            return
        if length > most or length * count > GROUP_TOKENS or not room.fits(length * count):
            continue
        with room.measured(length * count):
            group = RightPaddedGroup(assembly.model, _prompts(count, length), padded_chunk_length, padded_group)
            mx.eval(group.arrays)
        members, joining = group.take(set(range(count)))
        batch.join(members, [joining])
        batch.drop(set(range(count)))


def _prompts(count: int, length: int) -> list[Generate]:
    return [Generate(number, (0,) * (length + 1), 1) for number in range(count)]
