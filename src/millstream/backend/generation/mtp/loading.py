"""Loads the head that a model's folder has beside the model: mlx-lm drops its weights. Owner only.

The block is that of a model with one layer, made by the family's own code: so its weights go through the family's own
`sanitize` too, under the names of that one layer (experts are stacked, norms shifted, latent projections split). The
head's other parts ride along under names that `sanitize` treats as what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import _get_classes as model_classes
from mlx_lm.utils import infer_quant_config

from millstream.backend.generation.mtp.families import FAMILIES, NORMS, UNUSED_MARKS, MtpFamily
from millstream.backend.generation.mtp.head import MtpHead
from millstream.backend.weights.failures import LIBRARY_FAILURES
from millstream.backend.weights.stored import read_tensors, stored_shapes

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of each tensor in a folder: its type and its shape."""

_LAYER = "layers.0."
_RIDING = "riding."
_COMPARED_ROWS = 64

NO_WEIGHTS = "this copy has no MTP weights"


@dataclass(frozen=True, slots=True)
class FoundHead:
    """What a folder has of heads. `note` says why there is none to use; empty if nobody would expect one."""

    head: MtpHead | None = None
    family: MtpFamily | None = None
    note: str = ""


def load_head(folder: Path, config: Mapping[str, Any]) -> FoundHead:
    """The folder's head, not evaluated and not bound to its model. A head that cannot be used is no error: the model
    runs without it."""
    text = {**config, **(config.get("text_config") or {})}
    model_type = str(config.get("model_type"))
    stored = stored_shapes(folder)
    family = FAMILIES.get(model_type)
    if family is None:
        unused = any(name.startswith(UNUSED_MARKS) for name in stored)
        return FoundHead(note=f"MTP weights are not used: not for {model_type} yet" if unused else "")
    layers = int(text.get("num_hidden_layers") or 0)
    names = {name: found for name in stored if (found := family.part_of(_bare(name), layers)) is not None}
    if not names:
        return FoundHead(note=NO_WEIGHTS if text.get(family.count) else "")
    try:
        return FoundHead(_load(folder, config, family, names, stored, layers), family)
    except LIBRARY_FAILURES as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return FoundHead(note=f"MTP weights are not used: {reason[0][:200]}")


def _load(
    folder: Path,
    config: Mapping[str, Any],
    family: MtpFamily,
    names: Mapping[str, tuple[str, str]],
    stored: Stored,
    layers: int,
) -> MtpHead:
    shared = [_shared_part(folder, part, names, stored) for part in ("embedding", "output")]
    wanted = {name for name, (part, _) in names.items() if part not in shared}
    # A convolution tells `sanitize` whether a folder is in the library's form already.
    marker = next((name for name in stored if name.endswith("conv1d.weight")), None)
    tensors = read_tensors(folder, wanted | ({marker} if marker else set()))
    text = config.get("text_config")
    changed: dict[str, Any] = {**config, **family.one_layer}
    if text is not None:
        changed["text_config"] = {**text, **family.one_layer}
    model_class, args_class = model_classes(config=changed)
    model = model_class(args_class.from_dict(changed))
    if type(make_prompt_cache(model)[0]) is not KVCache:
        raise ValueError("its block has another cache than plain attention")
    weights = _sanitized(
        model, {f"model.{_LAYER}{_alias(names[name])}": tensors[name] for name in wanted}, tensors, marker
    )
    size, eps = _size(text or config)
    head = MtpHead(model.layers[0], size, eps, has_norm="norm.weight" in weights, hidden_first=family.hidden_first)
    if "embedding.weight" in weights:
        head.embedding = nn.Embedding(int(config.get("vocab_size") or (text or {})["vocab_size"]), size)
    if "output.weight" in weights:
        head.output = nn.Linear(size, int(config.get("vocab_size") or (text or {})["vocab_size"]), bias=False)
    _fill(head, weights)
    return head


def _size(settings: Mapping[str, Any]) -> tuple[int, float]:
    return int(settings["hidden_size"]), float(settings.get("rms_norm_eps", 1e-6))


def _bare(name: str) -> str:
    """A name without what vision models put before it."""
    name = name.replace("model.language_model.", "model.", 1)
    return name.removeprefix("language_model.")


def _alias(found: tuple[str, str]) -> str:
    """Under which name of the one layer a weight goes through `sanitize`."""
    part, rest = found
    if part == "block":
        return rest
    return f"{_RIDING}{part}.input_layernorm.{rest}" if part in NORMS else f"{_RIDING}{part}.{rest}"


def _sanitized(
    model: Any, weights: dict[str, mx.array], tensors: Mapping[str, mx.array], marker: str | None
) -> dict[str, mx.array]:
    """The head's weights by the names of `MtpHead`."""
    if marker is not None:
        weights[f"model.{_LAYER}{_RIDING}conv1d.weight"] = tensors[marker]
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    found = {}
    for name, value in weights.items():
        rest = name.partition(_LAYER)[2]
        if not rest.startswith(_RIDING):
            found[f"block.{rest}"] = value
        elif not rest.startswith(f"{_RIDING}conv1d"):
            found[rest.removeprefix(_RIDING).replace(".input_layernorm.", ".")] = value
    return found


def _shared_part(folder: Path, part: str, names: Mapping[str, tuple[str, str]], stored: Stored) -> str | None:
    """`part` if the head's copy is the target's own: some families store it twice. Compares some rows."""
    own = next((name for name, found in names.items() if found == (part, "weight")), None)
    targets = ("lm_head.weight", "model.embed_tokens.weight") if part == "output" else ("model.embed_tokens.weight",)
    target = next((name for name in targets if name in stored), None)
    if own is None or target is None or stored[own] != stored[target]:
        return None
    tensors = read_tensors(folder, {own, target})
    count = stored[own][1][0]
    rows = mx.arange(0, count, max(1, count // _COMPARED_ROWS))
    return part if mx.array_equal(tensors[own][rows], tensors[target][rows]).item() else None


def _fill(head: MtpHead, weights: dict[str, mx.array]) -> None:
    """Put the weights in, packed ones too. Raises `ValueError` if one is missing or has another shape."""

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        settings: dict[str, Any] = infer_quant_config(path, module, weights)
        return settings

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(head, class_predicate=packed)
    wanted = dict(tree_flatten(head.parameters()))
    if missing := sorted(wanted.keys() - weights.keys()):
        raise ValueError(f"{missing[0]!r} is missing")
    for name, array in wanted.items():
        if array.shape != weights[name].shape:
            raise ValueError(f"{name!r} has the shape {weights[name].shape}; it must be {array.shape}")
    head.load_weights([(name, weights[name]) for name in wanted])


def text_model(model: Any) -> Any:
    """The module of a model that has the embedding, the layers and the last norm. Raises `ValueError` if none has."""
    for _, module in sorted(model.named_modules(), key=lambda pair: pair[0].count(".") if pair[0] else -1):
        if {"embed_tokens", "norm", "layers"} <= set(module):
            return module
    raise ValueError("its embedding and last norm were not found")


def vocabulary_of(model: Any) -> tuple[Callable[[mx.array], mx.array], Callable[[mx.array], mx.array]]:
    """The target's embedding and output layer, looked up at each call: a load may replace them."""
    inner = text_model(model)
    owner = next((module for _, module in model.named_modules() if "lm_head" in module), None)

    def output(hidden: mx.array) -> mx.array:
        logits: mx.array = inner.embed_tokens.as_linear(hidden) if owner is None else owner.lm_head(hidden)
        return logits

    def embedding(tokens: mx.array) -> mx.array:
        vectors: mx.array = inner.embed_tokens(tokens)
        return vectors

    return embedding, output
