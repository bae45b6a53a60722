"""A corpus of broken and hostile model files, each made by damaging a good model, with the error that it must give."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Damage = Callable[[Path], object]
"""Takes the folder of a good model, or its GGUF file."""


@dataclass(frozen=True, slots=True)
class Broken:
    name: str
    damage: Damage
    words: str
    """A pattern that the error message must match."""


def setting(*keys: str, value: Any, file: str = "config.json") -> Damage:
    def change(folder: Path) -> None:
        path = folder / file
        settings = json.loads(path.read_text()) if path.exists() else {}
        section = settings
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = value
        path.write_text(json.dumps(settings))

    return change


def content(file: str, data: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(data)


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes the header of model.safetensors, not its data."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return damage


def entry(**values: Any) -> Damage:
    """Changes values in the header entry of one tensor."""
    return header(lambda entries: entries["model.norm.weight"].update(values))


def replaced(file: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return damage


def tokens(folder: Path) -> None:
    """Adds a token whose id is too large for any embedding."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["far"] = 4_000_000_000
    path.write_text(json.dumps(tokenizer))


def index(name: str) -> Damage:
    return content("model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}).encode())


def truncated(file: str) -> Damage:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - 100)


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def sparse(file: str, size: int) -> Damage:
    """A sparse file of this size."""

    def damage(folder: Path) -> None:
        (folder / file).touch()
        os.truncate(folder / file, size)

    return damage


_COUNTS = [
    Broken(
        f"{'.'.join(keys)} {value!r:.20}", setting(*keys, value=value), rf"config\.json: {'.'.join(keys)} is .*{words}"
    )
    for keys, value, words in [
        (("num_hidden_layers",), 10**9, "the files have only 39 tensors"),
        (("num_hidden_layers",), 1e9, "a whole number"),
        (("num_hidden_layers",), 0, "a whole number"),
        (("num_hidden_layers",), -1, "a whole number"),
        (("num_hidden_layers",), "4", "a whole number"),
        (("num_hidden_layers",), [4], "a whole number"),
        (("num_hidden_layers",), True, "a whole number"),
        (("num_hidden_layers",), float("nan"), "NaN"),
        (("n_layer",), 10**9, "the files have only"),
        (("text_config", "num_hidden_layers"), 10**9, "the files have only"),
        (("vision_config", "depth"), 10**9, "the files have only"),
        (("audio_config", "num_hidden_layers"), 10**9, "the files have only"),
        (("vocab_size",), 10**12, "the largest tensor has"),
        (("hidden_size",), 10**400, "a number of 401 digits|the largest tensor"),
        (("num_attention_heads",), 10**9, "the largest tensor"),
        (("num_key_value_heads",), 10**9, "the largest tensor"),
        (("head_dim",), 10**9, "the largest tensor"),
        (("intermediate_size",), 10**9, "the largest tensor"),
        (("num_experts",), 10**9, "the largest tensor"),
        (("text_config", "n_routed_experts"), 10**9, "the largest tensor"),
        (("mamba_d_state",), 10**12, "the largest tensor"),
        (("max_position_embeddings",), 10**12, "at most"),
        (("rope_theta",), "x", "a number above 0"),
        (("rms_norm_eps",), [], "a number"),
        (("text_config",), "x", "a JSON object"),
        (("eos_token_id",), "2", "a token id"),
        (("eos_token_id",), 2.5, "a token id"),
        (("model_type",), "../own", "letters, digits"),
        (("model_type",), "os.path", "letters, digits"),
        (("model_type",), 7, "letters, digits"),
        (("model_file",), "own.py", "never run"),
        (("text_config", "model_file"), "own.py", "never run"),
    ]
]

FOLDERS = [
    *_COUNTS,
    Broken(
        "a table of positions",
        setting("vision_config", value={"image_size": 10**9, "patch_size": 1}),
        "image_size is 1000000000",
    ),
    Broken("layer kinds", setting("hybrid_override_pattern", value="M" * 10**6), "has 1000000 entries"),
    Broken("config truncated", content("config.json", b'{"model_type": "lla'), r"config\.json: is not valid JSON"),
    Broken("config a list", content("config.json", b"[]"), "must be a JSON object"),
    Broken("config not UTF-8", content("config.json", b'{"a": "\xff"}'), r"config\.json: is not valid JSON"),
    Broken("config deep", content("config.json", deep(100_000)), "levels deep"),
    Broken("config rather deep", content("config.json", deep(200)), "levels deep"),
    Broken("config huge", sparse("config.json", 2**30), "at most 8 MiB"),
    Broken("config a folder", replaced("config.json", Path.mkdir), r"no config\.json"),
    Broken("config a FIFO", replaced("config.json", os.mkfifo), r"no config\.json"),
    Broken("config dangling", replaced("config.json", lambda path: path.symlink_to("none")), r"no config\.json"),
    Broken("tokenizer config a FIFO", replaced("tokenizer_config.json", os.mkfifo), "not a regular file"),
    Broken("tokenizer config deep", content("tokenizer_config.json", deep(100_000)), "levels deep"),
    Broken("tokenizer config a list", content("tokenizer_config.json", b"[]"), "must be a JSON object"),
    Broken("generation config a FIFO", replaced("generation_config.json", os.mkfifo), "not a regular file"),
    Broken(
        "end tokens as strings", setting("eos_token_id", value=["</s>"], file="generation_config.json"), "eos_token_id"
    ),
    Broken("template not UTF-8", content("chat_template.jinja", b"\xff\xfe{{"), r"chat_template\.jinja: is not UTF-8"),
    Broken("template a FIFO", replaced("chat_template.jinja", os.mkfifo), "not a regular file"),
    Broken("template huge", sparse("chat_template.jinja", 2**30), "at most 4 MiB"),
    Broken("tokenizer truncated", truncated("tokenizer.json"), "tokenizer"),
    Broken("tokenizer empty", content("tokenizer.json", b""), "tokenizer"),
    Broken("tokenizer huge", sparse("tokenizer.json", 2**33), "at most 192 MiB"),
    Broken("tokenizer ids", tokens, "has the id 4000000000"),
    Broken("weights truncated", truncated("model.safetensors"), "truncated: the tensors end at byte"),
    Broken("weights empty", content("model.safetensors", b""), "truncated"),
    Broken("a header beyond the file", content("model.safetensors", struct.pack("<Q", 2**62)), "truncated"),
    Broken("negative shape", entry(shape=[-64]), "damaged"),
    Broken("huge shape", entry(shape=[2**62, 4]), "do not take 256 bytes"),
    Broken("shape of words", entry(shape=["64"]), "damaged"),
    Broken("another type", entry(dtype="F16"), "do not take 256 bytes"),
    Broken("unknown type", entry(dtype="F1024"), "not supported"),
    Broken("offsets reversed", entry(data_offsets=[256, 0]), "damaged"),
    Broken("offsets overlap", entry(data_offsets=[128, 384]), "overlaps"),
    Broken("offsets beyond", entry(data_offsets=[2**40, 2**40 + 256]), "truncated"),
    Broken("an invalid entry", header(lambda entries: entries.update(a=1)), "damaged"),
    Broken("index out of the folder", index("../model.safetensors"), "same folder as the index"),
    Broken("index absolute", index("/etc/passwd"), "same folder as the index"),
    Broken("index of another format", index("model.npz"), "same folder as the index"),
    Broken("index without its file", index("other.safetensors"), "cannot be read"),
    Broken("another broken weight file", content("model-2.safetensors", b"x"), r"model-2\.safetensors: .*truncated"),
]
"""Damage to a folder from `support.tiny.write_servable`."""


def metadata_number(key: bytes, value: int, form: str = "<I", skip: int = 4) -> Damage:
    """Overwrites a number in the metadata of a GGUF file, after its key and type."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        offset = data.index(key) + len(key) + skip
        struct.pack_into(form, data, offset, value)
        path.write_bytes(data)

    return damage


_ARRAY_LENGTH = 8
"""Bytes between the key of an array and its length: its type and the type of its entries."""

GGUFS = [
    Broken(
        "blocks",
        metadata_number(b"llama.block_count", 2**31),
        "block_count' is 2147483648, .* of 2 blocks",
    ),
    Broken("no blocks", metadata_number(b"llama.block_count", 0), "a whole number above 0"),
    Broken("a third block", metadata_number(b"llama.block_count", 3), "tensors of 2 blocks"),
    Broken("heads", metadata_number(b"llama.attention.head_count", 0), "a whole number above 0"),
    Broken("many heads", metadata_number(b"llama.attention.head_count", 2**31), "the largest tensor"),
    Broken("width", metadata_number(b"llama.embedding_length", 128), "embedding_length"),
    Broken("frequency", metadata_number(b"llama.rope.freq_base", 0x7FC00000), "freq_base"),
    Broken("tokens", metadata_number(b"tokenizer.ggml.tokens", 2**60, "<Q", _ARRAY_LENGTH), "at most 8000000"),
    Broken("fewer types", metadata_number(b"tokenizer.ggml.token_type", 2**40, "<Q", _ARRAY_LENGTH), "at most 8000000"),
    Broken("a long text", metadata_number(b"general.architecture", 2**50, "<Q"), "truncated"),
    Broken(
        "a name twice", lambda path: _replace(path, b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "two tensors named"
    ),
    Broken("truncated", lambda path: os.truncate(path, path.stat().st_size - 1), "truncated"),
    Broken("truncated header", lambda path: os.truncate(path, 300), "truncated"),
    Broken("many tensors", lambda path: _overwrite(path, 8, struct.pack("<Q", 2**62)), "tensors; at most"),
    Broken(
        "many values", lambda path: _overwrite(path, 16, struct.pack("<Q", 2**62)), "truncated|damaged|unknown type"
    ),
]
"""Damage to a file from `support.tiny_gguf.write_gguf`."""


def _replace(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


def _overwrite(path: Path, offset: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(new)] = new
    path.write_bytes(data)
