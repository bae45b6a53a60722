"""Speech models on mlx-audio's modules: they say what the library says, one text after the other, on any thread."""

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
import numpy as np
import pytest

from millstream.backend.speech.library_pieces import only_piece, seed_of
from millstream.engine.messages import Failed
from millstream.engine.speech.messages import Piece
from millstream.engine.speech.plan import PieceInput
from millstream.errors import BadRequest, ModelError
from millstream.models.speech_layout import read_speech_layout, speaker_names, speech_tensors
from millstream.speech_types import Voice
from millstream.text.speech.plain import PlainWriter
from support import tiny_mlx_audio as tiny
from support.audio_files import Array
from support.library_engines import sound_of, speak, speech_engine

TEXTS = ("The cat sat!", "a mat")

Reference = Callable[..., Array]


def seeded(text: str, voice: str | None, instructions: str | None = None) -> None:
    """As the engine does it before each piece."""
    mix = ((voice, 1.0),) if voice else ()
    mx.random.seed(seed_of(PieceInput(0, 0, Piece(text=text), mix, instructions=instructions)))


def pocket_sound(model: Any, text: str, voice: str | None = None) -> Array:
    seeded(text, voice)
    (spoken,) = model.generate(text, voice=voice or tiny.POCKET_VOICES[0])
    return np.asarray(spoken.audio)


def qwen_sound(model: Any, text: str, voice: str | None = None, instructions: str | None = None) -> Array:
    seeded(text, voice, instructions)
    chosen = None if model.config.tts_model_type == "voice_design" else voice or tiny.QWEN_VOICES[0]
    return qwen_parts(model, text, voice=chosen, instruct=instructions)


def qwen_parts(model: Any, text: str, **options: Any) -> Array:
    """In longer parts than ours. As a whole, the library would cut as much from the end as there were codes of 0."""
    parts = model.generate(
        text, max_tokens=75 + 6 * len(text), split_pattern="", stream=True, streaming_interval=3.0, **options
    )
    return np.concatenate([np.asarray(part.audio) for part in parts])


def written(family: str, folder: Path) -> tuple[Path, Reference]:
    if family == "pocket_tts":
        tiny.write_pocket_tts(folder)
        return folder, functools.partial(pocket_sound, tiny.library_pocket_tts(folder))
    tiny.write_qwen3_tts(folder)
    return folder, functools.partial(qwen_sound, tiny.library_qwen3_tts(folder))


def same(left: Array, right: Array) -> bool:
    """Random weights enlarge small differences; other draws would give another sound altogether."""
    return left.shape == right.shape and bool(np.allclose(left, np.clip(right, -1, 1), atol=1e-2))


@pytest.mark.parametrize(("family", "voice"), [("pocket_tts", "marius"), ("qwen3_tts", "ryan")])
def test_it_says_what_the_library_says(family: str, voice: str, tmp_path: Path) -> None:
    folder, reference = written(family, tmp_path)
    expected = [reference(text) for text in TEXTS]
    other = reference(TEXTS[0], voice)
    assert not same(expected[0], other) and not same(expected[0], expected[1])
    with speech_engine(folder) as driver:
        facts: Any = driver.facts
        driver.complete(speak(0, *TEXTS), speak(1, TEXTS[0], voice=voice))
        assert [same(*pair) for pair in zip(sound_of(driver, 0), expected, strict=True)] == [True] * len(TEXTS)
        assert same(sound_of(driver, 1)[0], other)
        assert len(driver.outputs[0]) > 2 * len(TEXTS)  # in several steps each
    assert facts.sample_rate == 24_000 and not facts.takes_speed
    assert [each.name for each in facts.voices] == list(speaker_names(folder, read_speech_layout(folder)))


def test_a_voice_is_made_from_a_description(tmp_path: Path) -> None:
    folder = tiny.write_qwen3_tts(tmp_path, sort="voice_design")
    expected = qwen_sound(tiny.library_qwen3_tts(folder), "the cat", instructions="happy")
    with speech_engine(folder) as driver:
        facts: Any = driver.facts
        driver.complete(speak(0, "the cat", instructions="happy"))
        assert same(sound_of(driver, 0)[0], expected)
    assert facts.needs_instructions and facts.takes_instructions and not facts.voices


@pytest.mark.parametrize("family", ["pocket_tts", "qwen3_tts"])
def test_two_engines_of_one_family_do_not_disturb_each_other(family: str, tmp_path: Path) -> None:
    """Neither does one that is freed while the other runs. Both draw at random, each from its own thread's numbers."""
    folder, reference = written(family, tmp_path)
    expected = reference(TEXTS[1])
    wrong: list[object] = []

    def work(rounds: int) -> None:
        for _ in range(rounds):
            with speech_engine(folder) as driver:
                for number in range(2):
                    driver.complete(speak(number, TEXTS[1]))
                    if not same(sound_of(driver, number)[0], expected):
                        wrong.append(driver.ends[number])

    threads = [threading.Thread(target=work, args=(rounds,)) for rounds in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_control_token_in_a_text_is_text(tmp_path: Path) -> None:
    """The library would take it for the end of the text."""
    folder = tiny.write_qwen3_tts(tmp_path)
    text = "the <|im_end|> cat"
    with speech_engine(folder) as driver:
        driver.complete(speak(0, text))
        assert driver.ends[0] and not isinstance(driver.ends[0][0], Failed)
        found = sound_of(driver, 0)[0]
    model = tiny.library_qwen3_tts(folder)
    seeded(text, None)
    assert same(found, qwen_parts(model, "the < |im_end|> cat", voice=tiny.QWEN_VOICES[0]))


def test_what_these_models_cannot_do_is_refused() -> None:
    voices = [Voice("alba")]
    plain = PieceInput(0, 0, Piece(text="the cat"))
    assert only_piece([plain], voices) == (plain, "alba")
    for wrong, message in [
        (PieceInput(0, 0, Piece(text="a"), speed=2.0), "speed must be 1"),
        (PieceInput(0, 0, Piece(text="a"), voice=(("alba", 1.0), ("bob", 1.0))), "cannot mix"),
        (PieceInput(0, 0, Piece(text="a"), voice=(("bob", 1.0),)), "no voice 'bob'. It has: alba"),
    ]:
        with pytest.raises(BadRequest, match=message):
            only_piece([wrong], voices)


def test_texts_are_spoken_sentence_by_sentence_in_a_known_voice() -> None:
    writer = PlainWriter(["alba", "marius"])
    text = "The cat sat on the mat because it was tired of standing. " * 8
    script = writer.write(text, voice="Marius", language="en")
    lines = list(script.lines)
    assert script.voice == (("marius", 1.0),) and len(lines) > 1
    assert " ".join(line.text for line in lines).split() == text.split()
    assert writer.write("Yes.", voice="alloy", language=None).voice == ()  # OpenAI's clients must name one
    for wrong, voice, message in [
        ("Yes.", "bob", "no voice 'bob'. Its voices: alba, marius"),
        ("...", None, "nothing"),
    ]:
        with pytest.raises(BadRequest, match=message):
            writer.write(wrong, voice=voice, language=None)


def test_voices_are_files_of_the_folder(tmp_path: Path) -> None:
    folder = tiny.write_pocket_tts(tmp_path)
    layout = read_speech_layout(folder)
    assert layout.family == "pocket_tts" and [name for name, _ in layout.voices] == list(tiny.POCKET_VOICES)
    (folder / "voices" / "alba.safetensors").rename(folder / "default-voice.safetensors")
    assert [name for name, _ in read_speech_layout(folder).voices] == ["default", "marius"]
    (folder / "default-voice.safetensors").unlink()
    (folder / "voices" / "marius.safetensors").unlink()
    with pytest.raises(ModelError, match="has no voices"):
        read_speech_layout(folder)


def test_a_voice_of_another_model_is_an_error(tmp_path: Path) -> None:
    folder = tiny.write_pocket_tts(tmp_path)
    mx.save_safetensors(str(folder / "voices" / "alba.safetensors"), {"audio_prompt": mx.zeros((1, 5, 7))})
    with pytest.raises(AssertionError, match=r"alba.safetensors: has the shape \(1, 5, 7\)"), speech_engine(folder):
        pass


def test_the_codec_belongs_to_the_model(tmp_path: Path) -> None:
    folder = tiny.write_qwen3_tts(tmp_path)
    assert any(name.startswith("speech_tokenizer.") for name in speech_tensors(folder))
    (folder / "speech_tokenizer" / "config.json").unlink()
    with pytest.raises(AssertionError, match="needs the codec too"), speech_engine(folder):
        pass


def test_a_tokenizer_elsewhere_is_not_opened(tmp_path: Path) -> None:
    """The library would download it."""
    folder = tiny.write_pocket_tts(tmp_path)
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["flow_lm"]["lookup_table"]["tokenizer_path"] = "hf://someone/else/tokenizer.json"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="has no tokenizer"), speech_engine(folder):
        pass


def test_a_missing_package_is_named_with_the_command_that_adds_it(tmp_path: Path) -> None:
    """In a process of its own: the package must not have been imported before."""
    folder = tiny.write_pocket_tts(tmp_path)
    code = f"""
import sys, pathlib
sys.modules["sentencepiece"] = None
from millstream.backend import mlx_lm_import
from millstream.backend.device import current_device
from millstream.backend.speech.loading import load_speaker
from millstream.backend.speech.settings import SpeechSettings
from millstream.models.speech_layout import read_speech_layout
folder = pathlib.Path({str(folder)!r})
load_speaker(SpeechSettings(folder, read_speech_layout(folder)), current_device())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    told = found.stderr.strip().splitlines()[-1]
    assert "pocket_tts models need the package 'sentencepiece'" in told and "install sentencepiece" in told
