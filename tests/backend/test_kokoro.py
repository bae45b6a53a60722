"""Kokoro's parts against NumPy, batches against each piece alone, and the layouts in which it is published."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from millstream.backend.device import current_device
from millstream.backend.speech.kokoro.layers import Convolution, Lstm, Upsampling
from millstream.backend.speech.kokoro.network import Kokoro
from millstream.backend.speech.kokoro.rows import Rows
from millstream.backend.speech.kokoro.snake import fused_snake, snake
from millstream.backend.speech.kokoro.source import Fourier
from millstream.backend.speech.kokoro.tensors import Tensors
from millstream.backend.speech.loading import load_speaker
from millstream.backend.speech.settings import SpeechSettings
from millstream.backend.speech.speaker import Speaker
from millstream.engine.speech.messages import Piece
from millstream.engine.speech.plan import PieceInput
from millstream.engine.speech.scheduler import SpeechScheduler
from millstream.errors import ModelError
from millstream.loading.backends import speech_backend
from millstream.loading.settings import EngineSettings
from millstream.models.checks import check_model
from millstream.models.kokoro_config import read_kokoro_config
from millstream.models.source import ModelSource, find_local
from millstream.models.speech_layout import read_speech_layout
from millstream.speech_types import Samples
from support.engines import engine
from support.speeches import sound_of, spoken_request
from support.tiny_kokoro import VOICES, write_kokoro

LENGTHS = (12, 30, 9)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def load(folder: Path) -> Speaker:
    return load_speaker(SpeechSettings(folder, read_speech_layout(folder)), current_device())


def piece(length: int, speed: float = 1.0, voice: tuple[tuple[str, float], ...] = ()) -> PieceInput:
    return PieceInput(length, 0, Piece((np.arange(length, dtype=np.int32) % 60 + 1).tobytes()), voice, speed)


def speak(speaker: Speaker, *pieces: PieceInput) -> list[Samples]:
    (samples,) = speaker.speak(pieces)
    return list(samples)


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (7, 3), (11, 5)])
def test_a_convolution_by_matmuls_is_a_convolution(kernel: int, dilation: int) -> None:
    x, weight, bias = random(2, 40, 6), random(5, 6, kernel, seed=1), random(5, seed=2)
    tensors = Tensors({"a.weight": mx.array(weight), "a.bias": mx.array(bias)}, mx.float32)
    found = Convolution.of(tensors, "a", kernel, dilation)(mx.array(x))
    side = (kernel - 1) // 2 * dilation
    padded = np.pad(x, ((0, 0), (side, side), (0, 0)))
    expected = sum(padded[:, k * dilation : k * dilation + 40] @ weight[:, :, k].T for k in range(kernel)) + bias
    np.testing.assert_allclose(np.array(found), expected, atol=1e-4)


def test_an_upsampling_by_a_matmul_is_a_transposed_convolution() -> None:
    stride, length = 6, 11
    x, weight, bias = random(1, length, 4), random(4, 3, 2 * stride, seed=1), random(3, seed=2)
    tensors = Tensors({"a.weight": mx.array(weight), "a.bias": mx.array(bias)}, mx.float32)
    found = np.array(Upsampling.of(tensors, "a", stride)(mx.array(x)))
    full = np.zeros(((length + 1) * stride, 3), np.float32)
    for t in range(length):
        full[t * stride : (t + 2) * stride] += np.einsum("i,iok->ko", x[0, t], weight)
    expected = full[stride // 2 : stride // 2 + length * stride] + bias
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


def test_weight_normalisation_is_folded() -> None:
    v, g = random(5, 6, 3), random(5, 1, 1, seed=1)
    tensors = Tensors({"a.weight_v": mx.array(v), "a.weight_g": mx.array(g)}, mx.float32)
    expected = v / np.sqrt((v**2).sum((1, 2), keepdims=True)) * g
    np.testing.assert_allclose(np.array(tensors.convolution("a", 3)), expected, atol=1e-6)
    with pytest.raises(ModelError, match="has no kernel of 9"):
        tensors.convolution("a", 9)


@pytest.mark.parametrize("make", [lambda: snake, lambda: fused_snake(mx.float32)], ids=["plain", "fused"])
def test_the_snake_activation_is_one(make: Callable[[], Callable[..., mx.array]]) -> None:
    x, scale, shift = 20 * random(1, 50, 8), random(1, 1, 8, seed=1), random(1, 1, 8, seed=2)
    u = x * scale + shift
    found = np.array(make()(mx.array(x), mx.array(scale), mx.array(shift)))
    np.testing.assert_allclose(found, u + np.sin(u) ** 2, atol=2e-5)


def test_the_fourier_transforms_undo_each_other() -> None:
    signal = random(1, 600)
    fourier = Fourier(20, 5)
    spectrum = fourier.transform(mx.array(signal), Rows((600,)))
    assert spectrum.shape == (1, 121, 22)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(20) / 20)
    expected = np.fft.rfft(signal[0, 290:310] * window)
    np.testing.assert_allclose(np.array(spectrum)[0, 60, :11], np.abs(expected), atol=1e-5)
    back = fourier.inverse(spectrum[..., :11], spectrum[..., 11:], Rows((121,)))
    np.testing.assert_allclose(np.array(back), signal, atol=1e-5)


def test_an_lstm_runs_in_both_directions() -> None:
    width, length = 4, 7
    names = [
        f"a.{part}{end}" for end in ("_l0", "_l0_reverse") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    shapes = [(16, 3), (16, 4), (16,), (16,)] * 2
    stored = {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    x = random(1, length, 3, seed=20)
    found = np.array(
        Lstm(Tensors({n: mx.array(v) for n, v in stored.items()}, mx.float32), "a")(mx.array(x), Rows((7,)))
    )

    def sigmoid(values: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-values))

    for end, part, order in (("_l0", slice(0, 4), range(7)), ("_l0_reverse", slice(4, 8), range(6, -1, -1))):
        h = c = np.zeros(width)
        for t in order:
            gates = stored[f"a.weight_ih{end}"] @ x[0, t] + stored[f"a.weight_hh{end}"] @ h
            i, f, g, o = np.split(gates + stored[f"a.bias_ih{end}"] + stored[f"a.bias_hh{end}"], 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            np.testing.assert_allclose(found[0, t, part], h, atol=1e-5)


def test_a_batch_gives_each_piece_what_it_gets_alone(tiny_model: Callable[[str], Path]) -> None:
    speaker = load(tiny_model("kokoro"))
    mixed = (("af_bella", 2.0), ("am_adam", 1.0))
    pieces = [piece(LENGTHS[0]), piece(LENGTHS[1], 1.3, mixed), piece(LENGTHS[2], 0.8)]
    together = speak(speaker, *pieces)
    for alone, found in zip((speak(speaker, each)[0] for each in pieces), together, strict=True):
        assert alone.shape == found.shape
        assert np.abs(alone).max() > 1e-3
        np.testing.assert_allclose(found, alone, atol=1e-5)


def test_the_same_text_sounds_the_same_and_another_voice_does_not(tiny_model: Callable[[str], Path]) -> None:
    speaker = load(tiny_model("kokoro"))
    first, again = speak(speaker, piece(20))[0], speak(speaker, piece(20))[0]
    np.testing.assert_array_equal(first, again)
    other = speak(speaker, piece(20, voice=(("am_adam", 1.0),)))[0]
    assert first.shape != other.shape or np.abs(first - other).max() > 1e-4
    assert len(speak(speaker, piece(20, speed=0.5))[0]) > len(first) > len(speak(speaker, piece(20, speed=3.0))[0])
    assert [voice.name for voice in speaker.voices] == ["af_heart", *sorted(set(VOICES) - {"af_heart"})]


@pytest.mark.parametrize("layout", ["mlx", "pth"])
def test_other_layouts_are_the_same_model(layout: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = find_local(str(write_kokoro(tmp_path / "kokoro", layout)))
    assert source is not None
    check_model(source.kind, source.path)
    expected = speak(load(tiny_model("kokoro")), piece(15))[0]
    np.testing.assert_allclose(speak(load(source.path), piece(15))[0], expected, atol=1e-5)


def test_it_computes_in_half_precision(tiny_model: Callable[[str], Path]) -> None:
    """As on a GPU, with the weights' own type."""
    folder = tiny_model("kokoro")
    stored = mx.load(str(folder / "kokoro-v1_0.safetensors"))
    assert isinstance(stored, dict)
    tokens = np.array([0, *range(1, 15), 0], np.int32)
    styles = mx.array(random(2, 16))
    network = Kokoro(stored, read_kokoro_config(folder), mx.bfloat16)
    assert {array.dtype for array in network.weights} == {mx.bfloat16, mx.float32}
    first, second = network([tokens, tokens[:9]], styles, [1.0, 1.0])
    assert first.dtype == second.dtype == np.float32
    assert len(first) > len(second) > 0 and np.isfinite(first).all() and np.abs(first).max() > 1e-3


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = write_kokoro(tmp_path / "kokoro")
    save_file({"bert_encoder.scales": random(2, 2)}, folder / "kokoro-more.safetensors")
    with pytest.raises(ModelError, match="quantised weights of Kokoro are not supported"):
        load(folder)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = write_kokoro(tmp_path / "kokoro")
    (folder / "voices" / "af_bella.safetensors").write_bytes(b"12345678")
    with pytest.raises(ModelError, match=r"af_bella\.safetensors"):
        read_speech_layout(folder)
    for voice in (folder / "voices").iterdir():
        voice.unlink()
    with pytest.raises(ModelError, match="has no voices"):
        read_speech_layout(folder)
    (folder / "config.json").write_text('{"istftnet": {}, "plbert": {}}')
    with pytest.raises(ModelError, match="not the configuration of a Kokoro model"):
        load_speaker(SpeechSettings(folder, read_speech_layout(write_kokoro(tmp_path / "b"))), current_device())


def test_two_engines_speak_at_the_same_time(tiny_model: Callable[[str], Path]) -> None:
    """Each on its own thread and stream. What a library shared between them would raise, or change the sound."""
    folder = tiny_model("kokoro")
    source = ModelSource("tiny", "folder", folder)
    backend = functools.partial(speech_backend, source, EngineSettings(max_batch=4), read_speech_layout(folder))
    texts = [[number % 50 + 1, 2, 3, 4] for number in range(6)]
    sounds: dict[int, list[Samples]] = {}
    begin = threading.Barrier(2, timeout=60)

    def run(number: int) -> None:
        with engine(backend, make_scheduler=SpeechScheduler) as driver:
            begin.wait()
            driver.complete(*(spoken_request(index, [text, text]) for index, text in enumerate(texts)))
            sounds[number] = [sound_of(driver, index) for index in range(len(texts))]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(sounds) == [0, 1]
    for first, second in zip(sounds[0], sounds[1], strict=True):
        assert len(first) > 0
        np.testing.assert_array_equal(first, second)
