"""Tiny random models of mlx-audio's families, written as model folders; and the same models as the library runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tokenizers
from mlx.utils import tree_flatten

from millstream.backend import mlx_audio_import  # noqa: F401  before all that imports mlx-audio
from support.audio_files import Array

PIECES = ["<unk>", "\u2581the", "\u2581a", "b", "c", ".", "\u2581e", "f", "<|en|>", "\u2581g", "h"]

_NEMO = "nemo.collections.asr.models."
_PARAKEET: dict[str, Any] = {
    "preprocessor": {
        "sample_rate": 16_000, "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01,
        "window": "hann", "features": 16, "n_fft": 512, "dither": 0.0,
    },
    "encoder": {
        "feat_in": 16, "n_layers": 2, "d_model": 32, "n_heads": 4, "ff_expansion_factor": 2, "subsampling_factor": 8,
        "self_attention_model": "rel_pos", "subsampling": "dw_striding", "conv_kernel_size": 9,
        "subsampling_conv_channels": 8, "pos_emb_max_len": 100,
    },
}  # fmt: skip
_PREDICTION = {
    "blank_as_pad": True,
    "vocab_size": len(PIECES),
    "prednet": {"pred_hidden": 16, "pred_rnn_layers": 2},
}
_JOINT = {
    "num_classes": len(PIECES),
    "vocabulary": PIECES,
    "jointnet": {"joint_hidden": 16, "activation": "relu", "encoder_hidden": 32, "pred_hidden": 16},
}
_DURATIONS = [0, 1, 2, 3, 4]
_CTC = {"feat_in": 32, "num_classes": len(PIECES), "vocabulary": PIECES}

PARAKEETS: dict[str, dict[str, Any]] = {
    "tdt": {
        **_PARAKEET,
        "target": _NEMO + "rnnt_bpe_models.EncDecRNNTBPEModel",
        "model_defaults": {"tdt_durations": _DURATIONS},
        "decoder": _PREDICTION,
        "joint": {**_JOINT, "num_extra_outputs": len(_DURATIONS)},
        "decoding": {"model_type": "tdt", "durations": _DURATIONS, "greedy": {"max_symbols": 3}},
    },
    "rnnt": {
        **_PARAKEET,
        "target": _NEMO + "rnnt_bpe_models.EncDecRNNTBPEModel",
        "decoder": _PREDICTION,
        "joint": _JOINT,
        "decoding": {"greedy": {"max_symbols": 3}},
    },
    "ctc": {
        **_PARAKEET,
        "target": _NEMO + "ctc_bpe_models.EncDecCTCModelBPE",
        "decoder": _CTC,
        "decoding": {"greedy": None},
    },
}
PARAKEETS["tdt-ctc"] = {
    **PARAKEETS["tdt"],
    "target": _NEMO + "hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
    "aux_ctc": {"decoder": _CTC},
}


def parakeet(config: dict[str, Any]) -> Any:
    """The library's model, without weights."""
    from mlx_audio.stt.models.parakeet.parakeet import Model, ModelConfig

    return Model(ModelConfig.from_dict(json.loads(json.dumps(config))))


def write_parakeet(folder: Path, kind: str, *, seed: int = 0) -> Path:
    return write(folder, PARAKEETS[kind], random_weights(parakeet(PARAKEETS[kind]), seed))


def library_parakeet(folder: Path) -> Any:
    model = parakeet(json.loads((folder / "config.json").read_text()))
    model.load_weights(str(folder / "model.safetensors"))
    return model


def random_weights(model: Any, seed: int) -> dict[str, Array]:
    """Large enough that what comes out depends on what goes in."""
    draw = np.random.default_rng(seed)
    return {name: _random(name, array.shape, draw) for name, array in tree_flatten(model.parameters())}


def _random(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    values = draw.standard_normal(shape)
    if name.endswith("running_var"):
        return np.asarray(0.5 + np.abs(values), np.float32)
    if len(shape) < 2:
        return np.asarray(values * 0.1 + ("norm" in name and name.endswith("weight")), np.float32)
    return np.asarray(values * 3 / np.sqrt(np.prod(shape[1:])), np.float32)


def write(folder: Path, config: dict[str, Any], weights: dict[str, Array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(each) for name, each in weights.items()})
    return folder


def speechlike(seconds: float, seed: int = 0) -> Array:
    """Noise that swells and fades: no speech, but no two windows of it are alike."""
    draw = np.random.default_rng(seed)
    noise = draw.standard_normal(round(16_000 * seconds))
    swell = np.abs(np.sin(np.arange(len(noise)) / (1500 + 300 * seed)))
    return np.asarray(0.2 * noise * swell, np.float32)


def word_tokenizer(folder: Path, words: list[str], special: list[str]) -> tokenizers.Tokenizer:
    """Writes a tokenizer.json: whole words, and special tokens after them."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in special])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return backend
