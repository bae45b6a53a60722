"""What Gemma 4 is given of a sound is what mlx-vlm's own extractor gives, and has as many places as its tower fills."""

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
from millstream.media.processors.gemma_audio import Gemma4SoundProcessor
from support.audio_files import tone, wav

CONFIG = {"model_type": "gemma4", "audio_token_id": 95, "image_token_id": 90, "vision_config": {}, "audio_config": {}}
NAMES = {90: "<|image|>", 95: "<|audio|>"}
LENGTHS = [161, 320, 321, 480, 481, 800, 1000, 4_000, 15_999, 16_000, 16_001, 31_234]


def extractor(**sounds: Any) -> Any:
    from mlx_vlm.models.gemma4.audio_feature_extractor import Gemma4AudioFeatureExtractor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its highest band lies between two frequencies; so does ours
        return Gemma4AudioFeatureExtractor(**sounds)


def processor(**sounds: Any) -> Gemma4SoundProcessor:
    return Gemma4SoundProcessor(ModelFiles(CONFIG, sounds=sounds), NAMES[95])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"preemphasis": 0.97},
    {"preemphasis": 0.9, "preemphasis_htk_flavor": False, "fft_overdrive": True, "input_scale_factor": 2.5},
    {"per_bin_mean": [0.1 * n for n in range(128)], "per_bin_stddev": [1 + 0.1 * n for n in range(128)]},
    {"min_frequency": 125.0, "max_frequency": 7600.0, "mel_floor": 1e-5, "frame_length_ms": 32.0},
]


@pytest.mark.parametrize("sounds", SETTINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_features_are_those_of_mlx_vlm(length: int, sounds: dict[str, Any]) -> None:
    samples = tone(300 + length, 2)[:length]
    given = extractor(**sounds)([samples])
    theirs = given["input_features"][0][given["input_features_mask"][0]]
    if not len(theirs):
        with pytest.raises(MediaRefused, match="too short"):
            processor(**sounds).prepare(samples)
        return
    ours = processor(**sounds).prepare(samples).tensors["input_features"]
    assert (ours.shape, ours.dtype) == ((1, *theirs.shape), np.float32)
    assert ours.flags.c_contiguous
    # They compute in single precision, which shows where a band is almost silent.
    np.testing.assert_allclose(ours[0], theirs, atol=2e-3 if sounds.get("mel_floor") else 1e-3)
    assert np.abs(ours[0] - theirs).mean() < 5e-5


@pytest.mark.parametrize("length", [*LENGTHS, 480_000])
def test_places_are_counted_as_transformers_does(length: int) -> None:
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    class Counter:
        """As much of a processor as its count needs."""

        feature_extractor = extractor()
        audio_seq_length = 750

    prepared = processor().prepare(np.zeros(length, np.float32))
    assert prepared.places == Gemma4Processor._compute_audio_num_tokens(Counter, np.zeros(length), 16_000)  # type: ignore[arg-type]
    assert prepared.text == f"<|audio>{'<|audio|>' * prepared.places}<audio|>"
    assert prepared.kind == "audio"


def test_what_is_too_short() -> None:
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
    reader = load_preprocessor(folder, token_bytes, MediaLimits())
    assert reader is not None
    assert reader.marks["audio"].text == "<|audio|>"
    assert reader.read("audio", wav(tone(440, 0.98, 48_000), 48_000)).tensors["input_features"].shape == (1, 97, 128)
    with pytest.raises(MediaRefused, match="this model hears 1 s at a time"):
        reader.read("audio", wav(tone(440, 1.5)))


@pytest.mark.parametrize("audio", [{}, {"audio_config": None}])
def test_sizes_without_a_tower_take_no_sounds(audio: dict[str, Any], tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "audio_config"} | audio
    reader = load_preprocessor(write(tmp_path, config), token_bytes, MediaLimits())
    assert reader is not None
    assert reader.marks.keys() == {"image"}


def test_a_tokenizer_without_the_token(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the token that sounds stand at"):
        load_preprocessor(write(tmp_path, {**CONFIG, "audio_token_id": 7}), token_bytes, MediaLimits())
