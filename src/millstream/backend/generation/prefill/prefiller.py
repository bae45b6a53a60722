"""Reading prompts into caches, before their rows join the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import RowCaches, states
from millstream.backend.generation.caches.prompt_caches import PaddedCache, Pads, grow_as_usual, make_room
from millstream.backend.generation.caches.quantized import KvPacking, row_of
from millstream.backend.generation.caches.slots import Block, block_of, parts_of
from millstream.backend.generation.caches.widths import PADDED, chunk_length
from millstream.backend.generation.prefill.logprobs import score, scored
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import ChunkLogprobs, Prefill

See = Callable[[Generate, int, int, RowCaches], None]


class Prefiller(Protocol):
    """Owner only. Reads chunks; hands rows over in the form that its batch takes."""

    def read(self, chunks: Sequence[Prefill]) -> list[mx.array]:
        """Run the chunks. What is returned must be evaluated; logits are computed only for `scores`."""
        ...

    def scores(self) -> list[ChunkLogprobs]:
        """Of chunks since the last call, for the requests that want them."""
        ...

    def take(self, ids: Iterable[int]) -> tuple[list[Generate], list[Any]]:
        """Rows whose prompts are read: their requests, and what the batch's caches take, in the same order."""
        ...

    def drop(self, ids: Iterable[int]) -> None: ...

    def clear(self) -> None: ...

    @property
    def nbytes(self) -> int: ...


class SinglePrefiller:
    """Each prompt by itself, into mlx-lm's caches for one row: works for every kind, and company changes nothing."""

    def __init__(
        self,
        model: Any,
        kept: PrefixStore,
        packing: KvPacking | None = None,
        see: See | None = None,
        padded: bool = False,
    ) -> None:
        """`see`: reads chunks of prompts with media. `padded`: read chunks of usual lengths, with padding
        behind them; for caches that can be cut only."""
        self._model = model
        self._padded = padded
        self._packing = packing
        self._see = see
        self._kept = kept
        self._rows: dict[int, tuple[Generate, RowCaches]] = {}
        self._scores: list[ChunkLogprobs] = []

    def read(self, chunks: Sequence[Prefill]) -> list[mx.array]:
        arrays: list[mx.array] = []
        for chunk in chunks:
            submit = chunk.request
            if submit.request_id not in self._rows:
                self._rows[submit.request_id] = (submit, self._begin(chunk))
            _, caches = self._rows[submit.request_id]
            if chunk.end > chunk.start:
                self._run(chunk, caches)
                arrays.extend(states(caches))
            if chunk.save is not None:
                arrays.extend(self._kept.keep_row(chunk.save, caches))
        return arrays

    def _run(self, chunk: Prefill, caches: RowCaches) -> None:
        submit = chunk.request
        if submit.media and self._see is not None:
            self._see(submit, chunk.start, chunk.end, caches)
        elif scored(chunk):
            self._scores.append(score(self._model, caches, chunk))
        else:
            tokens = submit.prompt[chunk.start : chunk.end]
            padding = chunk_length(len(tokens)) - len(tokens) if self._padded else 0
            self._model(mx.array([[*tokens, *[0] * padding]], dtype=mx.int32), cache=caches)
            for cache in caches if padding else ():
                cache.trim(padding)

    def scores(self) -> list[ChunkLogprobs]:
        found, self._scores = self._scores, []
        return found

    def _begin(self, chunk: Prefill) -> RowCaches:
        caches = row_of(self._model, self._packing)
        make_room(caches, len(chunk.request.prompt) + (PADDED if self._padded else 0))
        if chunk.start:
            self._kept.restore(chunk.reuse, chunk.reuse_checkpoint, caches)
        return caches

    def take(self, ids: Iterable[int]) -> tuple[list[Generate], list[RowCaches]]:
        rows = [self._rows.pop(request_id) for request_id in ids if request_id in self._rows]
        for _, caches in rows:
            grow_as_usual(caches)
        return [submit for submit, _ in rows], [caches for _, caches in rows]

    def drop(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._rows.pop(request_id, None)

    def clear(self) -> None:
        self._rows.clear()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, caches in self._rows.values() for array in states(caches))


class BatchPrefiller:
    """For slots. Whole prompts of like length share one left-padded forward pass; others are read one by one."""

    def __init__(
        self,
        model: Any,
        layer_count: int,
        *,
        fill: float | None,
        kept: PrefixStore,
        packing: KvPacking | None = None,
        see: See | None = None,
        padded: bool = False,
    ) -> None:
        """`fill`: how long the shortest prompt of a group must be beside the longest. None: no groups."""
        self._model = model
        self._layer_count = layer_count
        self._fill = fill
        self._single = SinglePrefiller(model, kept, packing, see, padded)
        self._groups: list[_Group] = []

    def read(self, chunks: Sequence[Prefill]) -> list[mx.array]:
        whole = [chunk for chunk in chunks if not chunk.start and chunk.joins and chunk.end and _is_plain(chunk)]
        groups = [] if self._fill is None else [group for group in alike(whole, self._fill) if len(group) > 1]
        grouped = {id(chunk) for group in groups for chunk in group}
        arrays = self._single.read([chunk for chunk in chunks if id(chunk) not in grouped])
        for chunks_of_group in groups:
            group = _Group(self._model, self._layer_count, [chunk.request for chunk in chunks_of_group])
            self._groups.append(group)
            arrays += group.block.arrays
        return arrays

    def scores(self) -> list[ChunkLogprobs]:
        return self._single.scores()

    def take(self, ids: Iterable[int]) -> tuple[list[Generate], list[Block]]:
        wanted = set(ids)
        submits, rows = self._single.take(wanted)
        blocks = [block_of(caches) for caches in rows]
        for group in self._groups:
            members, block = group.take(wanted)
            if members:
                submits += members
                blocks.append(block)
        self._forget(wanted)
        return submits, blocks

    def drop(self, ids: Iterable[int]) -> None:
        gone = set(ids)
        self._single.drop(gone)
        self._forget(gone)

    def clear(self) -> None:
        self._single.clear()
        self._groups.clear()

    @property
    def nbytes(self) -> int:
        return self._single.nbytes + sum(array.nbytes for group in self._groups for array in group.block.arrays)

    def _forget(self, ids: set[int]) -> None:
        for group in self._groups:
            group.forget(ids)
        self._groups = [group for group in self._groups if group.members]


class _Group:
    """Prompts that were read together. Its rows usually join together too; if not, they are picked out."""

    def __init__(self, model: Any, layer_count: int, submits: Sequence[Generate]) -> None:
        lengths = [len(submit.prompt) - 1 for submit in submits]
        longest = max(lengths)
        pads = tuple(longest - length for length in lengths)
        shared = Pads(pads)
        caches = [PaddedCache(pads, shared) for _ in range(layer_count)]
        padded = [[0] * pad + list(submit.prompt[:-1]) for pad, submit in zip(pads, submits, strict=True)]
        model(mx.array(padded, dtype=mx.int32), cache=caches)
        self.block = Block([parts_of(cache) for cache in caches], pads)
        self.members: list[Generate | None] = list(submits)

    def take(self, wanted: set[int]) -> tuple[list[Generate], Block]:
        chosen = [place for place, member in enumerate(self.members) if member and member.request_id in wanted]
        members = [member for member in (self.members[place] for place in chosen) if member is not None]
        if len(chosen) == len(self.members):
            return members, self.block
        rows = mx.array(chosen, dtype=mx.int32)
        pads = tuple(self.block.pads[place] for place in chosen)
        if not chosen:
            return [], Block([], ())
        return members, Block([tuple(part[rows] for part in parts) for parts in self.block.layers], pads)

    def forget(self, ids: set[int]) -> None:
        self.members = [None if member and member.request_id in ids else member for member in self.members]
        if not any(self.members):
            self.members = []


def alike(chunks: Sequence[Prefill], fill: float) -> list[list[Prefill]]:
    """Cut the chunks, longest first, into groups whose members are at least `fill` as long as their longest."""
    groups: list[list[Prefill]] = []
    for chunk in sorted(chunks, key=_length, reverse=True):
        if groups and _length(chunk) >= fill * _length(groups[-1][0]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _is_plain(chunk: Prefill) -> bool:
    """Whether it may share a pass with others."""
    return not chunk.request.media and not scored(chunk)


def _length(chunk: Prefill) -> int:
    return chunk.end - chunk.start
