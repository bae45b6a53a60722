"""Tiny random models of mlx-audio's families, as model folders, and the same models as the library runs them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
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


_QWEN_WORDS = [
    "[UNK]", "system", "user", "assistant", "language", "English", "German", "the", "cat", "sat", "on", "mat",
]  # fmt: skip
_QWEN_CONTROL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>", "<asr_text>",
]  # fmt: skip
_TEXT = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10_000.0,
}  # fmt: skip


class Words:
    """The tokenizer of a folder, as the backend is handed one."""

    def __init__(self, folder: Path) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._backend.decode(list(tokens))

    def token(self, name: str) -> int | None:
        return self._backend.token_to_id(name)


def qwen3_asr(config: dict[str, Any]) -> Any:
    from mlx_audio.stt.models.qwen3_asr.config import ModelConfig
    from mlx_audio.stt.models.qwen3_asr.qwen3_asr import Qwen3ASRModel

    return Qwen3ASRModel(ModelConfig.from_dict(config))


def write_qwen3_asr(folder: Path, *, seed: int = 1) -> Path:
    """With the names and the layout of Hugging Face's files."""
    words = word_tokenizer(folder, _QWEN_WORDS, _QWEN_CONTROL)
    config = {
        "model_type": "qwen3_asr",
        "support_languages": ["English", "German"],
        "thinker_config": {
            "audio_config": {
                "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32,
                "d_model": 32, "max_source_positions": 200, "n_window": 50, "n_window_infer": 200, "output_dim": 24,
                "downsample_hidden_size": 6,
            },
            "text_config": {**_TEXT, "vocab_size": words.get_vocab_size(), "tie_word_embeddings": True},
            "audio_token_id": words.token_to_id("<|audio_pad|>"),
        },
    }  # fmt: skip
    weights = random_weights(qwen3_asr(config), seed)
    stored = {f"thinker.{name}": _for_torch(name, each) for name, each in weights.items()}
    return write(folder, config, stored)


def library_qwen3_asr(folder: Path) -> Any:
    from transformers import WhisperFeatureExtractor

    model = qwen3_asr(json.loads((folder / "config.json").read_text()))
    model.load_weights(list(model.sanitize(mx.load(str(folder / "model.safetensors"))).items()))
    model._feature_extractor = WhisperFeatureExtractor(feature_size=16)
    model._tokenizer = _LibraryTokenizer(folder)
    return model


class _LibraryTokenizer:
    """As much of a tokenizer of transformers as the library asks for."""

    def __init__(self, folder: Path) -> None:
        self._words = Words(folder)

    def encode(self, text: str, return_tensors: str) -> Array:
        return np.array([self._words.encode(text)])

    def convert_tokens_to_ids(self, name: str) -> int | None:
        return self._words.token(name)


def write_moonshine(folder: Path, *, seed: int = 2) -> Path:
    """With the names and the layout of Hugging Face's files."""
    word_tokenizer(folder, ["<unk>", "<s>", "</s>", "the", "cat", "sat", "on", "mat"], [])
    config = {
        "model_type": "moonshine", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 48,
        "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    weights = random_weights(moonshine(config), seed)
    return write(folder, config, {f"model.{name}": _for_torch(name, each) for name, each in weights.items()})


def moonshine(config: dict[str, Any]) -> Any:
    from mlx_audio.stt.models.moonshine.moonshine import Model, ModelConfig

    return Model(ModelConfig.from_dict(config))


def library_moonshine(folder: Path) -> Any:
    model = moonshine(json.loads((folder / "config.json").read_text()))
    model.load_weights(list(model.sanitize(mx.load(str(folder / "model.safetensors"))).items()))
    return model


TEKKEN_CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"]
TEKKEN_MERGES = [b"la", b"ng", b"lang", b":e", b":en"]
FIRST_TEXT_TOKEN = 20


def write_tekken(folder: Path) -> Path:
    pieces = [*(bytes([byte]) for byte in range(256)), *TEKKEN_MERGES]
    content = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
            "default_vocab_size": FIRST_TEXT_TOKEN + len(pieces),
            "default_num_special_tokens": FIRST_TEXT_TOKEN,
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(each).decode()} for rank, each in enumerate(pieces)],
        "special_tokens": [{"rank": rank, "token_str": name} for rank, name in enumerate(TEKKEN_CONTROL)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def write_voxtral(folder: Path, *, seed: int = 1) -> Path:
    """Its window has six seconds."""
    write_tekken(folder)
    config = {
        "model_type": "voxtral",
        "audio_token_id": TEKKEN_CONTROL.index("[AUDIO]"),
        "audio_config": {
            "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32,
            "d_model": 32, "max_source_positions": 300, "intermediate_size": 128,
        },
        "text_config": {
            **_TEXT, "model_type": "llama", "vocab_size": FIRST_TEXT_TOKEN + 256 + len(TEKKEN_MERGES),
            "tie_word_embeddings": False,
        },
    }  # fmt: skip
    return write(folder, config, random_weights(voxtral(config), seed))


def voxtral(config: dict[str, Any]) -> Any:
    from mlx_audio.stt.models.voxtral.voxtral import Model, ModelConfig

    return Model(ModelConfig.from_dict(config))


def library_voxtral(folder: Path) -> Any:
    model = voxtral(json.loads((folder / "config.json").read_text()))
    model.load_weights(str(folder / "model.safetensors"))
    ends = [TEKKEN_CONTROL.index(name) for name in ("</s>", "[/INST]", "<pad>")]
    model._processor = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_ids=ends))
    return model


def _for_torch(name: str, array: Array) -> Array:
    """Convolutions with the axes of PyTorch's files."""
    if "conv" not in name or not name.endswith("weight"):
        return array
    if array.ndim == 3:
        return np.ascontiguousarray(array.transpose(0, 2, 1))
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if array.ndim == 4 else array


POCKET_VOICES = ("alba", "marius")


def write_pocket_tts(folder: Path, *, seed: int = 1) -> Path:
    words = ["[UNK]", ".", "!", "...", "?", "the", "The", "cat", "sat", "mat"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "pocket_tts",
        "flow_lm": {
            "dtype": "float32",
            "flow": {"dim": 16, "depth": 2},
            "transformer": {
                "hidden_scale": 2, "max_period": 10_000, "d_model": 32, "num_heads": 4, "num_layers": 2,
            },
            "lookup_table": {
                "dim": 32, "n_bins": len(words), "tokenizer": "huggingface", "tokenizer_path": "tokenizer.json",
            },
        },
        "mimi": {
            "dtype": "float32", "sample_rate": 24_000, "channels": 1, "frame_rate": 12.5,
            "seanet": {
                "dimension": 16, "channels": 1, "n_filters": 4, "n_residual_layers": 1, "ratios": [6, 5, 4],
                "kernel_size": 7, "residual_kernel_size": 3, "last_kernel_size": 3, "dilation_base": 2,
                "pad_mode": "constant", "compress": 2,
            },
            "transformer": {
                "d_model": 16, "input_dimension": 16, "output_dimensions": [16], "num_heads": 2, "num_layers": 1,
                "layer_scale": 0.01, "context": 250, "dim_feedforward": 32,
            },
            "quantizer": {"dimension": 8, "output_dimension": 16},
        },
    }  # fmt: skip
    write(folder, config, _quiet(random_weights(pocket_tts({**config, "model_path": str(folder)}), seed), "decoder"))
    (folder / "voices").mkdir(exist_ok=True)
    for number, name in enumerate(POCKET_VOICES):
        prompt = np.random.default_rng(number).standard_normal((1, 5, 32)).astype(np.float32)
        mx.save_safetensors(str(folder / "voices" / f"{name}.safetensors"), {"audio_prompt": mx.array(prompt)})
    return folder


def pocket_tts(config: dict[str, Any]) -> Any:
    from mlx_audio.tts.models.pocket_tts.pocket_tts import Model, ModelConfig

    return Model(ModelConfig.from_dict(config))


def library_pocket_tts(folder: Path) -> Any:
    model = pocket_tts({**json.loads((folder / "config.json").read_text()), "model_path": str(folder)})
    model.load_weights(list(mx.load(str(folder / "model.safetensors")).items()))
    return model


QWEN_VOICES = ("vivian", "ryan")


def write_qwen3_tts(folder: Path, *, sort: str = "custom_voice", seed: int = 1) -> Path:
    words = ["[UNK]", "assistant", "user", "the", "cat", "sat", "on", "mat", "happy"]
    control = ["<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_bos>", "<tts_eos>"]
    backend = word_tokenizer(folder, words, control)
    decoder = {**_TEXT, "hidden_size": 32, "num_code_groups": 4}
    config: dict[str, Any] = {
        "model_type": "qwen3_tts", "tts_model_type": sort, "tts_model_size": "1b7", "sample_rate": 24_000,
        **{f"tts_{name}_token_id": backend.token_to_id(f"<tts_{name}>") for name in ("pad", "bos", "eos")},
        "talker_config": {
            **decoder, "vocab_size": 1040, "text_hidden_size": 24, "text_vocab_size": backend.get_vocab_size(),
            "rope_scaling": {"interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
            "codec_eos_token_id": 20, "codec_think_id": 21, "codec_nothink_id": 22, "codec_think_bos_id": 23,
            "codec_think_eos_id": 24, "codec_pad_id": 25, "codec_bos_id": 26, "codec_language_id": {"english": 27},
            "spk_id": dict(zip(QWEN_VOICES, (28, 29), strict=True)) if sort == "custom_voice" else {},
            "spk_is_dialect": {},
            "code_predictor_config": {**decoder, "vocab_size": 16, "num_hidden_layers": 1},
        },
    }  # fmt: skip
    codec = {
        "decode_upsample_rate": 192,
        "decoder_config": {
            "latent_dim": 16, "codebook_dim": 16, "codebook_size": 16, "decoder_dim": 16, "hidden_size": 16,
            "intermediate_size": 24, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
            "num_hidden_layers": 1, "num_quantizers": 4, "num_semantic_quantizers": 1, "semantic_codebook_size": 16,
            "sliding_window": 8, "upsample_rates": [4, 3, 2, 2], "upsampling_ratios": [2, 2],
            "vector_quantization_hidden_dimension": 16,
        },
    }  # fmt: skip
    model, vocoder = qwen3_tts(config, codec)
    write(folder / "speech_tokenizer", codec, _quiet(random_weights(vocoder, seed + 1), "decoder.decoder"))
    weights = random_weights(model, seed)
    weights["talker.codec_head.weight"] *= 0.05  # it ends after some codes, not after as many as it may write
    return write(folder, config, weights)


def qwen3_tts(config: dict[str, Any], codec: dict[str, Any]) -> tuple[Any, Any]:
    from mlx_audio.tts.models.qwen3_tts.config import ModelConfig, Qwen3TTSTokenizerConfig
    from mlx_audio.tts.models.qwen3_tts.qwen3_tts import Model
    from mlx_audio.tts.models.qwen3_tts.speech_tokenizer import Qwen3TTSSpeechTokenizer

    model = Model(ModelConfig.from_dict(json.loads(json.dumps(config))))
    settings = Qwen3TTSTokenizerConfig(decoder_config=dict(codec["decoder_config"]))
    settings.decode_upsample_rate = codec["decode_upsample_rate"]
    return model, Qwen3TTSSpeechTokenizer(settings)


def library_qwen3_tts(folder: Path) -> Any:
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, folder / "speech_tokenizer")]
    model, vocoder = qwen3_tts(*configs)
    model.load_weights(str(folder / "model.safetensors"))
    vocoder.load_weights(str(folder / "speech_tokenizer" / "model.safetensors"))
    model.eval()
    vocoder.eval()
    model.load_speech_tokenizer(vocoder)
    model.tokenizer = Words(folder)
    return model


def _quiet(weights: dict[str, Array], part: str) -> dict[str, Array]:
    """Sound of random weights would be clipped."""
    return {name: each * 0.3 if part in name and each.ndim == 3 else each for name, each in weights.items()}


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
