"""Gemma 4's audio features equal those of mlx-vlm's extractor, with one token per feature of the audio tower."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.errors import MediaRefused, ModelError
from millstream.media.limits import MediaLimits
from millstream.media.preprocessor import load_preprocessor
from millstream.media.processors.base import ModelFiles
from millstream.media.processors.gemma_audio import Gemma4AudioProcessor
from support.audio_files import tone, wav

CONFIG = {"model_type": "gemma4", "audio_token_id": 95, "image_token_id": 90, "vision_config": {}, "audio_config": {}}
NAMES = {90: "<|image|>", 95: "<|audio|>"}
LENGTHS = [161, 320, 321, 480, 481, 800, 1000, 4_000, 15_999, 16_000, 16_001, 31_234]


def extractor(**settings: Any) -> Any:
    from mlx_vlm.models.gemma4.audio_feature_extractor import Gemma4AudioFeatureExtractor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its highest band lies between two FFT bins; so does ours
        return Gemma4AudioFeatureExtractor(**settings)


def processor(**settings: Any) -> Gemma4AudioProcessor:
    return Gemma4AudioProcessor(ModelFiles(CONFIG, audio=settings), NAMES[95])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"preemphasis": 0.97},
    {"preemphasis": 0.9, "preemphasis_htk_flavor": False, "fft_overdrive": True, "input_scale_factor": 2.5},
    {"per_bin_mean": [0.1 * n for n in range(128)], "per_bin_stddev": [1 + 0.1 * n for n in range(128)]},
    {"min_frequency": 125.0, "max_frequency": 7600.0, "mel_floor": 1e-5, "frame_length_ms": 32.0},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_features_are_those_of_mlx_vlm(length: int, settings: dict[str, Any]) -> None:
    samples = tone(300 + length, 2)[:length]
    given = extractor(**settings)([samples])
    theirs = given["input_features"][0][given["input_features_mask"][0]]
    if not len(theirs):
        with pytest.raises(MediaRefused, match="too short"):
            processor(**settings).prepare(samples)
        return
    ours = processor(**settings).prepare(samples).tensors["input_features"]
    assert (ours.shape, ours.dtype) == ((1, *theirs.shape), np.float32)
    assert ours.flags.c_contiguous
    # mlx-vlm computes in single precision, which shows where a band is almost silent.
    np.testing.assert_allclose(ours[0], theirs, atol=2e-3 if settings.get("mel_floor") else 1e-3)
    assert np.abs(ours[0] - theirs).mean() < 5e-5


@pytest.mark.parametrize("length", [*LENGTHS, 480_000])
def test_tokens_are_counted_as_transformers_does(length: int) -> None:
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    class Counter:
        """The attributes that transformers needs for the count."""

        feature_extractor = extractor()
        audio_seq_length = 750

    prepared = processor().prepare(np.zeros(length, np.float32))
    assert prepared.feature_tokens == Gemma4Processor._compute_audio_num_tokens(Counter, np.zeros(length), 16_000)  # type: ignore[arg-type]
    assert prepared.text == f"<|audio>{'<|audio|>' * prepared.feature_tokens}<audio|>"
    assert prepared.kind == "audio"


def test_audio_that_is_too_short() -> None:
    with pytest.raises(MediaRefused, match=r"of 10\.0 ms is too short for this model: it needs more than 10 ms"):
        processor().prepare(np.zeros(160, np.float32))


def write(folder: Path, config: dict[str, Any], **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(more))
    return folder


def token_bytes(token: int) -> bytes:
    return NAMES.get(token, "").encode()


def test_settings_come_from_the_folder(tmp_path: Path) -> None:
    saved = {"feature_extractor": {"sampling_rate": 8_000, "frame_length": 160, "hop_length": 80, "feature_size": 128}}
    folder = write(tmp_path, CONFIG, audio_seq_length=25, **saved)
    preprocessor = load_preprocessor(folder, token_bytes, MediaLimits())
    assert preprocessor is not None
    assert preprocessor.placeholders["audio"].text == "<|audio|>"
    assert preprocessor.preprocess("audio", wav(tone(440, 0.98, 48_000), 48_000)).tensors["input_features"].shape == (
        1,
        97,
        128,
    )
    with pytest.raises(MediaRefused, match="this model takes at most 1 s per file"):
        preprocessor.preprocess("audio", wav(tone(440, 1.5)))


@pytest.mark.parametrize("audio", [{}, {"audio_config": None}])
def test_model_sizes_without_an_audio_tower_take_no_audio(audio: dict[str, Any], tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "audio_config"} | audio
    preprocessor = load_preprocessor(write(tmp_path, config), token_bytes, MediaLimits())
    assert preprocessor is not None
    assert preprocessor.placeholders.keys() == {"image"}


def test_a_tokenizer_without_the_token(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not have the audio token"):
        load_preprocessor(write(tmp_path, {**CONFIG, "audio_token_id": 7}), token_bytes, MediaLimits())
