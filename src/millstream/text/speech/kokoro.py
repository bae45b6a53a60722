"""Prepares texts for Kokoro: voice, language, sentences, phonemes, tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from millstream.errors import BadRequest
from millstream.models.kokoro_voices import DEFAULT_VOICE, OPENAI_VOICES, voice_of
from millstream.text.speech.english import EnglishPhonemes
from millstream.text.speech.espeak import RunEspeak, espeak_phonemes
from millstream.text.speech.lexicon import dictionary
from millstream.text.speech.script import Line, Script
from millstream.text.speech.sentences import pieces
from millstream.text.speech.voices import parse_mix

ENGLISH = {"en": False, "en-us": False, "en-gb": True}
"""Languages of our own text-to-phoneme code, and whether each has a British accent."""
OTHERS = {
    "es": "es", "fr": "fr-fr", "hi": "hi", "it": "it", "pt": "pt-br", "pt-br": "pt-br", "ja": "ja", "zh": "cmn",
}  # fmt: skip
"""Languages that need eSpeak NG, by the names of its voices."""
_NAMES = {"a": "en-us", "b": "en-gb", "e": "es", "f": "fr", "h": "hi", "i": "it", "j": "ja", "p": "pt-br", "z": "zh",
          "fr-fr": "fr", "en-uk": "en-gb", "cmn": "zh", "zh-cn": "zh", "es-es": "es"}  # fmt: skip
"""Kokoro's own letters for languages, and other spellings."""
MAX_PHONEMES = 280
"""Of one piece: more is not spoken better, and takes memory."""
_PHONEMES = re.compile(r"\s*/(?P<phonemes>[^/]+)/\s*")

Phonemize = Callable[[str], str]


class KokoroWriter:
    """Implements `script.ScriptWriter`."""

    def __init__(
        self, vocab: Mapping[str, int], voices: Sequence[str], max_phonemes: int, *, espeak: RunEspeak | None = None
    ) -> None:
        """`espeak`: runs eSpeak NG, if it is installed."""
        self._vocab = {symbol: token for symbol, token in vocab.items() if token}
        self._voices = tuple(voices)
        self._max_phonemes = min(max_phonemes, MAX_PHONEMES)
        self._espeak = espeak
        self._default = DEFAULT_VOICE if DEFAULT_VOICE in voices else sorted(voices)[0]
        dictionary()  # read while the model loads, not with the first request

    def write(self, text: str, *, voice: str | None, language: str | None) -> Script:
        mix = parse_mix(voice or self._default, self._voices, OPENAI_VOICES)
        spoken = self._language(language, mix[0][0])
        match = _PHONEMES.fullmatch(text)
        if match is not None:
            return Script(iter(self._lines(match["phonemes"])), mix, spoken)
        return Script(self._written(text, self._phonemizer(spoken)), mix, spoken)

    def _written(self, text: str, phonemize: Phonemize) -> Iterator[Line]:
        for piece in pieces(text):
            yield from self._lines(phonemize(piece))

    def _language(self, asked: str | None, voice: str) -> str:
        name = (asked or voice_of(voice).language or "en-us").lower().replace("_", "-")
        name = _NAMES.get(name, name)
        if name not in ENGLISH and name not in OTHERS and name.startswith("en-"):
            name = "en-us"
        if name not in ENGLISH and name not in OTHERS:
            known = ", ".join([*ENGLISH, *OTHERS])
            raise BadRequest(f"the language {name!r:.40} is not one of Kokoro's: {known}", param="language")
        return name

    def _phonemizer(self, language: str) -> Phonemize:
        if language in ENGLISH:
            return EnglishPhonemes(british_accent=ENGLISH[language])
        espeak = self._espeak
        if espeak is None:
            raise BadRequest(
                f"texts in the language {language!r} need eSpeak NG, which is not installed on the server. Install the "
                "package espeak-ng and load the model again, or use an English voice such as af_heart.",
                param="language",
            )
        return lambda text: espeak_phonemes(espeak, text, OTHERS[language])

    def _lines(self, phonemes: str) -> list[Line]:
        """Tokens of phonemes, cut where there are too many. What the model does not know is left out."""
        known = "".join(symbol for symbol in phonemes if symbol in self._vocab)
        lines = []
        while known := known.strip():
            part = known[: self._max_phonemes]
            if len(known) > len(part) and " " in part:
                part = part[: part.rindex(" ")]
            known = known[len(part) :]
            if any(symbol.isalpha() for symbol in part):
                lines.append(Line(tuple(self._vocab[symbol] for symbol in part)))
        return lines
