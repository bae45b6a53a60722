"""Whisper tiny.en with its real weights, through the service: words, times, silence, long audio, batches."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.config import ModelSpec, Settings
from millstream.errors import BadRequest
from millstream.server import MillServer
from millstream.speech_types import Samples, TranscriptionRequest
from support.real_whisper import tiny_en
from support.recording import JFK_WORDS, jfk_samples, jfk_wav
from support.server import RunningServer, running
from support.transcribing import PATIENCE, Transcript, transcribed, transcript

__all__ = ["tiny_en"]


@pytest.fixture(scope="module")
def server(tiny_en: Path) -> Iterator[RunningServer]:
    settings = Settings(models=(ModelSpec(str(tiny_en), name="tiny.en"),), port=0, isolation="thread")
    with running(settings) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server: RunningServer) -> Transcript:
    return transcribed(server, jfk_wav(), words=True)


def test_a_real_recording_is_written_down_word_for_word(alone: Transcript) -> None:
    assert " ".join(alone.words) == JFK_WORDS
    assert (alone.language, round(alone.duration, 1)) == ("en", 11.0)
    assert alone.usage.completion_tokens > 20
    assert [segment.start for segment in alone.segments] == sorted(segment.start for segment in alone.segments)
    assert all(segment.avg_logprob > -0.6 and segment.temperature == 0 for segment in alone.segments)


MLX_AUDIO_TIMES = (
    (0.0, 0.76), (0.76, 1.06), (1.06, 1.46), (1.46, 1.76), (1.76, 2.26), (2.26, 3.88), (3.88, 4.52), (4.52, 5.7),
    (5.7, 6.02), (6.02, 6.36), (6.36, 6.76), (6.76, 7.02), (7.02, 7.26), (7.26, 8.06), (8.06, 8.66), (8.66, 8.94),
    (8.94, 9.28), (9.28, 9.5), (9.5, 9.72), (9.72, 9.92), (9.92, 10.22), (10.22, 10.5),
)  # fmt: skip
"""Begin and end of each word by mlx-audio 0.6.2, with the same weights in float32 (it takes minutes on a busy CPU)."""


def test_words_have_the_times_of_a_second_implementation(alone: Transcript) -> None:
    times = [(word.start, word.end) for segment in alone.segments for word in segment.words]
    np.testing.assert_allclose(times, MLX_AUDIO_TIMES, atol=0.2)


def test_words_have_times_that_follow_each_other(alone: Transcript) -> None:
    words = [word for segment in alone.segments for word in segment.words]
    assert "".join(word.text for word in words).strip() == alone.text
    for before, word in itertools.pairwise(words):
        assert before.start <= before.end <= word.start <= word.end <= alone.duration
    assert all(0.2 < word.probability <= 1 for word in words)


def test_several_at_once_equal_one_alone(server: RunningServer, alone: Transcript) -> None:
    async def all_at_once(running: MillServer) -> list[Transcript]:
        requests = [TranscriptionRequest("tiny.en", jfk_samples(), words=True) for _ in range(5)]
        return await asyncio.gather(*(transcript(running, request) for request in requests))

    for each in server.call(all_at_once, PATIENCE):
        assert [(s.text, s.start, s.end, s.tokens) for s in each.segments] == [
            (s.text, s.start, s.end, s.tokens) for s in alone.segments
        ]
        for mine, other in zip(each.segments, alone.segments, strict=True):
            assert abs(mine.avg_logprob - other.avg_logprob) < 1e-3
            np.testing.assert_allclose([w.start for w in mine.words], [w.start for w in other.words], atol=0.041)


def noise(seconds: float, level: float, seed: int = 0) -> Samples:
    return (level * np.random.default_rng(seed).standard_normal(round(16_000 * seconds))).astype(np.float32)


@pytest.mark.parametrize("level", [0.0, 0.001, 0.05], ids=["silence", "hiss", "noise"])
def test_without_speech_no_text_is_invented(server: RunningServer, level: float) -> None:
    found = transcribed(server, noise(12, level))
    assert (found.text, found.segments, found.duration) == ("", (), 12.0)


def test_long_audio_is_cut_at_silences_and_times_are_those_of_the_whole(server: RunningServer) -> None:
    speech = jfk_samples()
    audio = np.concatenate([speech, noise(20, 0.0005), speech])
    found = transcribed(server, audio, words=True)
    assert " ".join(found.words) == " ".join([JFK_WORDS] * 2)
    starts = [word.start for segment in found.segments for word in segment.words if word.text.strip() == "And"]
    offsets = [0.0, 31.0]
    assert len(starts) == 2
    np.testing.assert_allclose(np.array(starts) - offsets, starts[0], atol=0.6)


def test_a_prompt_and_a_temperature_are_taken(server: RunningServer) -> None:
    prompted = transcribed(server, jfk_samples(), prompt="An address by the president.")
    assert " ".join(prompted.words) == JFK_WORDS
    assert prompted.usage.prompt_tokens > 5
    warm = transcribed(server, jfk_samples()[: 16_000 * 4], temperature=0.6)
    assert warm.segments[0].temperature >= 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [({"language": "de"}, "does not know the language 'de'"), ({"task": "translate"}, "cannot translate")],
)
def test_what_an_english_model_cannot_do_is_said(server: RunningServer, options: dict[str, str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        transcribed(server, jfk_samples(), **options)
