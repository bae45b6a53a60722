"""Prefills prompts into caches of their own, one by one or in padded groups, before their rows join the batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import RowCaches, cache_arrays
from millstream.backend.generation.caches.joining import JoiningRows, MixedRows, joining_row, mixed_rows
from millstream.backend.generation.caches.prompt_caches import (
    begin_right_padding,
    end_right_padding,
    preallocate,
    reset_growth,
)
from millstream.backend.generation.caches.quantized import KvQuantization, new_prompt_caches
from millstream.backend.generation.caches.slabs import SharedTokens
from millstream.backend.generation.caches.widths import MAX_PADDED_CHUNK, padded_chunk_length, padded_group
from millstream.backend.generation.mtp.passes import PromptWatch
from millstream.backend.generation.prefill.continuing import ContinuingPrompts
from millstream.backend.generation.prefill.deferred import Pass
from millstream.backend.generation.prefill.flat import FlatPasses
from millstream.backend.generation.prefill.grouping import can_share, group_by_length, length_of
from millstream.backend.generation.prefill.groups import (
    FlatGroup,
    FlatMixedGroup,
    Group,
    LeftPaddedGroup,
    RightPaddedGroup,
)
from millstream.backend.generation.prefill.logprobs import prefill_with_logprobs, wants_logprobs
from millstream.backend.generation.prefill.pass_in_parts import LayersInParts, PassInParts
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import leaf_caches
from millstream.backend.generation.spec_prefill.folding import read_spans
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import ChunkLogprobs, Prefill
from millstream.engine.prefix_cache.orders import SavePrefix

PrefillMedia = Callable[[Generate, int, int, RowCaches], None]
"""Prefills `prompt[start:end]` of a request with media into its caches."""


Shared = Mapping[int, tuple[SharedTokens, ...]]
"""By request, the tokens of a row that stay in the prefix cache."""

Passes = list[Pass]
"""Forward passes: their arrays, each in layer order, or what builds them."""


class Prefiller(Protocol):
    """Owner only. Prefills chunks, and hands over complete rows in the form that the batch's caches take."""

    def prefill(self, chunks: Sequence[Prefill]) -> Passes:
        """Run the chunks. Evaluate the arrays it returns. Computes no logits, except for prompt log-probabilities."""
        ...

    def save(self, order: SavePrefix) -> list[mx.array] | None:
        """Save blocks of a prompt that is here. Evaluate the arrays it returns; None if the prompt is not here."""
        ...

    def take_logprobs(self) -> list[ChunkLogprobs]:
        """Returns the prompt log-probabilities of chunks since the last call, for requests that asked for them."""
        ...

    def take(self, ids: Iterable[int], shared: Shared | None = None) -> tuple[list[Generate], list[Any]]:
        """Remove rows whose prefill is complete. Returns their requests, and in the same order what the batch's caches
        take. `shared`: the tokens that rows go on to read in the prefix cache."""
        ...

    def drop(self, ids: Iterable[int]) -> None: ...

    def clear(self) -> None: ...

    @property
    def nbytes(self) -> int: ...


class SinglePrefiller:
    """Prefills each prompt by itself into mlx-lm's caches for one row. Works for every cache class, and other prompts
    never change a result."""

    def __init__(
        self,
        model: Any,
        prefix_store: PrefixStore,
        quantization: KvQuantization | None = None,
        prefill_media: PrefillMedia | None = None,
        pad_chunks: bool = False,
        watch: PromptWatch | None = None,
        layers: LayersInParts | None = None,
    ) -> None:
        """`pad_chunks`: pad chunks at their end to one of a few lengths. `watch`: reads hidden states of prompts.
        `layers`: if passes can be built in parts."""
        self._model = model
        self._watch = watch
        self._layers = layers if watch is None else None
        self._building: dict[int, PassInParts] = {}
        """The last pass of prompts, which may not be built to its end."""
        self._pad_chunks = pad_chunks
        self._quantization = quantization
        self._prefill_media = prefill_media
        self._prefix_store = prefix_store
        self._rows: dict[int, tuple[Generate, RowCaches]] = {}
        self._logprobs: list[ChunkLogprobs] = []

    def prefill(self, chunks: Sequence[Prefill]) -> Passes:
        passes: Passes = []
        for chunk in chunks:
            submit = chunk.request
            if submit.request_id not in self._rows:
                self._rows[submit.request_id] = (submit, self._new_caches(chunk))
            _, caches = self._rows[submit.request_id]
            self._build_rest(submit.request_id)
            if self._layers is not None and _is_plain(chunk):
                passes.append(self._begin(self._layers, chunk, caches))
                continue
            arrays: list[mx.array] = []
            if chunk.end > chunk.start:
                self._run(chunk, caches)
                arrays += cache_arrays(caches)
                if self._watch is not None:
                    arrays += self._watch.read(submit, chunk.start, chunk.end, self._watch.take())
            if chunk.save is not None:
                arrays += self._prefix_store.save_row(chunk.save, caches)
            passes.append(arrays)
        return passes

    def save(self, order: SavePrefix) -> list[mx.array] | None:
        row = self._rows.get(order.request_id)
        self._build_rest(order.request_id)
        return None if row is None else self._prefix_store.save_row(order, row[1])

    def _begin(self, layers: LayersInParts, chunk: Prefill, caches: RowCaches) -> PassInParts:
        tokens, padding = self._padded(chunk, caches)
        begun = layers.begin(tokens, caches, functools.partial(end_right_padding, caches, padding) if padding else None)
        self._building[chunk.request.request_id] = begun
        return begun

    def _build_rest(self, request_id: int) -> None:
        """Of the last pass of a prompt: its caches are wanted."""
        if (begun := self._building.pop(request_id, None)) is not None:
            begun.build_rest()

    def _padded(self, chunk: Prefill, caches: RowCaches) -> tuple[mx.array, int]:
        """The tokens of a chunk, and how many were added at its end. If any, `end_right_padding` is due after the
        pass."""
        tokens = chunk.request.prompt[chunk.start : chunk.end]
        padding = padded_chunk_length(len(tokens)) - len(tokens) if self._pad_chunks else 0
        if padding:
            begin_right_padding(caches, [len(tokens)], len(tokens) + padding)
        return mx.array([[*tokens, *[0] * padding]], dtype=mx.int32), padding

    def _run(self, chunk: Prefill, caches: RowCaches) -> None:
        submit = chunk.request
        if chunk.spans:
            read_spans(self._model, submit.prompt, chunk.spans, caches)
        elif submit.media and self._prefill_media is not None:
            self._prefill_media(submit, chunk.start, chunk.end, caches)
        elif wants_logprobs(chunk):
            self._logprobs.append(prefill_with_logprobs(self._model, caches, chunk))
        else:
            tokens, padding = self._padded(chunk, caches)
            self._model(tokens, cache=caches)
            if padding:
                end_right_padding(caches, padding)

    def take_logprobs(self) -> list[ChunkLogprobs]:
        found, self._logprobs = self._logprobs, []
        return found

    def _new_caches(self, chunk: Prefill) -> RowCaches:
        caches = new_prompt_caches(self._model, self._quantization)
        preallocate(caches, len(chunk.request.prompt) + (MAX_PADDED_CHUNK if self._pad_chunks else 0))
        if chunk.start:
            self._prefix_store.fill_caches(chunk.reuse, chunk.reuse_checkpoint, caches)
        return caches

    def take(self, ids: Iterable[int], shared: Shared | None = None) -> tuple[list[Generate], list[RowCaches]]:
        rows = [self._rows.pop(request_id) for request_id in ids if request_id in self._rows]
        for submit, caches in rows:
            self._build_rest(submit.request_id)
            reset_growth(caches)
        return [submit for submit, _ in rows], [caches for _, caches in rows]

    def drop(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._rows.pop(request_id, None)
            if (begun := self._building.pop(request_id, None)) is not None:
                begun.cancel()
            if self._watch is not None:
                self._watch.forget(request_id)

    def clear(self) -> None:
        self._rows.clear()
        self._building.clear()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, caches in self._rows.values() for array in cache_arrays(caches))


class BatchPrefiller:
    """Whole prompts of similar length share one padded forward pass; others run one by one."""

    def __init__(
        self,
        single: SinglePrefiller,
        prefix_store: PrefixStore,
        min_length_ratio: float | None,
        watch: PromptWatch | None = None,
        flat: FlatPasses | None = None,
        continuing: ContinuingPrompts | None = None,
    ) -> None:
        """`min_length_ratio`: of the shortest prompt in a group to the longest one. None: no groups. `watch`: reads
        hidden states of prompts. `flat`: runs whole prompts of any lengths, in the place of padded groups.
        `continuing`: if prompts that continue a cached prefix may share passes."""
        self._watch = watch
        self._continuing = continuing
        self._prefix_store = prefix_store
        self._min_length_ratio = min_length_ratio if flat is None else 0.0
        self._flat = flat
        self._single = single
        self._groups: list[Group] = []
        self.grouped = 0
        """How many prompts have shared a pass."""

    def _shares(self, group: Sequence[Prefill]) -> bool:
        """Whether these prompts run as a group. A short one alone has no cache to fill then, which is larger than its
        tokens."""
        return len(group) > 1 or (self._flat is not None and length_of(group[0]) <= MAX_PADDED_CHUNK)

    def _new_group(self, submits: Sequence[Generate], *, plain: bool) -> Group:
        """`plain`: whether its pass may be built in parts."""
        raise NotImplementedError

    def _joining(self, submit: Generate, caches: RowCaches, shared: tuple[SharedTokens, ...]) -> Any:
        """A row that was prefilled alone, as the batch's caches take it."""
        raise NotImplementedError

    def prefill(self, chunks: Sequence[Prefill]) -> Passes:
        complete = [chunk for chunk in chunks if not chunk.start and chunk.joins and chunk.end and can_share(chunk)]
        groups: list[list[Prefill]] = []
        if self._min_length_ratio is not None:
            groups = [group for group in group_by_length(complete, self._min_length_ratio) if self._shares(group)]
        if self._continuing is not None:
            groups += self._continuing.groups([chunk for chunk in chunks if chunk.start and can_share(chunk)])
        grouped = {id(chunk) for group in groups for chunk in group}
        passes = self._single.prefill([chunk for chunk in chunks if id(chunk) not in grouped])
        for chunks_of_group in groups:
            group = self._begin_group(chunks_of_group)
            self._groups.append(group)
            self.grouped += len(group.members)
            if group.begun is not None:
                passes.append(group.begun)
                continue
            saved = [group.save(chunk.save, self._prefix_store) for chunk in chunks_of_group if chunk.save is not None]
            arrays = [*group.arrays, *(array for each in saved for array in each or ())]
            if self._watch is not None and (hidden := self._watch.take()) is not None:
                for index, chunk in enumerate(chunks_of_group):
                    states = hidden[index : index + 1, group.columns(index)]
                    arrays += self._watch.read(chunk.request, chunk.start, chunk.end, states)
            passes.append(arrays)
        return passes

    def _begin_group(self, chunks: Sequence[Prefill]) -> Group:
        plain = all(map(_is_plain, chunks))
        if chunks[0].start:
            assert self._continuing is not None
            return self._continuing.begin(chunks, plain=plain)
        return self._new_group([chunk.request for chunk in chunks], plain=plain)

    def save(self, order: SavePrefix) -> list[mx.array] | None:
        for group in self._groups:
            if (arrays := group.save(order, self._prefix_store)) is not None:
                return arrays
        return self._single.save(order)

    def take_logprobs(self) -> list[ChunkLogprobs]:
        return self._single.take_logprobs()

    def take(self, ids: Iterable[int], shared: Shared | None = None) -> tuple[list[Generate], list[Any]]:
        wanted, shared = set(ids), shared or {}
        submits, single = self._single.take(wanted)
        joining = [
            self._joining(submit, caches, shared.get(submit.request_id, ()))
            for submit, caches in zip(submits, single, strict=True)
        ]
        alone = [{request_id} for request_id in sorted(wanted & set(shared))]
        for group, chosen in itertools.product(self._groups, [wanted - set(shared), *alone]):
            members, rows = group.take(chosen)
            if members:
                submits += members
                pieces = shared.get(members[0].request_id, ())
                joining.append(replace(rows, shared=pieces) if pieces else rows)
        self._discard(wanted)
        return submits, joining

    def drop(self, ids: Iterable[int]) -> None:
        dropped = set(ids)
        self._single.drop(dropped)
        self._discard(dropped)

    def clear(self) -> None:
        self._single.clear()
        self._groups.clear()

    @property
    def nbytes(self) -> int:
        return self._single.nbytes + sum(array.nbytes for group in self._groups for array in group.arrays)

    def _discard(self, ids: set[int]) -> None:
        for group in self._groups:
            group.discard(ids)
        self._groups = [group for group in self._groups if group.members]


class PlainPrefiller(BatchPrefiller):
    """For full attention in all layers. `layer_count`: how many there are."""

    def __init__(
        self,
        model: Any,
        layer_count: int,
        *,
        min_length_ratio: float | None,
        prefix_store: PrefixStore,
        quantization: KvQuantization | None = None,
        prefill_media: PrefillMedia | None = None,
        pad_chunks: bool = False,
        watch: PromptWatch | None = None,
        flat: FlatPasses | None = None,
        continuing: ContinuingPrompts | None = None,
        layers: LayersInParts | None = None,
    ) -> None:
        single = SinglePrefiller(model, prefix_store, quantization, prefill_media, pad_chunks, watch, layers)
        super().__init__(single, prefix_store, min_length_ratio, watch, flat, continuing)
        self._model = model
        self._layer_count = layer_count
        self._quantization = quantization

    def _new_group(self, submits: Sequence[Generate], *, plain: bool) -> Group:
        if self._flat is not None:
            return FlatGroup(self._flat, submits)
        return LeftPaddedGroup(self._model, self._layer_count, submits, self._quantization)

    def _joining(self, submit: Generate, caches: RowCaches, shared: tuple[SharedTokens, ...]) -> JoiningRows:
        # Of a prompt that was read in part, the caches hold fewer tokens.
        return joining_row(caches, shared, skipped=len(submit.prompt) - 1 - caches[0].offset)


class MixedPrefiller(BatchPrefiller):
    """For layers of several kinds, whose rows read nothing in the prefix cache."""

    def __init__(
        self,
        model: Any,
        *,
        min_length_ratio: float | None,
        prefix_store: PrefixStore,
        prefill_media: PrefillMedia | None = None,
        pad_chunks: bool = False,
        watch: PromptWatch | None = None,
        flat: FlatPasses | None = None,
        continuing: ContinuingPrompts | None = None,
        layers: LayersInParts | None = None,
    ) -> None:
        single = SinglePrefiller(model, prefix_store, None, prefill_media, pad_chunks, watch, layers)
        super().__init__(single, prefix_store, min_length_ratio, watch, flat, continuing)
        self._model = model
        self._pad_chunks = pad_chunks
        self._layers = layers if watch is None else None

    def _new_group(self, submits: Sequence[Generate], *, plain: bool) -> Group:
        if self._flat is not None:
            return FlatMixedGroup(self._flat, submits)
        layers = self._layers if plain else None
        if self._pad_chunks:
            return RightPaddedGroup(self._model, submits, padded_chunk_length, padded_group, layers)
        return RightPaddedGroup(self._model, submits, int, layers=layers)

    def _joining(self, submit: Generate, caches: RowCaches, shared: tuple[SharedTokens, ...]) -> MixedRows:
        return mixed_rows(leaf_caches(caches))


def _is_plain(chunk: Prefill) -> bool:
    """Whether the chunk may be built in parts. What it saves is in the prefix cache as soon as its step has ended."""
    return chunk.end > chunk.start and chunk.save is None and can_share(chunk)
