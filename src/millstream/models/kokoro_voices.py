"""Kokoro's voices by their names: `af_heart` is American English, female. No MLX."""

from __future__ import annotations

from millstream.speech_types import Voice

DEFAULT_VOICE = "af_heart"

_LANGUAGES = {
    "a": "en-us", "b": "en-gb", "e": "es", "f": "fr", "h": "hi", "i": "it", "j": "ja", "p": "pt-br", "z": "zh",
}  # fmt: skip
_GENDERS = {"f": "female", "m": "male"}

OPENAI_VOICES = {
    "alloy": "af_alloy",
    "ash": "am_michael",
    "ballad": "bm_george",
    "cedar": "am_puck",
    "coral": "af_bella",
    "echo": "am_echo",
    "fable": "bm_fable",
    "marin": "af_heart",
    "nova": "af_nova",
    "onyx": "am_onyx",
    "sage": "af_sarah",
    "shimmer": "af_sky",
    "verse": "am_fenrir",
}
"""Names that clients with a fixed list send, and the voice that speaks for each."""


def voice_of(name: str) -> Voice:
    """By the first two letters. A voice of another name has no language: it speaks American English."""
    if len(name) > 3 and name[2] == "_":
        return Voice(name, _LANGUAGES.get(name[0]), _GENDERS.get(name[1]))
    return Voice(name)
