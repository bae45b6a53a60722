"""Voice activity and cutting: noise, hum and silence have no speech; speech is kept whole and cut at its pauses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.media.silence import cut, has_speech, speech
from millstream.media.voice import PhraseDetector
from millstream.speech_types import Samples
from support.recording import JFK_SPOKEN, jfk_samples
from support.spoken import hum, noise, pause, spoken

RATE = 16_000

WITHOUT_SPEECH = {
    "nothing": np.zeros(0, np.float32),
    "one sample": np.ones(1, np.float32),
    "silence": pause(20),
    "white noise": noise(20, 0.1),
    "quiet noise": noise(20, 0.0005),
    "clipped noise": np.clip(noise(20, 2), -1, 1),
    "hum": hum(20, 50),
    "clipped hum": np.clip(hum(20, 60) * 10, -1, 1),
    "noise that sets in": np.concatenate([pause(3), noise(3, 0.1), pause(3), noise(0.5, 0.1), pause(2)]),
    "hum that sets in": np.concatenate([noise(3, 0.003), hum(3, 50), noise(3, 0.003)]),
    "louder noise": np.concatenate([noise(5, 0.01), noise(3, 0.1), noise(5, 0.01)]),
    "noise that grows": noise(20, 0.05) * np.linspace(0, 1, 20 * RATE, dtype=np.float32),
}


@pytest.mark.parametrize("name", WITHOUT_SPEECH)
def test_no_speech(name: str) -> None:
    samples = WITHOUT_SPEECH[name]
    assert speech(samples, RATE) == []
    assert cut(samples, RATE, 30) == []
    detector = PhraseDetector(RATE)
    assert [*detector.feed(samples), *detector.end()] == []


@pytest.mark.parametrize("gain", [1.0, 0.1, 0.01, 20.0])
def test_a_recording_is_kept_whole(gain: float) -> None:
    """Quiet, rounded to 16 bits, or clipped: all of what is said is in its stretches, and in one window."""
    samples = (np.round(np.clip(jfk_samples() * gain, -1, 1) * 32767) / 32767).astype(np.float32)
    kept = np.zeros(len(samples), bool)
    for begin, end in speech(samples, RATE):
        kept[begin:end] = True
    for begin, end in JFK_SPOKEN:
        assert kept[int(begin * RATE) : int(end * RATE)].all()
    assert len(cut(samples, RATE, 30)) == 1


@pytest.mark.parametrize("ground", [noise(11, 0.02), hum(11, 50) * 3, hum(11, 60) + noise(11, 0.01)])
def test_a_recording_with_noise(ground: Samples) -> None:
    kept = np.zeros(11 * RATE, bool)
    for begin, end in speech(jfk_samples() + ground, RATE):
        kept[begin:end] = True
    for begin, end in JFK_SPOKEN:
        assert kept[int(begin * RATE) : int(end * RATE)].all()


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_every_rate(rate: int) -> None:
    samples = np.concatenate([pause(2, rate), spoken(3, rate), pause(2, rate)])
    ((begin, end),) = speech(samples, rate)
    assert 1.5 * rate < begin < 2.1 * rate and 4.9 * rate < end < 5.6 * rate
    assert not has_speech(noise(5, 0.1, rate), rate)


def test_phrases_end_at_long_pauses_only() -> None:
    samples = np.concatenate([pause(1), spoken(2), pause(0.3), spoken(2), pause(1.5), spoken(2), pause(1)])
    (first, second) = speech(samples, RATE)
    assert first[0] < 1.1 * RATE and 5.3 * RATE <= first[1] < 6 * RATE
    assert 6.4 * RATE < second[0] < 6.9 * RATE and second[1] >= 8.7 * RATE


def test_windows_are_cut_at_pauses_and_leave_out_long_ones() -> None:
    samples = np.concatenate([spoken(8), pause(1), spoken(8), pause(1), spoken(8), pause(20), spoken(3), pause(40)])
    windows = cut(samples, RATE, 20)
    assert [(round(begin / RATE), round(end / RATE)) for begin, end in windows] == [(0, 17), (18, 26), (46, 49)]


def test_speech_without_a_pause_is_cut_where_it_is_quietest() -> None:
    samples = spoken(50)
    samples[int(17.9 * RATE) : int(18.1 * RATE)] *= 0.01
    windows = cut(samples, RATE, 20)
    assert len(windows) >= 3
    assert windows[0][1] / RATE == pytest.approx(18, abs=0.15)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(windows))


PIECE = st.tuples(st.sampled_from(["spoken", "pause", "noise", "hum"]), st.integers(1, 40))


def made(pieces: list[tuple[str, int]]) -> Samples:
    makers = {
        "spoken": spoken,
        "pause": pause,
        "noise": lambda seconds: noise(seconds, 0.02),
        "hum": lambda seconds: hum(seconds, 50),
    }
    return np.concatenate([makers[kind](tenths / 5) for kind, tenths in pieces])


@settings(max_examples=12, deadline=None)
@given(pieces=st.lists(PIECE, min_size=1, max_size=8), longest=st.floats(0.3, 30))
def test_each_sample_with_speech_is_in_one_window(pieces: list[tuple[str, int]], longest: float) -> None:
    samples = made(pieces)
    windows = cut(samples, RATE, longest)
    times = np.zeros(len(samples), int)
    for begin, end in windows:
        assert 0 <= begin < end <= len(samples) and end - begin <= longest * RATE
        times[begin:end] += 1
    assert times.max(initial=0) <= 1
    assert windows == sorted(windows)
    for begin, end in speech(samples, RATE):
        assert (times[begin:end] == 1).all()


@settings(max_examples=12, deadline=None)
@given(
    pieces=st.lists(PIECE, min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 9_000), min_size=1, max_size=20),
)
def test_a_stream_is_judged_alike_in_any_pieces(pieces: list[tuple[str, int]], sizes: list[int]) -> None:
    samples = made(pieces)
    whole = PhraseDetector(RATE)
    expected = [*whole.feed(samples), *whole.end()]
    detector = PhraseDetector(RATE)
    found = []
    at = 0
    while at < len(samples):
        size = sizes[at % len(sizes)]
        before = detector.quiet_since
        edges = detector.feed(samples[at : at + size])
        at += size
        assert all(edge.position >= before for edge in edges if edge.kind == "begin")
        found += edges
    found += detector.end()
    assert [edge.kind for edge in found] == ["begin", "end"] * (len(found) // 2)
    assert [edge.kind for edge in expected] == [edge.kind for edge in found]
    assert all(abs(a.position - b.position) <= 512 for a, b in zip(expected, found, strict=True))


def test_a_stream_tells_begin_and_end_in_time() -> None:
    """The begin while it is spoken, the end soon after the silence that ends a phrase."""
    detector = PhraseDetector(RATE, padding=0.2, silence=0.4)
    detector.feed(noise(3, 0.003))
    (begin,) = detector.feed(spoken(0.6) + noise(0.6, 0.003))
    assert begin.kind == "begin" and 2.7 * RATE < begin.position <= 3 * RATE and detector.speaking
    assert detector.feed(spoken(2) + noise(2, 0.003)) == []
    (end,) = detector.feed(noise(0.6, 0.003))
    assert end.kind == "end" and 5.5 * RATE < end.position <= 6.1 * RATE and not detector.speaking


def test_a_high_threshold_leaves_out_what_is_hardly_above_the_noise() -> None:
    samples = np.concatenate([noise(2, 0.02), spoken(3) * 0.3 + noise(3, 0.02), noise(2, 0.02)])

    def phrases(threshold: float) -> int:
        detector = PhraseDetector(RATE, threshold=threshold)
        return len([*detector.feed(samples), *detector.end()]) // 2

    assert phrases(0.5) >= 1
    assert phrases(1.0) == 0


def test_windows_without_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="have no samples"):
        cut(spoken(1), RATE, 0)
    with pytest.raises(ValueError, match="at least 4000"):
        PhraseDetector(1000)
