"""Reads prompts in padded passes over several of them, from any offset, into arenas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend.generation.arena.caches import Joining
from millstream.backend.generation.arena.rows import Rows
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.mtp.passes import PromptWatch
from millstream.backend.generation.prefill.grouping import can_share, length_of
from millstream.backend.generation.prefill.prefiller import Passes, Shared, SinglePrefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import ChunkLogprobs, Prefill
from millstream.engine.prefix_cache.orders import SavePrefix

ALIKE_TOKENS, ALIKE = 1024, 0.5
"""Prompts of which one ends beyond so many tokens share an arena only if the shortest ends after this part of them."""


class _Group:
    """Prompts whose rows are in the same arenas."""

    def __init__(self, rows: Rows, members: Sequence[Generate]) -> None:
        self.rows = rows
        self.members: list[Generate | None] = list(members)
        """None: one that has gone."""

    def places(self, ids: set[int]) -> list[int]:
        return [row for row, each in enumerate(self.members) if each is not None and each.request_id in ids]

    @property
    def alive(self) -> list[int]:
        return [row for row, each in enumerate(self.members) if each is not None]

    def remove(self, places: Sequence[int]) -> None:
        for place in places:
            self.members[place] = None


class ArenaPrefiller:
    """Owner only. See `Prefiller`. A prompt with media, or whose log-probabilities are wanted, is read alone."""

    def __init__(
        self,
        model: Any,
        new_rows: Callable[[], Rows],
        single: SinglePrefiller,
        prefix_store: PrefixStore,
        *,
        pads: bool,
        fill: float,
        usual_length: Callable[[int], int] = int,
        watch: PromptWatch | None = None,
    ) -> None:
        """`single`: for prompts that are read alone. `pads`: the model's states take padding. `fill`: how much of a
        pass is tokens, at least. `usual_length`: of a pass over so many columns, where padding costs
        little and new shapes much. `watch`: reads hidden states of prompts."""
        self._model = model
        self._new_rows = new_rows
        self._single = single
        self._store = prefix_store
        self._pads = pads
        self._fill = fill
        self._usual_length = usual_length
        self._watch = watch
        self._groups: list[_Group] = []
        self._alone: set[int] = set()
        """Prompts that are read alone."""
        self.passes = 0
        """How many were run over prompts that may share them."""

    def prefill(self, chunks: Sequence[Prefill]) -> Passes:
        return [each for wave in _waves(chunks) for each in self._prefill(wave)]

    def _prefill(self, chunks: Sequence[Prefill]) -> Passes:
        self._alone |= {chunk.request.request_id for chunk in chunks if not can_share(chunk)}
        passes = self._single.prefill([chunk for chunk in chunks if chunk.request.request_id in self._alone])
        ours = [chunk for chunk in chunks if chunk.request.request_id not in self._alone]
        for same in _by_fill([chunk for chunk in ours if length_of(chunk)], self._fill):
            for alike in _alike(same):
                passes += self._read(alike)
        for chunk in ours:
            if not length_of(chunk) and self._find(chunk.request.request_id) is None:
                self._gather([chunk])
            if chunk.save is not None:
                passes.append(self.save(chunk.save) or [])
        return passes

    def _read(self, chunks: Sequence[Prefill]) -> Passes:
        """Read these chunks together: in one pass, or if the model takes no padding in as many as they have lengths."""
        found: Passes = []
        left = {chunk.request.request_id: chunk for chunk in chunks}
        done = 0
        while left:
            group = self._gather(list(left.values()))
            ordered = [left[each.request_id] for each in group.members if each is not None]
            lengths = [length_of(chunk) - done for chunk in ordered]
            count = self._usual_length(max(lengths)) if self._pads else min(lengths)
            found.append(self._run(group.rows, ordered, done, count))
            done += count
            left = {request_id: chunk for request_id, chunk in left.items() if length_of(chunk) > done}
        return found

    def _run(self, rows: Rows, chunks: Sequence[Prefill], done: int, count: int) -> list[mx.array]:
        """One pass over so many columns of these chunks, after `done` tokens of each."""
        table = np.zeros((len(chunks), count), dtype=np.int32)
        lengths = [min(count, length_of(chunk) - done) for chunk in chunks]
        for tokens, chunk, length in zip(table, chunks, lengths, strict=True):
            first = chunk.start + done
            tokens[:length] = chunk.request.prompt[first : first + length]
        rows.run(self._model, mx.array(table), lengths, max(map(_rest, chunks)))
        self.passes += 1
        arrays = rows.arrays
        if self._watch is not None and (hidden := self._watch.take()) is not None:
            for row, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
                first = chunk.start + done
                arrays += self._watch.read(chunk.request, first, first + length, hidden[row : row + 1, :length])
        return arrays

    def _gather(self, chunks: Sequence[Prefill]) -> _Group:
        """A group of just these prompts: one that is there, or a new one that takes them from others."""
        ids = {chunk.request.request_id for chunk in chunks}
        rows, members = self._new_rows(), []
        for group in list(self._groups):
            places = group.places(ids)
            if len(places) == len(ids) and group.alive == places:
                if len(places) < len(group.members):
                    group.rows.take(places)
                    group.members = [group.members[place] for place in places]
                return group
            if places:
                rows.join(group.rows, places, max(map(_rest, chunks)))
                members += [member for member in (group.members[place] for place in places) if member is not None]
                group.remove(places)
        known = {member.request_id for member in members}
        for chunk in chunks:
            if chunk.request.request_id not in known:
                self._add(rows, chunk)
                members.append(chunk.request)
        self._discard_empty()
        self._groups.append(_Group(rows, members))
        return self._groups[-1]

    def _add(self, rows: Rows, chunk: Prefill) -> None:
        """A prompt that begins, after what the prefix cache has of it."""
        caches = None
        if chunk.start:
            caches = new_row_caches(self._model)
            self._store.fill_caches(chunk.reuse, chunk.reuse_checkpoint, caches)
        rows.add(caches, chunk.start, len(chunk.request.prompt) - chunk.start)

    def _find(self, request_id: int) -> tuple[_Group, int] | None:
        for group in self._groups:
            for place in group.places({request_id}):
                return group, place
        return None

    def save(self, order: SavePrefix) -> list[mx.array] | None:
        found = self._find(order.request_id)
        if found is None:
            return self._single.save(order)
        group, place = found
        if order.checkpoint is not None and order.tokens != group.rows.tokens[place]:
            return None
        return group.rows.save(place, order, self._store)

    def take_logprobs(self) -> list[ChunkLogprobs]:
        return self._single.take_logprobs()

    def take(self, ids: Iterable[int], shared: Shared | None = None) -> tuple[list[Generate], list[Joining]]:
        wanted = set(ids)
        submits, alone = self._single.take(wanted)
        joining = []
        for submit, caches in zip(submits, alone, strict=True):
            rows = self._new_rows()
            rows.add(caches, len(submit.prompt) - 1)
            joining.append(Joining(rows, [0]))
        for group in self._groups:
            if places := group.places(wanted):
                submits += [member for member in (group.members[place] for place in places) if member is not None]
                joining.append(Joining(group.rows, places))
                group.remove(places)
        self._discard_empty()
        self._alone -= wanted
        return submits, joining

    def drop(self, ids: Iterable[int]) -> None:
        dropped = set(ids)
        self._single.drop(dropped)
        self._alone -= dropped
        for group in self._groups:
            group.remove(group.places(dropped))
        self._discard_empty()

    def clear(self) -> None:
        self._single.clear()
        self._groups.clear()
        self._alone.clear()

    @property
    def nbytes(self) -> int:
        return self._single.nbytes + sum(group.rows.nbytes for group in self._groups)

    def _discard_empty(self) -> None:
        self._groups = [group for group in self._groups if group.alive]


def _waves(chunks: Sequence[Prefill]) -> list[list[Prefill]]:
    """Which chunks may run together: none follows another one of its prompt, or reads from the prefix cache what
    another one saves there."""
    waves: list[list[Prefill]] = []
    after: dict[object, int] = {}
    """The first wave that may follow a prompt's last chunk, and what was saved under a handle."""
    for chunk in chunks:
        prompt = ("prompt", chunk.request.request_id)
        number = max(after.get(each, 0) for each in (prompt, *chunk.reuse, chunk.reuse_checkpoint))
        if number == len(waves):
            waves.append([])
        waves[number].append(chunk)
        for each in (prompt, *chunk.saved_handles):
            after[each] = number + 1
    return waves


def _by_fill(chunks: Sequence[Prefill], fill: float) -> list[list[Prefill]]:
    """By pass, longest first: so many that at least this share of the pass is tokens."""
    found: list[list[Prefill]] = []
    tokens = 0
    for chunk in sorted(chunks, key=length_of, reverse=True):
        tokens += length_of(chunk)
        if found and tokens >= fill * (len(found[-1]) + 1) * length_of(found[-1][0]):
            found[-1].append(chunk)
        else:
            found.append([chunk])
            tokens = length_of(chunk)
    return found


def _rest(chunk: Prefill) -> int:
    """How many tokens of its prompt follow a chunk."""
    return len(chunk.request.prompt) - 1 - chunk.end


def _alike(chunks: Sequence[Prefill]) -> list[list[Prefill]]:
    """Without long prompts beside short ones: their arenas are rectangles."""
    found: list[list[Prefill]] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.end, reverse=True):
        longest = found[-1][0].end if found else 0
        if found and (longest <= ALIKE_TOKENS or chunk.end >= ALIKE * longest):
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found
