"""The tokenizer of a transcription model, as its backend uses it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tokenizers

from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.models.transcription_layout import family_of, read_whisper
from millstream.text.loading import load_backend
from millstream.text.tekken import TEKKEN, TekkenVocabulary, read_tekken


class SpeechVocabulary:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # text that looks like a control token is text
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def token(self, name: str) -> int | None:
        found: int | None = self._backend.token_to_id(name)
        return found


_ORIGINALS = {51_864: "openai/whisper-tiny.en", 51_865: "openai/whisper-tiny", 51_866: "openai/whisper-large-v3"}
"""By the size of the vocabulary: a model whose tokenizer fits all of that size."""


def text_encoder(source: ModelSource) -> Callable[[str], list[int]]:
    """From text to tokens, control tokens by their names. Raises `ModelError` if the folder has no tokenizer."""
    backend = load_backend(source)
    backend.no_truncation()
    backend.no_padding()
    return functools.partial(_encoded, backend)


def _encoded(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    tokens: list[int] = backend.encode(text, add_special_tokens=False).ids
    return tokens


def speech_vocabulary(source: ModelSource) -> SpeechVocabulary | TekkenVocabulary:
    """Raises `ModelError` if the folder has no tokenizer. Many Whisper folders made for MLX have none."""
    files = {name for name in ("tokenizer.json", "vocab.json", TEKKEN) if (source.path / name).is_file()}
    if files == {TEKKEN}:
        return read_tekken(source.path)
    if not files and family_of(source.path) == "whisper":
        original = _ORIGINALS.get(read_whisper(source.path).vocab, "the original model")
        raise ModelError(
            f"{source.path} has no tokenizer.json. That of {original} fits: "
            f"hf download {original} tokenizer.json --local-dir {source.path}"
        )
    return SpeechVocabulary(load_backend(source))
