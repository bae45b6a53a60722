"""What of an answer was spoken, and when: to know what a person has heard of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Sentence:
    text: str
    start_ms: float
    end_ms: float


@dataclass(slots=True)
class SpokenText:
    """The sentences of one answer, with the time of each in its audio."""

    _sentences: list[_Sentence] = field(default_factory=list)

    @property
    def end_ms(self) -> float:
        return self._sentences[-1].end_ms if self._sentences else 0.0

    @property
    def text(self) -> str:
        """The sentences whose audio has begun."""
        return "".join(sentence.text for sentence in self._sentences if sentence.end_ms > sentence.start_ms)

    def begin(self, text: str) -> None:
        self._sentences.append(_Sentence(text, self.end_ms, self.end_ms))

    def add_audio(self, ms: float) -> None:
        """More audio of the last sentence."""
        self._sentences[-1].end_ms += ms

    def heard_until(self, ms: float) -> str:
        """The words until then. Within a sentence, they count as equally long per character; a word that was not
        heard to its end is left out."""
        heard = ""
        for sentence in self._sentences:
            if sentence.end_ms <= ms:
                heard += sentence.text
                continue
            share = (ms - sentence.start_ms) / (sentence.end_ms - sentence.start_ms)
            return heard + _whole_words(sentence.text, int(len(sentence.text) * max(share, 0.0)))
        return heard


def _whole_words(text: str, length: int) -> str:
    if length >= len(text) or text[length : length + 1].isspace():
        return text[:length]
    spaces = [place for place, char in enumerate(text[:length]) if char.isspace()]
    return text[: spaces[-1]] if spaces else ""
