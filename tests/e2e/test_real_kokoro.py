"""Kokoro-82M's real weights against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from millstream.backend.speech.kokoro.network import Kokoro
from millstream.backend.speech.kokoro.rows import Rows
from millstream.backend.speech.kokoro.source import Fourier
from millstream.models.kokoro_config import read_kokoro_config
from millstream.text.speech.english import EnglishPhonemes
from support.real_kokoro import OUTPUTS, by_onnx

Array = NDArray[np.float32]

TEXT = "The mill stands by the stream."
EXPORT_GAIN = 1.5
"""The ONNX file's inverse transform does not divide by the sum of squared windows; PyTorch's does."""


@pytest.fixture(scope="module")
def network(kokoro: Path) -> Kokoro:
    stored = mx.load(str(kokoro / "kokoro-v1_0.safetensors"))
    assert isinstance(stored, dict)
    return Kokoro(stored, read_kokoro_config(kokoro), mx.float32)


@pytest.fixture(scope="module")
def tokens(kokoro: Path) -> list[int]:
    vocab = read_kokoro_config(kokoro).vocab
    return [vocab[symbol] for symbol in EnglishPhonemes()(TEXT)]


@pytest.fixture(scope="module")
def style(kokoro: Path, tokens: list[int]) -> Array:
    table: Array = load_file(kokoro / "voices" / "af_heart.safetensors")["voice"]
    return table[len(tokens) - 1]


@pytest.fixture(scope="module")
def reference(kokoro: Path, tokens: list[int], style: Array) -> dict[str, Array]:
    return by_onnx(kokoro, tokens, style)


def spoken(network: Kokoro, tokens: list[int], style: Array, **options: bool) -> Array:
    return network([np.array([0, *tokens, 0], np.int32)], mx.array(style), [1.0], **options)[0]


def decibels(first: Array, second: Array) -> float:
    return float(10 * np.log10(np.mean(first**2) / np.mean(second**2)))


def log_spectrum(sound: Array) -> Array:
    frames = np.lib.stride_tricks.sliding_window_view(sound, 512)[::128] * np.hanning(512)
    found: Array = np.log(np.abs(np.fft.rfft(frames)) + 1e-4)
    return found


def correlation(first: Array, second: Array) -> float:
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


def test_length_level_and_spectrum_are_those_of_onnx_runtime(
    network: Kokoro, tokens: list[int], style: Array, reference: dict[str, Array]
) -> None:
    found, expected = spoken(network, tokens, style), reference["waveform"][0] / EXPORT_GAIN
    assert found.shape == expected.shape
    assert abs(decibels(found, expected)) < 1
    assert correlation(log_spectrum(found), log_spectrum(expected)) > 0.98


def test_the_export_is_louder_by_the_division_that_it_lacks(reference: dict[str, Array]) -> None:
    """Its own magnitudes and phases, transformed back as PyTorch does it, are its sound divided by 1.5."""
    magnitude, phase = (mx.array(reference[name].transpose(0, 2, 1)) for name in OUTPUTS[1:3])
    right = np.array(Fourier(20, 5).inverse(magnitude, phase, Rows((magnitude.shape[1],))))[0]
    np.testing.assert_allclose(right[100:-100], reference["waveform"][0, 100:-100] / EXPORT_GAIN, atol=1e-5)


def test_with_the_source_of_the_export_the_sound_is_the_same(
    network: Kokoro, tokens: list[int], style: Array, reference: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, the phase of silence is rounding errors: with those of the export, all else is equal."""
    source = mx.array(reference[OUTPUTS[3]].transpose(0, 2, 1))
    monkeypatch.setattr(Fourier, "transform", lambda self, signal, rows: source)
    found, expected = spoken(network, tokens, style), reference["waveform"][0] / EXPORT_GAIN
    assert correlation(found[100:-100], expected[100:-100]) > 0.9999
    assert abs(decibels(found[100:-100], expected[100:-100])) < 0.01
