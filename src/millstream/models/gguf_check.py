"""Compares what a GGUF file's metadata say with the tensors that it holds, before anything is built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from millstream.errors import ModelError
from millstream.models.config_check import Room, check_config
from millstream.models.gguf_file import GgufFile

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


def check_gguf(file: GgufFile, config: Mapping[str, Any]) -> None:
    """`config`: what `gguf_config` made of the metadata. Raises `ModelError` for counts that the tensors belie."""
    blocks = {match[1] for name in file.tensors if (match := _BLOCK.match(name))}
    if config["num_hidden_layers"] > len(blocks):
        raise ModelError(
            f"{file.path}: '{file.architecture}.block_count' is {config['num_hidden_layers']}, "
            f"and the file holds tensors of {len(blocks)} blocks."
        )
    counts = [prod(tensor.shape) for tensor in file.tensors.values()]
    check_config(file.path, config, Room(len(counts), max(counts, default=0)))
    _check_width(file, config)


def _check_width(file: GgufFile, config: Mapping[str, Any]) -> None:
    embedding = file.tensors["token_embd.weight"]
    if len(embedding.shape) != 2 or embedding.shape[1] != config["hidden_size"]:
        raise ModelError(
            f"{file.path}: '{file.architecture}.embedding_length' is {config['hidden_size']}, "
            f"and 'token_embd.weight' has the shape {list(embedding.shape)}."
        )
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None and prod(factors.shape) != config["head_dim"] // 2:
        raise ModelError(
            f"{file.path}: 'rope_freqs.weight' has {prod(factors.shape)} values; "
            f"half of the head's {config['head_dim']} are needed."
        )
