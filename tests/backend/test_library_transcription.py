"""Transcription models on mlx-audio's modules: each window gets what the library gives it alone, in any company."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from millstream.backend.device import Device
from millstream.backend.transcription.family import SteppingFamily
from millstream.backend.transcription.loading import load_family
from millstream.backend.transcription.qwen3_asr import LANGUAGES, Qwen3Asr
from millstream.backend.transcription.settings import TranscriptionSettings
from millstream.backend.transcription.spectrograms import NemoSpectrogram, WhisperSpectrogram
from millstream.engine.transcription.messages import Options
from millstream.engine.transcription.plan import WindowStart
from millstream.text.tekken import read_tekken
from support import tiny_mlx_audio as tiny
from support.audio_files import Array
from support.library_engines import texts_of, tokens_of, transcribe, transcription_engine
from support.tiers import some

SECONDS = (3.0, 1.2, 5.5, 2.015, 0.7)
WINDOWS = [tiny.speechlike(seconds, number) for number, seconds in enumerate(SECONDS)]

Reference = Callable[[Array], list[int]]


def parakeet_tokens(model: Any, samples: Array) -> list[int]:
    result = model.generate(mx.array(samples), dtype=mx.float32)
    return [token.id for sentence in result.sentences for token in sentence.tokens]


def qwen3_asr_tokens(model: Any, samples: Array) -> list[int]:
    padded = np.pad(samples, (0, max(0, 16_000 - len(samples))))
    most = 16 + int(np.ceil(16 * len(samples) / 16_000))
    spoken = model.stream_generate(padded, language="English", system_prompt="cat mat", max_tokens=most)
    return [int(token) for token, _ in spoken]


def voxtral_tokens(folder: Path, model: Any, samples: Array) -> list[int]:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=6)
    features = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"]
    name = tiny.TEKKEN_CONTROL.index
    prompt = [name("<s>"), name("[INST]"), name("[BEGIN_AUDIO]"), *[name("[AUDIO]")] * 75, name("[/INST]")]
    prompt += [*read_tekken(folder).encode("lang:en"), name("[TRANSCRIBE]")]
    spoken = model.stream_generate(
        mx.array([prompt]),
        input_features=mx.array(features).transpose(0, 2, 1),
        max_tokens=8 + int(np.ceil(16 * len(samples) / 16_000)),
        sampler=lambda logits: mx.argmax(logits, -1),
    )
    return [int(token) for token, _ in spoken]


def moonshine_tokens(model: Any, samples: Array) -> list[int]:
    written: list[int] = []
    model._decode_tokens = lambda tokens: written.extend(tokens) or ""
    model.generate(mx.array(samples), max_tokens=min(64, 8 + int(np.ceil(13 * len(samples) / 16_000))))
    return written


def written(family: str, folder: Path) -> tuple[Path, Reference]:
    """A model of a family in a folder, and what the library writes with it."""
    if family in tiny.PARAKEETS:
        tiny.write_parakeet(folder, family, seed=3)
        return folder, functools.partial(parakeet_tokens, tiny.library_parakeet(folder))
    if family == "qwen3_asr":
        tiny.write_qwen3_asr(folder)
        return folder, functools.partial(qwen3_asr_tokens, tiny.library_qwen3_asr(folder))
    if family == "voxtral":
        tiny.write_voxtral(folder)
        return folder, functools.partial(voxtral_tokens, folder, tiny.library_voxtral(folder))
    tiny.write_moonshine(folder)
    return folder, functools.partial(moonshine_tokens, tiny.library_moonshine(folder))


OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_asr": {"language": "en", "prompt": "cat mat"},
    "voxtral": {"language": "en"},
}
FAMILIES = ["tdt", "tdt-ctc", "rnnt", "qwen3_asr", "voxtral", "moonshine"]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_windows_at_once_give_what_the_library_gives_each(family: str, tmp_path: Path) -> None:
    folder, reference = written(family, tmp_path)
    expected = [reference(samples) for samples in WINDOWS]
    assert len({tuple(each) for each in expected}) > 2  # it depends on the audio
    with transcription_engine(folder) as driver:
        requests = [transcribe(number, [each], **OPTIONS.get(family, {})) for number, each in enumerate(WINDOWS, 1)]
        driver.complete(transcribe(0, WINDOWS, **OPTIONS.get(family, {})), *requests)
        together = [tokens_of(text) for text in texts_of(driver, 0)]
        alone = [tokens_of(texts_of(driver, number)[0]) for number in range(1, len(WINDOWS) + 1)]
    assert together == alone == expected


def test_transducers_give_words_their_times(tmp_path: Path) -> None:
    folder, _ = written("tdt", tmp_path)
    result = tiny.library_parakeet(folder).generate(mx.array(WINDOWS[0]), dtype=mx.float32)
    starts = [token.start for sentence in result.sentences for token in sentence.tokens if token.text.startswith(" ")]
    with transcription_engine(folder) as driver:
        assert driver.facts is not None and driver.facts.word_times  # type: ignore[attr-defined]
        driver.complete(transcribe(0, [WINDOWS[0]], words=True))
        (text,) = texts_of(driver, 0)
    words = [word for segment in text.segments for word in segment.words]
    assert "".join(word.text for word in words).strip() == result.text
    assert [word.start for word in words if word.text.startswith(" ")] == pytest.approx(starts)
    assert all(0 <= word.start < word.end <= SECONDS[0] and 0 < word.probability <= 1 for word in words)


def test_ctc_takes_repeated_tokens_as_one_unless_a_blank_is_between(tmp_path: Path) -> None:
    """mlx-audio takes them as one even then, so the reference is computed here, from its logits."""
    folder = tiny.write_parakeet(tmp_path, "ctc", seed=5)
    model = tiny.library_parakeet(folder)
    expected = []
    for samples in WINDOWS:
        features, _ = model.encoder(model._log_mel_spectrogram(mx.array(samples)))
        best = np.asarray(model.decoder(features))[0].argmax(1)
        changes = best[np.concatenate([[True], best[1:] != best[:-1]])]
        pieces = [tiny.PIECES[token] for token in changes if token < len(tiny.PIECES)]
        expected.append("".join(piece for piece in pieces if not piece.startswith("<")).replace("\u2581", " "))
    assert any(expected)
    with transcription_engine(folder) as driver:
        driver.complete(transcribe(0, WINDOWS))
        assert ["".join(each.text for each in text.segments) for text in texts_of(driver, 0)] == expected


def test_spectrograms_equal_those_of_the_libraries() -> None:
    from mlx_audio.stt.models.parakeet.audio import PreprocessArgs, log_mel_spectrogram
    from transformers import WhisperFeatureExtractor

    args = PreprocessArgs(**tiny.PARAKEETS["tdt"]["preprocessor"])
    nemo = NemoSpectrogram(bands=16, n_fft=512, window=400, hop=160, preemphasis=0.97, floor=2**-24, per_band=True)
    extract = WhisperFeatureExtractor(feature_size=128)
    for samples in WINDOWS:
        expected = np.asarray(log_mel_spectrogram(mx.array(samples), args))[0]
        np.testing.assert_allclose(nemo(samples), expected, atol=1e-4)
        features = extract(samples, sampling_rate=16_000, padding=True, truncation=False, return_tensors="np")
        np.testing.assert_allclose(WhisperSpectrogram(128)(samples), features["input_features"][0].T, atol=1e-5)


@pytest.mark.parametrize("family", some(["tdt", "qwen3_asr", "moonshine"], ["tdt", "qwen3_asr"]))
def test_two_engines_of_one_family_do_not_disturb_each_other(family: str, tmp_path: Path) -> None:
    """Neither does one that is freed while the other runs: nothing of the library is shared by their threads."""
    folder, reference = written(family, tmp_path)
    windows = WINDOWS if family == "tdt" else [WINDOWS[1], WINDOWS[4]]
    expected = [reference(samples) for samples in windows]
    wrong: list[object] = []

    def work(rounds: int) -> None:
        for _ in range(rounds):
            with transcription_engine(folder) as driver:
                for number in range(2):
                    driver.complete(transcribe(number, windows, **OPTIONS.get(family, {})))
                    found = [tokens_of(text) for text in texts_of(driver, number)]
                    if found != expected:
                        wrong.append((driver.ends[number], found))

    threads = [threading.Thread(target=work, args=(rounds,)) for rounds in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_engine_uses_what_the_library_caches_for_all_threads(tmp_path: Path) -> None:
    from mlx_audio import dsp

    caches = [dsp.mel_filters, dsp.hanning, dsp.hamming, dsp.blackman, dsp.bartlett]
    for cache in caches:
        cache.cache_clear()
    for family in ("tdt", "qwen3_asr"):
        folder = tmp_path / family
        (tiny.write_parakeet(folder, family) if family == "tdt" else tiny.write_qwen3_asr(folder))
        with transcription_engine(folder) as driver:
            driver.complete(transcribe(0, WINDOWS[:2], **OPTIONS.get(family, {})))
            assert len(texts_of(driver, 0)) == 2
    assert [cache.cache_info().currsize for cache in caches] == [0] * len(caches)


def test_qwen3_asr_finds_out_the_language_and_keeps_to_it(tmp_path: Path) -> None:
    """The model is made to write `language German<asr_text>` and then words."""
    folder = tiny.write_qwen3_asr(tmp_path)
    words = tiny.Words(folder)
    named = [*words.encode("language German"), words.token("<asr_text>"), *words.encode("the mat")]
    writer = Qwen3Asr(tiny.library_qwen3_asr(folder), words, ())
    assert writer.read(named) == ("de", "the mat")
    assert writer.read(words.encode("the cat")) == (None, "the cat")
    assert writer.traits.detects_language and writer.traits.languages == ("de", "en")
    assert LANGUAGES["yue"] == "Cantonese"


def test_silence_of_every_length_is_taken(tmp_path: Path) -> None:
    """A window of a single sample, too: nothing may divide by the number of frames."""
    for family in ("tdt", "moonshine", "qwen3_asr", "voxtral"):
        folder, _ = written(family, tmp_path / family)
        silence = [np.zeros(count, np.float32) for count in (1, 100, 1000, 16_000)]
        with transcription_engine(folder) as driver:
            driver.complete(transcribe(0, silence, **OPTIONS.get(family, {})))
            assert len(texts_of(driver, 0)) == len(silence), driver.ends


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("joint.enc.weight"), "its files lack the weights 'joint.enc.weight'"),
        (lambda weights: weights.update({"joint.enc.weight": mx.zeros((3, 3))}), "'joint.enc.weight' has the shape"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write_parakeet(tmp_path, "tdt")
    weights = mx.load(str(folder / "model.safetensors"))
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(AssertionError, match=message), transcription_engine(folder):
        pass


def test_the_forced_aligner_is_told_apart(tmp_path: Path) -> None:
    folder = tiny.write_qwen3_asr(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"]["model_type"] = "qwen3_forced_aligner"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="forced aligner"), transcription_engine(folder):
        pass


def test_a_missing_library_is_named_with_the_command_that_adds_it(tmp_path: Path) -> None:
    """In a process of its own: the package must not have been imported before."""
    folder = tiny.write_parakeet(tmp_path, "tdt")
    code = f"""
import sys, pathlib
sys.modules["mlx_audio"] = None
from millstream.backend import mlx_lm_import
from millstream.backend.device import current_device
from millstream.backend.transcription.loading import load_family
from millstream.backend.transcription.settings import TranscriptionSettings
load_family(TranscriptionSettings(pathlib.Path({str(folder)!r})), current_device(), print)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    told = found.stderr.strip().splitlines()[-1]
    assert "ModelError" in told and "parakeet models need mlx-audio" in told and "--no-deps mlx-audio" in told


def test_families_are_imported_one_by_one(tmp_path: Path) -> None:
    """mlx-audio's packages import all of them: seconds, transformers and SciPy. They still do if they are asked."""
    code = """
import sys
from millstream.backend import mlx_audio_import
import mlx_audio.stt.models.parakeet.parakeet, mlx_audio.tts.models.qwen3_tts.qwen3_tts
print([name for name in ("transformers", "scipy", "mlx_audio.stt.models.whisper") if name in sys.modules])
from mlx_audio.stt import load
print(load.__name__)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split("\n")[:2] == ["[]", "load"]


GPU = Device("metal", "none", 2**40)
"""A device that computes in half precision. The arithmetic is done by the CPU all the same."""


@pytest.mark.parametrize("family", ["tdt", "qwen3_asr", "voxtral", "moonshine"])
def test_on_a_gpu_weights_keep_their_type(family: str, tmp_path: Path) -> None:
    folder, _ = written(family, tmp_path)
    weights = {name: array.astype(mx.bfloat16) for name, array in mx.load(str(folder / "model.safetensors")).items()}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert run_on(GPU, folder, WINDOWS[:2]).dtype == "bfloat16"


def test_quantised_weights_are_unpacked_on_the_cpu_alone(tmp_path: Path) -> None:
    folder, _ = written("tdt", tmp_path)
    model = tiny.library_parakeet(folder)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: "feed_forward" in path and "lin" in path)
    model.save_weights(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 4}}))
    assert run_on(GPU, folder, WINDOWS[:2]).traits.notes == ()
    unpacked = run_on(Device("cpu", "none", 2**40), folder, WINDOWS[:2])
    assert unpacked.dtype == "float32" and unpacked.traits.notes == ("weights unpacked to float32",)
    with transcription_engine(folder) as driver:
        driver.complete(transcribe(0, WINDOWS[:2]))
        found = [tokens_of(text) for text in texts_of(driver, 0)]
    assert found == [parakeet_tokens(model, samples) for samples in WINDOWS[:2]]


def run_on(device: Device, folder: Path, windows: list[Array]) -> SteppingFamily:
    """A model that has given a text for each window."""
    vocabulary: Any = read_tekken(folder) if (folder / "tekken.json").exists() else None
    if (folder / "tokenizer.json").exists():
        vocabulary = tiny.Words(folder)
    family = load_family(TranscriptionSettings(folder, vocabulary), device, lambda share: None)
    options = Options(language="en", temperatures=(0.0,))
    family.start([WindowStart(0, index, each.tobytes(), options) for index, each in enumerate(windows)])
    texts = 0
    while texts < len(windows):
        texts += len(family.advance().done)
    return family
