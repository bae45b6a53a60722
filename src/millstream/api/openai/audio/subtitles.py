"""Transcripts as subtitles: SubRip (srt) and WebVTT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millstream.speech_types import Segment

_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def srt(segments: Sequence[Segment]) -> str:
    cues = enumerate(_cues(segments), 1)
    return "".join(
        f"{number}\n{_time(start, ',')} --> {_time(end, ',')}\n{text}\n\n" for number, (start, end, text) in cues
    )


def vtt(segments: Sequence[Segment]) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_time(start, '.')} --> {_time(end, '.')}\n{text.translate(_ESCAPED)}\n\n"
        for start, end, text in _cues(segments)
    )


def _cues(segments: Sequence[Segment]) -> Iterator[tuple[int, int, str]]:
    """Begin and end in milliseconds, and the text in one line: an empty line would end a cue."""
    for segment in segments:
        start = round(segment.start * 1000)
        if text := " ".join(segment.text.split()):
            yield start, max(round(segment.end * 1000), start + 1), text


def _time(milliseconds: int, point: str) -> str:
    seconds, milliseconds = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"
