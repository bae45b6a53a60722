"""Windows of a request in the order of its audio, and what a request may ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream.engine.transcription.messages import WindowSegment, WindowText, WordTime
from millstream.errors import BadRequest
from millstream.service.transcription.options import options_of
from millstream.service.transcription.pieces import Pieces
from millstream.speech_types import TranscriptionRequest
from support.transcriptions import facts

RATE = 16_000


def text(index: int, *words: str, consumed: float | None = None) -> WindowText:
    segments = (WindowSegment(0.5, 1.0, "".join(words), words=tuple(WordTime(word, 0.5, 0.75) for word in words)),)
    return WindowText(1, index, segments if words else (), consumed=consumed)


def test_segments_come_in_the_order_of_the_audio() -> None:
    pieces = Pieces([(0, RATE), (2 * RATE, 3 * RATE), (4 * RATE, 5 * RATE)])
    assert [piece.index for piece in iter(pieces.send_next, None)] == [0, 1, 2]
    assert pieces.in_engine == 3
    pieces.heard(text(2, " c"))
    pieces.heard(text(1, " b"))
    assert pieces.take_ready() == [] and not pieces.complete and pieces.in_engine == 1
    pieces.heard(text(0))
    assert pieces.complete
    ready = pieces.take_ready()
    assert [(segment.text, segment.start, segment.end) for segment in ready] == [(" b", 2.5, 3.0), (" c", 4.5, 5.0)]
    assert [(word.text, word.start, word.end) for word in ready[0].words] == [(" b", 2.5, 2.75)]
    assert pieces.take_ready() == []


def test_the_rest_of_a_window_is_heard_again_in_its_place() -> None:
    pieces = Pieces([(0, 4 * RATE), (5 * RATE, 6 * RATE)])
    assert pieces.send_next() and pieces.send_next()
    rest = pieces.heard(text(0, " a", consumed=1.0))
    assert rest == (RATE, 4 * RATE)
    pieces.hear_again(*rest)
    again = pieces.send_next()
    assert again is not None and (again.index, again.begin, again.end) == (2, RATE, 4 * RATE)
    assert [segment.text for segment in pieces.take_ready()] == [" a"]
    pieces.heard(text(1, " c"))
    assert pieces.take_ready() == []
    assert pieces.heard(text(2, " b", consumed=2.8)) is None  # too short to say anything
    assert [segment.text for segment in pieces.take_ready()] == [" b", " c"]
    assert pieces.complete


def test_times_do_not_leave_the_window() -> None:
    pieces = Pieces([(0, int(0.6 * RATE))])
    pieces.send_next()
    pieces.heard(text(0, " a"))
    (segment,) = pieces.take_ready()
    assert (segment.start, segment.end, segment.words[0].end) == (0.5, 0.6, 0.6)


ABLE = replace(facts(), languages=("en", "de"), translates=True, word_times=True, takes_prompt=True)


def asked(**fields: object) -> TranscriptionRequest:
    return TranscriptionRequest("m", b"", **fields)  # type: ignore[arg-type]


def test_options_of_a_request() -> None:
    found = options_of(asked(language=" DE-at", prompt="Bäcker", temperature=0.5, words=True), "m", ABLE)
    assert (found.language, found.prompt, found.words) == ("de", "Bäcker", True)
    assert found.temperatures == (0.5, 0.6, 0.8, 1.0)
    plain = options_of(asked(), "m", ABLE)
    assert (plain.language, plain.temperatures[0], len(plain.temperatures)) == (None, 0.0, 6)
    assert options_of(asked(temperature=1e-38), "m", ABLE).temperatures == plain.temperatures
    assert options_of(asked(prompt="x"), "m", replace(ABLE, takes_prompt=False)).prompt == ""


@pytest.mark.parametrize(
    ("fields", "limits", "message", "param"),
    [
        ({"language": "xx"}, {}, "does not know the language 'xx'. It knows: de, en", "language"),
        ({"task": "translate"}, {"translates": False}, "'m' cannot translate", None),
        ({"words": True}, {"word_times": False}, "gives no times of words", "timestamp_granularities"),
    ],
)
def test_what_a_model_cannot_do_is_said(
    fields: dict[str, object], limits: dict[str, object], message: str, param: str | None
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        options_of(asked(**fields), "m", replace(ABLE, **limits))  # type: ignore[arg-type]
    assert caught.value.param == param
