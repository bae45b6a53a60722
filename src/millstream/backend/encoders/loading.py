"""Loads an encoder: its body, its head, and all of its weights. Owner only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from millstream.backend.device import Device
from millstream.backend.encoders.families.bert import Bert
from millstream.backend.encoders.families.modernbert import ModernBert
from millstream.backend.encoders.families.nomic import NomicBert
from millstream.backend.encoders.families.operations import FAST_PATH, operations
from millstream.backend.encoders.families.parts import Tensors
from millstream.backend.encoders.heads import Head, classifier_head, embedding_head, yes_no_head
from millstream.backend.weights.failures import LIBRARY_FAILURES
from millstream.backend.weights.materialize import evaluate_all, reachable_arrays
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.models.checks import check_folder
from millstream.models.encoder_config import BERT_FAMILIES, FAMILIES, family_of
from millstream.models.encoder_layout import EncoderLayout
from millstream.models.safetensors_header import folder_tensors, weight_files

if TYPE_CHECKING:
    from millstream.backend.encoders.prefixes import PrefixReader


class Body(Protocol):
    vocab_size: int
    """Rows of the embedding table that was loaded."""

    @property
    def max_tokens(self) -> int | None:
        """The longest input that it has positions for. None: any."""
        ...

    def __call__(self, ids: mx.array, keep: mx.array | None, types: mx.array | None) -> mx.array:
        """Tokens, True where they are not padding (None: nowhere), and 0 or 1 for the parts of pairs, to hidden
        states."""
        ...


@dataclass(frozen=True, slots=True)
class Encoder:
    body: Body
    head: Head
    weights: list[mx.array]
    dtype: str
    prefixes: PrefixReader | None = None
    """For models that can read what inputs have in common once."""

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self.weights)


def load_encoder(
    folder: Path,
    layout: EncoderLayout,
    device: Device,
    *,
    unpack: bool,
    answers: tuple[int, int] | None = None,
    disabled: frozenset[str] = frozenset(),
    report: Progress = ignore_progress,
) -> Encoder:
    """`answers`: the tokens for no and yes of a language model that is a reranker."""
    config = None if folder.is_file() else check_folder(folder)
    try:
        if config is None:
            encoder = _load_gguf(folder, layout, device, unpack=unpack, disabled=disabled)
        else:
            encoder = _load(folder, layout, config, device, unpack=unpack, answers=answers, disabled=disabled)
    except LIBRARY_FAILURES as error:
        raise ModelError(f"{folder}: {error}") from error
    evaluate_all(encoder.weights, report)
    return encoder


def _load(
    folder: Path,
    layout: EncoderLayout,
    config: dict[str, Any],
    device: Device,
    *,
    unpack: bool,
    answers: tuple[int, int] | None,
    disabled: frozenset[str],
) -> Encoder:
    quantization = config.get("quantization")
    stored = _stored(folder)
    dtype = mx.float32 if device.is_cpu else _float_type(stored)
    dense = {each.folder: Tensors(_stored(folder / each.folder), mx.float32, None) for each in layout.dense}
    head: Head | None = embedding_head(layout, dense) if layout.kind == "embedding" else None
    family = family_of(config)
    prefixes: PrefixReader | None = None
    if family in FAMILIES:
        packing = quantization if isinstance(quantization, dict) else None
        tensors = Tensors(stored, dtype, packing, operations(on_cpu=device.is_cpu, disabled=disabled))
        body = _own_family(family)(config, tensors)
        head = head or classifier_head(config, tensors)
        used = tensors.used
    else:
        # mlx-lm takes a second to import, which the families of our own do without.
        from millstream.backend.encoders.decoders import (
            CausalBody,
            Gemma3Body,
            answer_rows,
            load_decoder,
            use_cpu_layers,
        )
        from millstream.backend.encoders.prefixes import PrefixReader

        model = load_decoder(folder, dtype if device.is_cpu and unpack else None, head=answers is not None)
        if device.is_cpu and unpack and FAST_PATH not in disabled:
            use_cpu_layers(model)
        body = Gemma3Body(model, config) if layout.bidirectional else CausalBody(model)
        if isinstance(body, CausalBody) and layout.pooling in ((), ("last",)) and PrefixReader.serves(model):
            prefixes = PrefixReader(model)
        if head is None:
            if answers is None:
                raise ModelError(f"{folder}: its tokenizer has no single tokens for yes and no")
            head = yes_no_head(answer_rows(model, answers))
        used = list(reachable_arrays(model))
    used = [*used, *(array for tensors in dense.values() for array in tensors.used)]
    return Encoder(body, head, used, str(dtype).removeprefix("mlx.core."), prefixes)


def _load_gguf(path: Path, layout: EncoderLayout, device: Device, *, unpack: bool, disabled: frozenset[str]) -> Encoder:
    from millstream.backend.encoders.decoders import CausalBody, use_cpu_layers
    from millstream.backend.encoders.prefixes import PrefixReader
    from millstream.backend.weights.gguf import load_gguf_model

    dtype = mx.float32 if device.is_cpu else mx.bfloat16
    model, _ = load_gguf_model(path, dtype=dtype, native_quantisation=not (device.is_cpu and unpack))
    model.pop("lm_head", None)
    if device.is_cpu and unpack and FAST_PATH not in disabled:
        use_cpu_layers(model)
    prefixes = PrefixReader(model) if PrefixReader.serves(model) else None
    body, head = CausalBody(model), embedding_head(layout, {})
    return Encoder(body, head, list(reachable_arrays(model)), str(dtype).removeprefix("mlx.core."), prefixes)


def _own_family(family: str) -> Callable[[dict[str, Any], Tensors], Body]:
    if family in BERT_FAMILIES:
        return Bert
    return ModernBert if family == "modernbert" else NomicBert


def _stored(folder: Path) -> dict[str, mx.array]:
    folder_tensors(folder)  # raises for a file that must not be opened
    tensors: dict[str, mx.array] = {}
    for path in weight_files(folder):
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)
        tensors |= loaded
    return tensors


def _float_type(tensors: dict[str, mx.array]) -> mx.Dtype:
    """The type of most weights."""
    sizes: dict[mx.Dtype, int] = {}
    for tensor in tensors.values():
        if mx.issubdtype(tensor.dtype, mx.floating):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else mx.float32
