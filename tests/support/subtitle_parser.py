"""Strict parsers of SubRip and WebVTT, by their descriptions."""

from __future__ import annotations

import html
import re

Cue = tuple[float, float, str]

_TIME = r"(\d{2,}):([0-5]\d):([0-5]\d)%s(\d{3})"


def _seconds(hours: str, minutes: str, seconds: str, milliseconds: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + int(milliseconds) / 1000


def _blocks(text: str) -> list[list[str]]:
    return [block.split("\n") for block in text.strip("\n").split("\n\n") if block]


def _times(line: str, point: str) -> tuple[float, float]:
    time = _TIME % re.escape(point)
    match = re.fullmatch(f"{time} --> {time}", line)
    assert match is not None, line
    start, end = _seconds(*match.groups()[:4]), _seconds(*match.groups()[4:])
    assert start < end
    return start, end


def parse_srt(text: str) -> list[Cue]:
    cues = []
    for number, (index, times, *lines) in enumerate(_blocks(text), 1):
        assert index == str(number) and lines
        cues.append((*_times(times, ","), "\n".join(lines)))
    return cues


def parse_vtt(text: str) -> list[Cue]:
    head, *blocks = _blocks(text)
    assert head == ["WEBVTT"]
    cues = []
    for times, *lines in blocks:
        content = "\n".join(lines)
        assert lines and "-->" not in content and not re.search(r"[<>]|&(?!amp;|lt;|gt;)", content)
        cues.append((*_times(times, "."), html.unescape(content)))
    return cues
