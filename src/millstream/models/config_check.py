"""Checks the counts and sizes in config.json against the tensors in the model's files.

A library builds what the configuration says, layer by layer, before it opens the weights: with a billion layers it
would use up all memory without an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.safetensors_header import FLOATS, StoredTensor

MAX_LAYERS = 2_000
MAX_POSITIONS = 2**31 - 1
_ALWAYS_ALLOWED = 2**20
"""A size up to this is accepted for settings that need not be the size of a tensor."""

_SECTIONS = re.compile(r"(text|vision|audio|llm|language)_config")
_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks)|(?!scale_)(\w+_)?depth|(encoder|decoder)_layers")
_LAYER_LISTS = re.compile(r"_?(layers_block_type|layer_types|block_types|hybrid_override_pattern)")
_TENSOR_SIZES = frozenset({
    "num_hidden_layers", "hidden_size", "d_model", "n_embd", "intermediate_size", "moe_intermediate_size",
    "vocab_size", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "head_dim", "v_head_dim", "num_experts", "num_experts_per_tok", "num_local_experts",
    "n_routed_experts", "kv_lora_rank", "q_lora_rank",
})  # fmt: skip
"""Each must be a whole number, or a list with one per layer, and not more than the largest tensor has values."""
_MAY_BE_ZERO = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"})
_SIZE_LIKE = re.compile(r"(num|n)_\w+|\w+_(size|dim|dims|rank|channels|features|heads|experts)|d_\w+|mamba_\w+")
_OTHER_NUMBERS = re.compile(r"\w*(token|param|position|length|len|seq|ctx|seed|group|image|video|frame|pixel|label)\w*")
_TOKEN_ID = re.compile(r"\w+_token_(id|index)")
_NOT_CHECKED = frozenset({"id2label", "label2id", "task_specific_params", "auto_map"})


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """What the model's files contain: the number of tensors, and the values of the largest one, at most."""

    tensors: int
    largest: int

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor]) -> StoredCounts:
        values = [_max_values(tensor) for tensor in tensors]
        return cls(len(values), max(values, default=0))


def _max_values(tensor: StoredTensor) -> int:
    """A packed value takes at least one bit."""
    return tensor.values if tensor.dtype in FLOATS else tensor.nbytes * 8


def check_config(path: Path, config: Mapping[str, Any], stored: StoredCounts) -> None:
    """Raises `ModelError` with the setting, its value and what would be right."""
    _check_section(path, "", config, stored)


def _check_section(path: Path, prefix: str, section: Mapping[str, Any], stored: StoredCounts) -> None:
    for key, value in section.items():
        where = f"{path}: {prefix}{key}"
        if value is None or key in _NOT_CHECKED:
            continue
        if _SECTIONS.fullmatch(key) and not isinstance(value, dict):
            raise ModelError(f"{where} is {_short(value)}; it must be a JSON object")
        _check_setting(where, key, value, stored)
        for each in _as_list(value):
            if isinstance(each, dict):
                _check_section(path, f"{prefix}{key}.", each, stored)
    _check_patches(path, prefix, section, stored)


def _check_setting(where: str, key: str, value: Any, stored: StoredCounts) -> None:
    if isinstance(value, float) and math.isnan(value):
        raise ModelError(f"{where} is NaN; it must be a number")
    if key == "rope_theta" and not (_is_number(value) and 0 < value < math.inf):
        raise ModelError(f"{where} is {_short(value)}; it must be a number above 0")
    if key.endswith(("_eps", "_epsilon")) and not (_is_number(value) and 0 <= value < math.inf):
        raise ModelError(f"{where} is {_short(value)}; it must be a number of 0 or more")
    if _TOKEN_ID.fullmatch(key) and not all(type(each) is int and abs(each) < 2**31 for each in _as_list(value)):
        raise ModelError(f"{where} is {_short(value)}; it must be a token id")
    if key == "max_position_embeddings":
        _check_integer(where, value, 1, MAX_POSITIONS, "at most 2147483647 positions are supported")
    layers = min(stored.tensors, MAX_LAYERS)
    reason = f"at most {MAX_LAYERS} layers are supported"
    if stored.tensors < MAX_LAYERS:
        reason = f"the files have only {stored.tensors} tensors"
    if _LAYER_LISTS.fullmatch(key) and isinstance(value, list | str) and len(value) > layers:
        raise ModelError(f"{where} has {len(value)} entries, but {reason}")
    if _LAYERS.fullmatch(key) and (key in _TENSOR_SIZES or _is_number(value)):
        _check_integer(where, value, 1 if key in _TENSOR_SIZES else 0, layers, reason)
    elif key in _TENSOR_SIZES:
        for each in _as_list(value):
            minimum = 0 if key in _MAY_BE_ZERO or isinstance(value, list) else 1
            _check_integer(where, each, minimum, stored.largest, f"the largest tensor has {stored.largest} values")
    elif _SIZE_LIKE.fullmatch(key) and not _OTHER_NUMBERS.fullmatch(key) and _is_number(value):
        limit = max(stored.largest, _ALWAYS_ALLOWED)
        if abs(value) > limit:
            raise ModelError(f"{where} is {_short(value)}, but the largest tensor has {stored.largest} values")


def _check_integer(where: str, value: Any, minimum: int, maximum: int, reason: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ModelError(f"{where} is {_short(value)}; it must be a whole number of {minimum} or more")
    if value > maximum:
        raise ModelError(f"{where} is {_short(value)}, but {reason}")


def _check_patches(path: Path, prefix: str, section: Mapping[str, Any], stored: StoredCounts) -> None:
    """A vision tower has a table of patch positions."""
    image, patch = section.get("image_size"), section.get("patch_size")
    if isinstance(patch, int) and patch < 1:
        raise ModelError(f"{path}: {prefix}patch_size is {_short(patch)}; it must be a whole number of 1 or more")
    if (
        isinstance(image, int)
        and isinstance(patch, int)
        and (image // patch) ** 2 > max(stored.largest, _ALWAYS_ALLOWED)
    ):
        raise ModelError(
            f"{path}: {prefix}image_size is {_short(image)} with a patch_size of {patch}, "
            f"but the largest tensor has {stored.largest} values"
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """Abbreviates numbers of many digits."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return f"{value!r:.60}"
