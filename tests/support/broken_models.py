"""A corpus of broken and hostile model files, made by code: what is done to a good model, and what is said of it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Damage = Callable[[Path], object]
"""Given the folder of a good model, or its GGUF file."""


@dataclass(frozen=True, slots=True)
class Broken:
    name: str
    damage: Damage
    words: str
    """A pattern that the reason must hold."""


def setting(*keys: str, value: Any, file: str = "config.json") -> Damage:
    def change(folder: Path) -> None:
        path = folder / file
        whole = json.loads(path.read_text()) if path.exists() else {}
        part = whole
        for key in keys[:-1]:
            part = part.setdefault(key, {})
        part[keys[-1]] = value
        path.write_text(json.dumps(whole))

    return change


def content(file: str, data: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(data)


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another header for model.safetensors; the data stay."""

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
    """Other values for the entry of one tensor."""
    return header(lambda entries: entries["model.norm.weight"].update(values))


def replaced(file: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return damage


def tokens(folder: Path) -> None:
    """A token with a number that no table has room for."""
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["model"]["vocab"]["far"] = 4_000_000_000
    path.write_text(json.dumps(whole))


def index(name: str) -> Damage:
    return content("model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}).encode())


def cut(file: str) -> Damage:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - 100)


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def sparse(file: str, size: int) -> Damage:
    """A file of this size that takes no room on the disk."""

    def damage(folder: Path) -> None:
        (folder / file).touch()
        os.truncate(folder / file, size)

    return damage


_COUNTS = [
    Broken(
        f"{'.'.join(keys)} {value!r:.20}", setting(*keys, value=value), rf"config\.json: {'.'.join(keys)} is .*{words}"
    )
    for keys, value, words in [
        (("num_hidden_layers",), 10**9, "the files hold 39 tensors"),
        (("num_hidden_layers",), 1e9, "a whole number"),
        (("num_hidden_layers",), 0, "a whole number"),
        (("num_hidden_layers",), -1, "a whole number"),
        (("num_hidden_layers",), "4", "a whole number"),
        (("num_hidden_layers",), [4], "a whole number"),
        (("num_hidden_layers",), True, "a whole number"),
        (("num_hidden_layers",), float("nan"), "NaN"),
        (("n_layer",), 10**9, "the files hold"),
        (("text_config", "num_hidden_layers"), 10**9, "the files hold"),
        (("vision_config", "depth"), 10**9, "the files hold"),
        (("audio_config", "num_hidden_layers"), 10**9, "the files hold"),
        (("vocab_size",), 10**12, "the largest tensor holds"),
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
        (("eos_token_id",), "2", "the number of a token"),
        (("eos_token_id",), 2.5, "the number of a token"),
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
    Broken("config cut", content("config.json", b'{"model_type": "lla'), r"config\.json: holds no JSON"),
    Broken("config a list", content("config.json", b"[]"), "a JSON object is needed"),
    Broken("config not UTF-8", content("config.json", b'{"a": "\xff"}'), r"config\.json: holds no JSON"),
    Broken("config deep", content("config.json", deep(100_000)), "levels"),
    Broken("config rather deep", content("config.json", deep(200)), "levels"),
    Broken("config huge", sparse("config.json", 2**30), "at most 8 MiB"),
    Broken("config a folder", replaced("config.json", Path.mkdir), r"no config\.json"),
    Broken("config a FIFO", replaced("config.json", os.mkfifo), r"no config\.json"),
    Broken("config dangling", replaced("config.json", lambda path: path.symlink_to("none")), r"no config\.json"),
    Broken("tokenizer config a FIFO", replaced("tokenizer_config.json", os.mkfifo), "not a regular file"),
    Broken("tokenizer config deep", content("tokenizer_config.json", deep(100_000)), "levels"),
    Broken("tokenizer config a list", content("tokenizer_config.json", b"[]"), "a JSON object is needed"),
    Broken("generation config a FIFO", replaced("generation_config.json", os.mkfifo), "not a regular file"),
    Broken(
        "ends that are words", setting("eos_token_id", value=["</s>"], file="generation_config.json"), "eos_token_id"
    ),
    Broken("template not UTF-8", content("chat_template.jinja", b"\xff\xfe{{"), r"chat_template\.jinja: is not UTF-8"),
    Broken("template a FIFO", replaced("chat_template.jinja", os.mkfifo), "not a regular file"),
    Broken("template huge", sparse("chat_template.jinja", 2**30), "at most 4 MiB"),
    Broken("tokenizer cut", cut("tokenizer.json"), "tokenizer"),
    Broken("tokenizer empty", content("tokenizer.json", b""), "tokenizer"),
    Broken("tokenizer huge", sparse("tokenizer.json", 2**33), "at most 192 MiB"),
    Broken("tokenizer ids", tokens, "has the id 4000000000"),
    Broken("weights cut", cut("model.safetensors"), "cut off: the tensors end at byte"),
    Broken("weights empty", content("model.safetensors", b""), "cut off"),
    Broken("a header beyond the file", content("model.safetensors", struct.pack("<Q", 2**62)), "cut off"),
    Broken("negative shape", entry(shape=[-64]), "damaged"),
    Broken("huge shape", entry(shape=[2**62, 4]), "do not take 256 bytes"),
    Broken("shape of words", entry(shape=["64"]), "damaged"),
    Broken("another type", entry(dtype="F16"), "do not take 256 bytes"),
    Broken("unknown type", entry(dtype="F1024"), "not known"),
    Broken("offsets reversed", entry(data_offsets=[256, 0]), "damaged"),
    Broken("offsets overlap", entry(data_offsets=[128, 384]), "overlaps"),
    Broken("offsets beyond", entry(data_offsets=[2**40, 2**40 + 256]), "cut off"),
    Broken("an entry that is none", header(lambda entries: entries.update(a=1)), "damaged"),
    Broken("index out of the folder", index("../model.safetensors"), "beside the index"),
    Broken("index absolute", index("/etc/passwd"), "beside the index"),
    Broken("index of another format", index("model.npz"), "beside the index"),
    Broken("index without its file", index("other.safetensors"), "cannot be read"),
    Broken("a further broken file", content("model-2.safetensors", b"x"), r"model-2\.safetensors: .*cut off"),
]
"""Of a folder as `support.tiny.write_servable` writes it."""


def word(key: bytes, value: int, form: str = "<I", skip: int = 4) -> Damage:
    """Another number in the metadata of a GGUF file: behind its key and its type."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        at = data.index(key) + len(key) + skip
        struct.pack_into(form, data, at, value)
        path.write_bytes(data)

    return damage


_LENGTH = 8
"""Of an array: behind its key stand its type, the type of its entries, and then how many there are."""

GGUFS = [
    Broken(
        "blocks",
        word(b"llama.block_count", 2**31),
        "block_count' is 2147483648, .* of 2 blocks",
    ),
    Broken("no blocks", word(b"llama.block_count", 0), "a whole number above 0"),
    Broken("a third block", word(b"llama.block_count", 3), "tensors of 2 blocks"),
    Broken("heads", word(b"llama.attention.head_count", 0), "a whole number above 0"),
    Broken("many heads", word(b"llama.attention.head_count", 2**31), "the largest tensor"),
    Broken("width", word(b"llama.embedding_length", 128), "embedding_length"),
    Broken("frequency", word(b"llama.rope.freq_base", 0x7FC00000), "freq_base"),
    Broken("tokens", word(b"tokenizer.ggml.tokens", 2**60, "<Q", _LENGTH), "at most 8000000"),
    Broken("fewer types", word(b"tokenizer.ggml.token_type", 2**40, "<Q", _LENGTH), "at most 8000000"),
    Broken("a long text", word(b"general.architecture", 2**50, "<Q"), "cut off"),
    Broken("a name twice", lambda path: _swap(path, b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "two tensors"),
    Broken("cut", lambda path: os.truncate(path, path.stat().st_size - 1), "cut off"),
    Broken("cut header", lambda path: os.truncate(path, 300), "cut off"),
    Broken("many tensors", lambda path: _patch(path, 8, struct.pack("<Q", 2**62)), "tensors; at most"),
    Broken("many values", lambda path: _patch(path, 16, struct.pack("<Q", 2**62)), "cut off|damaged|unknown type"),
]
"""Of a file as `support.tiny_gguf.write_gguf` writes it."""


def _swap(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


def _patch(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
