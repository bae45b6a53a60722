"""Checks a GGUF file's metadata against its tensors, before a model is built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from millstream.errors import ModelError
from millstream.models.config_check import StoredCounts, check_config
from millstream.models.gguf_file import GgufFile

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


def check_gguf(file: GgufFile, config: Mapping[str, Any]) -> None:
    """`config`: the result of `gguf_config`. Raises `ModelError` if its counts do not match the tensors."""
    blocks = {match[1] for name in file.tensors if (match := _BLOCK.match(name))}
    if config["num_hidden_layers"] > len(blocks):
        raise ModelError(
            f"{file.path}: '{file.architecture}.block_count' is {config['num_hidden_layers']}, "
            f"but the file has tensors of {len(blocks)} blocks."
        )
    values = [prod(tensor.shape) for tensor in file.tensors.values()]
    check_config(file.path, config, StoredCounts(len(values), max(values, default=0)))
    _check_width(file, config)


def _check_width(file: GgufFile, config: Mapping[str, Any]) -> None:
    embedding = file.tensors["token_embd.weight"]
    if len(embedding.shape) != 2 or embedding.shape[1] != config["hidden_size"]:
        raise ModelError(
            f"{file.path}: '{file.architecture}.embedding_length' is {config['hidden_size']}, "
            f"but 'token_embd.weight' has the shape {list(embedding.shape)}."
        )
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None and prod(factors.shape) != config["head_dim"] // 2:
        raise ModelError(
            f"{file.path}: 'rope_freqs.weight' has {prod(factors.shape)} values; "
            f"it must have half of the head size {config['head_dim']}."
        )
