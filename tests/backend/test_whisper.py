"""Whisper on tiny random weights: layouts, batches, joins, languages, temperatures, the spectrogram."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.device import current_device
from millstream.backend.transcription.whisper.arithmetic import Arithmetic, VectorArithmetic, arithmetic_for
from millstream.backend.transcription.whisper.spectrogram import LogMel, mel_filters
from millstream.engine.messages import Cancel, Failed
from millstream.engine.transcription.messages import AddWindows, Options, Transcribe, WindowText
from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.models.whisper_files import whisper_tensors
from millstream.text.speech_vocabulary import speech_vocabulary
from support.engines import Driver
from support.tiers import some
from support.tiny_whisper import SECONDS, Layout, spoken, write_whisper
from support.transcriptions import GREEDY, request, texts_of, tokens_of, transcription_engine, window

WINDOWS = [spoken(0.3 + 0.08 * seed, seed) for seed in range(8)]
ASKED = {
    "greedy": GREEDY,
    "fallback": Options(language="de", words=True),
    "sampled": Options(temperatures=(0.8,), seed=3),
    "prompted": Options(prompt="a b"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper") / "tiny")


def result(text: WindowText) -> tuple[object, ...]:
    return text.language, tokens_of(text), [(segment.start, segment.end) for segment in text.segments]


def alone(driver: Driver, options: Options) -> list[WindowText]:
    driver.reset()
    for number, samples in enumerate(WINDOWS):
        driver.complete(request(number, [samples], options))
    return [texts_of(driver, number)[0] for number in range(len(WINDOWS))]


@pytest.mark.parametrize(
    ("kind", "start"),
    some([(kind, start) for kind in ASKED for start in (1, 3)], [(kind, 3) for kind in ASKED] + [("fallback", 1)]),
)
def test_rows_of_a_batch_equal_each_alone(folder: Path, kind: str, start: int) -> None:
    options = ASKED[kind]
    with transcription_engine(folder, start=start) as driver:
        expected = alone(driver, options)
        assert len({tokens_of(text) for text in expected}) > 4, "the tests' model says the same to everything"
        driver.reset()
        driver.complete(*(request(number, [samples], options) for number, samples in enumerate(WINDOWS)))
        for number, one in enumerate(expected):
            (other,) = texts_of(driver, number)
            assert result(other) == result(one)
            assert abs(other.avg_logprob - one.avg_logprob) < 1e-4
            assert abs(other.no_speech_prob - one.no_speech_prob) < 1e-5
            for mine, theirs in zip(other.segments, one.segments, strict=True):
                assert [word.text for word in mine.words] == [word.text for word in theirs.words]


@pytest.mark.parametrize("start", [1, 4])
def test_rows_with_unlike_options_equal_each_alone(folder: Path, start: int) -> None:
    """Long prompts join rows that have begun, and the other way round."""
    options = [
        GREEDY,
        replace(GREEDY, prompt="abcdefg"),
        Options(language="de", words=True),
        Options("translate", "zh", temperatures=(0.7,), seed=5),
        replace(GREEDY, quick=True),
    ]
    asked = [(number, [WINDOWS[number]], options[number % len(options)]) for number in range(len(WINDOWS))]
    with transcription_engine(folder, start=start) as driver:
        for each in asked:
            driver.complete(request(*each))
        expected = [result(texts_of(driver, number)[0]) for number, _, _ in asked]
        for order in (asked, asked[::-1]):
            driver.reset()
            driver.complete(*(request(*each) for each in order))
            assert [result(texts_of(driver, number)[0]) for number, _, _ in asked] == expected


def test_short_audio_that_is_wanted_soon_is_read_in_half_a_window(folder: Path) -> None:
    """Attention to each position twice is attention to each once, so only the missing silence makes a difference."""
    with transcription_engine(folder) as driver:
        seen: list[tuple[int, ...]] = []
        short, long = spoken(0.3 * SECONDS, 1), spoken(0.9 * SECONDS, 2)
        for number, (samples, quick) in enumerate(((short, False), (short, True), (long, False), (long, True))):
            driver.complete(request(number, [samples], replace(GREEDY, quick=quick)))
            seen.append(tokens_of(texts_of(driver, number)[0]))
        assert seen[2] == seen[3], "too long for half a window"
        assert seen[0] != seen[1], "the tests' random model hears the silence after the audio"


def test_windows_of_one_request_run_together_and_follow_the_first_ones_language(folder: Path) -> None:
    with transcription_engine(folder) as driver:
        driver.complete(request(1, WINDOWS))
        texts = texts_of(driver, 1)
        assert [text.index for text in texts] == list(range(len(WINDOWS)))
        assert len({text.language for text in texts}) == 1
        known = replace(GREEDY, language=texts[0].language)
        driver.complete(request(2, WINDOWS, known))
        assert [result(text) for text in texts_of(driver, 2)] == [result(text) for text in texts]


def test_few_rows_and_late_windows_change_nothing(folder: Path) -> None:
    with transcription_engine(folder) as driver:
        driver.complete(request(1, WINDOWS))
        expected = [result(text) for text in texts_of(driver, 1)]
    with transcription_engine(folder, rows=2) as driver:
        assert driver.facts is not None and driver.facts.max_rows == 2  # type: ignore[attr-defined]
        driver.post(Transcribe(1, GREEDY, (window(0, WINDOWS[0]),), complete=False))
        for number, samples in enumerate(WINDOWS[1:], 1):
            driver.wait(lambda number=number: len(driver.outputs.get(1, [])) >= number - 1)  # type: ignore[misc]
            driver.post(AddWindows(1, (window(number, samples),), complete=number == len(WINDOWS) - 1))
        driver.wait_ended(1)
        assert [result(text) for text in texts_of(driver, 1)] == expected


def test_cancelled_rows_leave_the_others_as_they_are(folder: Path) -> None:
    with transcription_engine(folder) as driver:
        expected = [result(text) for text in alone(driver, GREEDY)]
        driver.reset()
        for number, samples in enumerate(WINDOWS):
            driver.post(request(number, [samples]))
            driver.post(request(100 + number, [samples] * 20))
        for number in range(len(WINDOWS)):
            driver.post(Cancel(100 + number))
        driver.wait_ended(*range(len(WINDOWS)), *range(100, 100 + len(WINDOWS)))
        assert [result(texts_of(driver, number)[0]) for number in range(len(WINDOWS))] == expected
        weights = driver.facts.weight_bytes if driver.facts else 0
        driver.wait(lambda: driver.measured.memory_bytes == weights)


@pytest.mark.parametrize("layout", ["mlx", "npz"])
def test_all_layouts_give_the_same(folder: Path, tmp_path: Path, layout: Layout) -> None:
    other = write_whisper(tmp_path / layout, layout)
    found = []
    for each in (folder, other):
        with transcription_engine(each) as driver:
            driver.complete(request(1, WINDOWS[:3]))
            found.append([result(text) for text in texts_of(driver, 1)])
    assert found[0] == found[1]


def test_quantised_weights_are_unpacked(tmp_path: Path) -> None:
    folders = [write_whisper(tmp_path / name, "mlx") for name in ("packed", "plain")]
    packed: dict[str, mx.array] = {}
    plain: dict[str, mx.array] = {}
    loaded = mx.load(str(folders[0] / "weights.safetensors"))
    assert isinstance(loaded, dict)
    for name, tensor in loaded.items():
        if tensor.ndim == 2 and name.endswith(".weight"):
            weight, scales, biases = mx.quantize(tensor, group_size=32, bits=8)
            base = name.removesuffix(".weight")
            packed |= {name: weight, f"{base}.scales": scales, f"{base}.biases": biases}
            tensor = mx.dequantize(weight, scales, biases, group_size=32, bits=8)
        else:
            packed[name] = tensor
        plain[name] = tensor
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 8}}))
    found = []
    for folder, tensors in zip(folders, (packed, plain), strict=True):
        mx.save_safetensors(str(folder / "weights.safetensors"), tensors)
        with transcription_engine(folder) as driver:
            driver.complete(request(1, WINDOWS[:3]))
            found.append([result(text) for text in texts_of(driver, 1)])
    assert found[0] == found[1]


def npy(count: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(count, np.float32))
    return file.getvalue()


def archive_of(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "cannot be read"),
        (lambda data: data.replace(b"'<f4'", b"'|O8'"), "is damaged, or has a type that is not supported"),
        (lambda data: data.replace(b"'shape': (32,)", b"'shape': (64,)"), "Bad CRC-32"),
        (lambda data: archive_of({"a.npy": npy(4)[:-4]}), "its size is wrong"),
        (lambda data: archive_of({"a.npy": b"not an array"}), "is damaged"),
    ],
    ids=["cut", "objects", "changed", "short", "other"],
)
def test_damaged_archives_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = write_whisper(tmp_path / "npz", "npz") / "weights.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        whisper_tensors(path.parent)


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path / "bare", "npz")
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_vocab": 51_866}))
    with pytest.raises(ModelError, match=r"hf download openai/whisper-large-v3 tokenizer\.json --local-dir"):
        speech_vocabulary(ModelSource("bare", "folder", folder))


def test_a_model_for_english_alone_has_no_language_token(tmp_path: Path) -> None:
    with transcription_engine(write_whisper(tmp_path / "en", multilingual=False)) as driver:
        facts: Any = driver.facts
        assert (facts.languages, facts.detects_language, facts.translates) == (("en",), False, False)
        driver.complete(request(1, WINDOWS[:1]))
        (text,) = texts_of(driver, 1)
        assert (text.language, text.prompt_tokens) == ("en", 1)


def test_language_and_task_are_told_to_the_model(folder: Path) -> None:
    with transcription_engine(folder) as driver:
        for number, options in enumerate(
            [replace(GREEDY, language="en"), replace(GREEDY, language="de"), Options("translate", "de")]
        ):
            driver.complete(request(number, WINDOWS, options))
        found = [[tokens_of(text) for text in texts_of(driver, number)] for number in range(3)]
        assert found[0] != found[1] != found[2]


def test_text_that_looks_wrong_is_tried_again_warmer(folder: Path) -> None:
    """A random model is never sure of what it hears."""
    with transcription_engine(folder) as driver:
        driver.complete(request(1, WINDOWS, Options(temperatures=(0.0, 0.5, 1.0))))
        assert {text.temperature for text in texts_of(driver, 1)} - {0.0}
        driver.complete(request(2, WINDOWS, Options(temperatures=(0.5,), seed=1)))
        driver.complete(request(3, WINDOWS, Options(temperatures=(0.5,), seed=1)))
        driver.complete(request(4, WINDOWS, Options(temperatures=(0.5,), seed=2)))
        seeded = [[tokens_of(text) for text in texts_of(driver, number)] for number in (2, 3, 4)]
        assert seeded[0] == seeded[1] != seeded[2]


def test_mlx_s_own_functions_give_the_same(folder: Path) -> None:
    """What other devices run."""
    found = []
    for disabled in (("calibration",), ("calibration", "mkl-layout")):
        with transcription_engine(folder, start=4, disabled=disabled) as driver:
            driver.complete(request(1, WINDOWS, replace(GREEDY, words=True)))
            found.append([result(text) for text in texts_of(driver, 1)])
    assert found[0] == found[1]


def test_the_load_measures_how_many_windows_begin_at_once(folder: Path) -> None:
    with transcription_engine(folder, start=1, disabled=()) as driver:
        driver.complete(request(1, WINDOWS[:1]))
        assert texts_of(driver, 1)


def test_two_engines_at_once_on_two_threads(folder: Path, tmp_path: Path) -> None:
    """Each has windows and filters of its own; one is freed and loaded again while the other runs."""
    folders = [folder, write_whisper(tmp_path / "other", seed=1)]
    expected = []
    for each in folders:
        with transcription_engine(each) as driver:
            driver.complete(request(1, WINDOWS))
            expected.append([result(text) for text in texts_of(driver, 1)])
    assert expected[0] != expected[1]

    def run(which: int) -> list[list[tuple[object, ...]]]:
        found = []
        for _ in range(1 + which):
            with transcription_engine(folders[which]) as driver:
                for number in range(3):
                    driver.complete(request(number, WINDOWS))
                    found.append([result(text) for text in texts_of(driver, number)])
        return found

    with ThreadPoolExecutor(2) as pool:
        for which, found in enumerate(pool.map(run, range(2))):
            assert all(each == expected[which] for each in found)


def test_a_window_without_samples_fails_nobody_else(folder: Path) -> None:
    with transcription_engine(folder) as driver:
        driver.complete(request(1, [np.zeros(0, np.float32)]), request(2, WINDOWS[:1]))
        assert not isinstance(driver.ends[2][0], Failed)


def reference_log_mel(samples: Any, mels: int, frames: int) -> Any:
    """The same by NumPy's FFT."""
    audio = np.zeros(frames * 160)
    audio[: len(samples)] = samples
    padded = np.pad(audio, 200, mode="reflect")
    hann = np.hanning(401)[:-1]
    framed = np.stack([padded[160 * n : 160 * n + 400] * hann for n in range(frames)])
    power = np.abs(np.fft.rfft(framed)) ** 2
    logs = np.log10(np.maximum(power @ mel_filters(mels).T.astype(np.float64), 1e-10))
    return (np.maximum(logs, logs.max() - 8) + 4) / 4


def test_the_spectrogram_is_that_of_a_fourier_transform() -> None:
    samples = spoken(0.9, 4)
    mel = LogMel(80, 100)
    both = np.asarray(mel([samples, spoken(0.5, 5)]))
    np.testing.assert_allclose(both[0], reference_log_mel(samples, 80, 100), atol=1e-4)
    np.testing.assert_array_equal(both[:1], np.asarray(mel([samples])))


@pytest.mark.parametrize("mels", [80, 128])
def test_the_spectrogram_is_that_of_mlx_audio(mels: int) -> None:
    audio = pytest.importorskip("mlx_audio.stt.models.whisper.audio", reason="needs mlx-audio")
    samples = 0.1 * spoken(2.0, 6) + 0.1 * np.random.default_rng(0).standard_normal(32_000).astype(np.float32)
    theirs = np.asarray(audio.log_mel_spectrogram(mx.array(samples), n_mels=mels))
    ours = np.asarray(LogMel(mels, 200)([samples]))[0]
    np.testing.assert_allclose(ours, theirs[:200], atol=2e-4)
    assert np.abs(ours - theirs[:200]).mean() < 1e-6


def test_vector_arithmetic_equals_mlx_s() -> None:
    plain, fast = Arithmetic(), VectorArithmetic()
    keys = [mx.random.normal((2, 3, 200, 16), key=mx.random.key(seed)) for seed in range(3)]
    np.testing.assert_allclose(np.asarray(fast.attend(*keys)), np.asarray(plain.attend(*keys)), atol=1e-5)
    x = 5 * mx.random.normal((200, 500), key=mx.random.key(7))
    np.testing.assert_allclose(np.asarray(fast.gelu(x)), np.asarray(plain.gelu(x)), atol=1e-5)
    np.testing.assert_allclose(np.asarray(fast.logsumexp(x)), np.asarray(plain.logsumexp(x)), rtol=1e-5)
    assert type(arithmetic_for(current_device(), frozenset({"mkl-layout"}))) is Arithmetic


def test_blocks_of_queries_equal_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [mx.random.normal((1, 2, 300, 8), key=mx.random.key(seed)) for seed in range(3)]
    whole = np.asarray(VectorArithmetic().attend(*keys))
    monkeypatch.setattr(VectorArithmetic, "SCORES", 10_000)
    np.testing.assert_allclose(np.asarray(VectorArithmetic().attend(*keys)), whole, atol=1e-6)


def test_windows_are_as_long_as_the_model_says(folder: Path) -> None:
    with transcription_engine(folder) as driver:
        facts: Any = driver.facts
        assert facts.window_seconds == SECONDS
        long = spoken(3 * SECONDS, 9)
        driver.complete(request(1, [long]), request(2, [long[: int(16_000 * SECONDS)]]))
        assert tokens_of(texts_of(driver, 1)[0]) == tokens_of(texts_of(driver, 2)[0])
