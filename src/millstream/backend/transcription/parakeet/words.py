"""From tokens with times to words and sentences. Pieces of the vocabulary begin a word with `▁`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millstream.engine.transcription.messages import WindowSegment, WordTime

WORD = "\u2581"
_SENTENCE_ENDS = (".", "!", "?", "\u2026")
_WIDE_ENDS = ("\u3002", "\uff01", "\uff1f")
"""Of scripts that have no spaces between sentences."""


@dataclass(frozen=True, slots=True)
class TimedToken:
    token: int
    piece: str
    start: float
    end: float
    logprob: float

    @property
    def text(self) -> str:
        return self.piece.replace(WORD, " ")


def is_control(piece: str) -> bool:
    """Not text: `<unk>`, `<|de|>`."""
    return piece in ("<unk>", "<pad>") or (piece.startswith("<|") and piece.endswith("|>"))


def sentences(tokens: Sequence[TimedToken], *, words: bool) -> tuple[WindowSegment, ...]:
    """One segment per sentence. The last one may be a part of a sentence."""
    found: list[list[TimedToken]] = [[]]
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        found[-1].append(token)
        if after is not None and _ends_sentence(token.text, after.text):
            found.append([])
    return tuple(_segment(each, words=words) for each in found if each)


def _ends_sentence(text: str, after: str) -> bool:
    """A full stop inside a number or an abbreviation is followed by more of the same word."""
    return text.endswith(_WIDE_ENDS) or (text.endswith(_SENTENCE_ENDS) and after.startswith(" "))


def _segment(tokens: Sequence[TimedToken], *, words: bool) -> WindowSegment:
    return WindowSegment(
        tokens[0].start,
        tokens[-1].end,
        "".join(token.text for token in tokens),
        tuple(token.token for token in tokens),
        tuple(_words(tokens)) if words else (),
    )


def _words(tokens: Sequence[TimedToken]) -> Iterable[WordTime]:
    groups: list[list[TimedToken]] = []
    for token in tokens:
        if groups and not token.piece.startswith(WORD):
            groups[-1].append(token)
        else:
            groups.append([token])
    for group in groups:
        sure = math.exp(sum(token.logprob for token in group) / len(group))
        yield WordTime("".join(token.text for token in group), group[0].start, group[-1].end, sure)
