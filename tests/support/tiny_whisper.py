"""Tiny random Whisper models, written as folders in each of the layouts that people have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import decoders, pre_tokenizers

from millstream.backend.transcription.whisper.languages import LANGUAGES
from support.real_whisper import hugging_face_config, hugging_face_name, mlx_name, special_names

Layout = Literal["hugging-face", "mlx", "npz"]

SECONDS = 1.0
"""Of a window."""
TIMES = 50
LANGUAGE_COUNT = 3
_NO_SPEECH = 256 + special_names(LANGUAGES[:LANGUAGE_COUNT], TIMES).index("<|nospeech|>")
DIMS = {
    "n_mels": 20,
    "n_audio_ctx": TIMES,
    "n_audio_state": 32,
    "n_audio_head": 4,
    "n_audio_layer": 2,
    "n_vocab": 256 + len(special_names(LANGUAGES[:LANGUAGE_COUNT], TIMES)),
    "n_text_ctx": 16,
    "n_text_state": 32,
    "n_text_head": 4,
    "n_text_layer": 2,
}


def write_whisper(folder: Path, layout: Layout = "hugging-face", *, multilingual: bool = True, seed: int = 0) -> Path:
    """The same seed gives the same model in each layout."""
    folder.mkdir(parents=True)
    tensors = dict(_tensors(np.random.default_rng(seed)))
    if layout == "hugging-face":
        config = hugging_face_config(DIMS)
        save_file({hugging_face_name(name): value for name, value in tensors.items()}, folder / "model.safetensors")
    else:
        config = {**DIMS, "model_type": "whisper"}
        turned = {mlx_name(name): _as_mlx(name, value) for name, value in tensors.items()}
        del turned["encoder.positional_embedding"]  # converted files leave it out
        if layout == "npz":
            np.savez(folder / "weights.npz", **turned)
        else:
            save_file(turned, folder / "weights.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"is_multilingual": multilingual, "suppress_tokens": [], "alignment_heads": [[1, 0], [1, 2]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text("{}")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _as_mlx(name: str, value: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(value.transpose(0, 2, 1)) if value.ndim == 3 else value


def _tokenizer() -> tokenizers.Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_names(LANGUAGES[:LANGUAGE_COUNT], TIMES))
    return tokenizer


def _tensors(random: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """With OpenAI's names."""
    width = DIMS["n_audio_state"]

    def normal(*shape: int, scale: float = 0.7) -> NDArray[np.float32]:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", 1 + normal(width, scale=0.1)
        yield f"{name}.bias", normal(width, scale=0.05)

    def block(name: str, *, cross: bool) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for attention in ("attn", "cross_attn") if cross else ("attn",):
            for part in ("query", "key", "value", "out"):
                yield f"{name}.{attention}.{part}.weight", normal(width, width)
                if part != "key":
                    yield f"{name}.{attention}.{part}.bias", normal(width, scale=0.05)
            yield from norm(f"{name}.{attention}_ln")
        yield f"{name}.mlp.0.weight", normal(4 * width, width)
        yield f"{name}.mlp.0.bias", normal(4 * width, scale=0.05)
        yield f"{name}.mlp.2.weight", normal(width, 4 * width)
        yield f"{name}.mlp.2.bias", normal(width, scale=0.05)
        yield from norm(f"{name}.mlp_ln")

    yield "encoder.conv1.weight", normal(width, DIMS["n_mels"], 3)
    yield "encoder.conv1.bias", normal(width, scale=0.05)
    yield "encoder.conv2.weight", normal(width, width, 3)
    yield "encoder.conv2.bias", normal(width, scale=0.05)
    yield "encoder.positional_embedding", _sinusoids(DIMS["n_audio_ctx"], width)
    for number in range(DIMS["n_audio_layer"]):
        yield from block(f"encoder.blocks.{number}", cross=False)
    yield from norm("encoder.ln_post")
    embedding = normal(DIMS["n_vocab"], width)
    embedding *= 2 / np.linalg.norm(embedding, axis=1, keepdims=True)
    embedding[_NO_SPEECH] = 0.0  # else it would take anything for silence
    yield "decoder.token_embedding.weight", embedding
    yield "decoder.positional_embedding", normal(DIMS["n_text_ctx"], width, scale=1.0)
    for number in range(DIMS["n_text_layer"]):
        yield from block(f"decoder.blocks.{number}", cross=True)
    yield from norm("decoder.ln")


def _sinusoids(length: int, width: int) -> NDArray[np.float32]:
    angles = np.arange(length)[:, None] * np.exp(-np.log(10_000) / (width // 2 - 1) * np.arange(width // 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def spoken(seconds: float, seed: int = 0) -> Any:
    """Tones that change: a tiny random model hears words in anything, and other words in other tones."""
    random = np.random.default_rng(seed)
    times = np.arange(round(16_000 * seconds)) / 16_000
    pairs = random.uniform(0.1, 1, (3, 2)) * (4000, 1)
    tones = [np.sin(2 * np.pi * low * times * (1 + rise * times)) for low, rise in pairs]
    return (0.2 * np.sum(tones, axis=0) * (1 + np.sin(20 * random.random() * times))).astype(np.float32)
