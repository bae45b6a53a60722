"""Compares the counts and sizes of a configuration with what the model's files hold, before anything is built.

A library builds what the configuration says, layer by layer, and only then looks at the weights: a billion layers take
all memory without an error.
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

MOST_LAYERS = 2_000
MOST_POSITIONS = 2**31 - 1
_SMALL = 2**20
"""What a size may be in any case, where it need not be one of a tensor."""

_PARTS = re.compile(r"(text|vision|audio|llm|language)_config")
_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks)|(\w+_)?depth|(encoder|decoder)_layers")
_LAYER_LISTS = re.compile(r"_?(layers_block_type|layer_types|block_types|hybrid_override_pattern)")
_NEEDED = frozenset({
    "num_hidden_layers", "hidden_size", "d_model", "n_embd", "intermediate_size", "moe_intermediate_size",
    "vocab_size", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "head_dim", "v_head_dim", "num_experts", "num_experts_per_tok", "num_local_experts",
    "n_routed_experts", "kv_lora_rank", "q_lora_rank",
})  # fmt: skip
"""Each must be a whole number, or a list of them with one a layer, and not more than a tensor of the file can hold."""
_MAY_BE_ZERO = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"})
_SIZES = re.compile(r"(num|n)_\w+|\w+_(size|dim|dims|rank|channels|features|heads|experts)|d_\w+|mamba_\w+")
_NOT_SIZES = re.compile(r"\w*(token|param|position|length|len|seq|ctx|seed|group|image|video|frame|pixel|label)\w*")
_TOKEN = re.compile(r"\w+_token_(id|index)")
_SPARED = frozenset({"id2label", "label2id", "task_specific_params", "auto_map"})


@dataclass(frozen=True, slots=True)
class Room:
    """What the files hold: how many tensors, and how many numbers the largest of them at most."""

    tensors: int
    largest: int

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor]) -> Room:
        counts = [_most_values(tensor) for tensor in tensors]
        return cls(len(counts), max(counts, default=0))


def _most_values(tensor: StoredTensor) -> int:
    """Packed numbers take one bit at least."""
    return tensor.values if tensor.dtype in FLOATS else tensor.nbytes * 8


def check_config(path: Path, config: Mapping[str, Any], room: Room) -> None:
    """Raises `ModelError` that names the setting, its value and what would be right."""
    _check_part(path, "", config, room)


def _check_part(path: Path, place: str, part: Mapping[str, Any], room: Room) -> None:
    for key, value in part.items():
        where = f"{path}: {place}{key}"
        if value is None or key in _SPARED:
            continue
        if _PARTS.fullmatch(key) and not isinstance(value, dict):
            raise ModelError(f"{where} is {_short(value)}; a JSON object is needed")
        _check_setting(where, key, value, room)
        for each in _listed(value):
            if isinstance(each, dict):
                _check_part(path, f"{place}{key}.", each, room)
    _check_patches(path, place, part, room)


def _check_setting(where: str, key: str, value: Any, room: Room) -> None:
    if isinstance(value, float) and math.isnan(value):
        raise ModelError(f"{where} is NaN; a number is needed")
    if key == "rope_theta" and not (_is_number(value) and 0 < value < math.inf):
        raise ModelError(f"{where} is {_short(value)}; a number above 0 is needed")
    if key.endswith(("_eps", "_epsilon")) and not (_is_number(value) and 0 <= value < math.inf):
        raise ModelError(f"{where} is {_short(value)}; a number of 0 or more is needed")
    if _TOKEN.fullmatch(key) and not all(type(each) is int and abs(each) < 2**31 for each in _listed(value)):
        raise ModelError(f"{where} is {_short(value)}; the number of a token is needed")
    if key == "max_position_embeddings":
        _check_whole(where, value, 1, MOST_POSITIONS, "at most 2147483647 are served")
    layers = min(room.tensors, MOST_LAYERS)
    held = f"the files hold {room.tensors} tensors" if room.tensors < MOST_LAYERS else f"{MOST_LAYERS} are served"
    if _LAYER_LISTS.fullmatch(key) and isinstance(value, list | str) and len(value) > layers:
        raise ModelError(f"{where} has {len(value)} entries, and {held}")
    if _LAYERS.fullmatch(key) and (key in _NEEDED or _is_number(value)):
        _check_whole(where, value, 1 if key in _NEEDED else 0, layers, held)
    elif key in _NEEDED:
        for each in _listed(value):
            least = 0 if key in _MAY_BE_ZERO or isinstance(value, list) else 1
            _check_whole(where, each, least, room.largest, f"the largest tensor holds {room.largest} values")
    elif _SIZES.fullmatch(key) and not _NOT_SIZES.fullmatch(key) and _is_number(value):
        most = max(room.largest, _SMALL)
        if abs(value) > most:
            raise ModelError(f"{where} is {_short(value)}, and the largest tensor holds {room.largest} values")


def _check_whole(where: str, value: Any, least: int, most: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"{where} is {_short(value)}; a whole number of {least} or more is needed")
    if value > most:
        raise ModelError(f"{where} is {_short(value)}, and {why}")


def _check_patches(path: Path, place: str, part: Mapping[str, Any], room: Room) -> None:
    """A tower has a table of its patches' positions."""
    image, patch = part.get("image_size"), part.get("patch_size")
    if isinstance(patch, int) and patch < 1:
        raise ModelError(f"{path}: {place}patch_size is {_short(patch)}; a whole number of 1 or more is needed")
    if isinstance(image, int) and isinstance(patch, int) and (image // patch) ** 2 > max(room.largest, _SMALL):
        raise ModelError(
            f"{path}: {place}image_size is {_short(image)} with a patch_size of {patch}, "
            f"and the largest tensor holds {room.largest} values"
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """A number of a thousand digits need not be written out."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return f"{value!r:.60}"
