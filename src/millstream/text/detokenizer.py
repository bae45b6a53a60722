"""Streaming detokenizers: whole characters only, and the same text however the tokens are batched.

Most tokenizers map tokens to bytes, so decoding is a table of bytes and an incremental UTF-8 decoder. The streaming
decoder of `tokenizers` decodes a window again for each token, and a run of bytes that never forms a character makes the
window grow without limit. The window here is bounded, and only used for decoders that do not map tokens to bytes.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
"""Tokens that may stay undecodable before the window emits U+FFFD; a character has at most four bytes."""


class Detokenizer(Protocol):
    """Decodes one stream of tokens. Special tokens are skipped."""

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens complete."""
        ...

    def finish(self) -> str:
        """Returns the rest: U+FFFD for an incomplete character."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """Returns the characters by which byte-level tokenizers write bytes: printable Latin-1, then U+0100 and up."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class ByteScheme:
    """How a decoder maps the name of one token to bytes, independently of its neighbours."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    """Spaces that the decoder strips from the start of a text."""

    def piece(self, name: str) -> bytes:
        if self.byte_fallback and (byte := _BYTE_NAME.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for old, new in self.replacements:
            name = name.replace(old, new)
        if self.byte_level and all(char in _ALPHABET for char in name):
            return bytes([_ALPHABET[char] for char in name])
        return name.encode()


def byte_scheme(decoder: Mapping[str, Any] | None) -> ByteScheme | None:
    """Returns the scheme of a decoder, described as in tokenizer.json. None if it looks at neighbouring tokens."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    byte_level = byte_fallback = fused = False
    replacements: list[tuple[str, str]] = []
    strip = 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = fused = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(symbol), **rest}:
                replacements.append((symbol, " "))
                strip = 0 if rest.get("prepend_scheme", "always") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip = start
            case _:
                return None
    return ByteScheme(byte_level, byte_fallback, tuple(replacements), strip)


def decoder_config(state: bytes) -> Mapping[str, Any] | None:
    """Returns a `tokenizers` decoder as tokenizer.json describes it, from its pickled state."""
    config = json.loads(state)
    return config if isinstance(config, dict) else None


class ByteDetokenizer:
    """Joins the bytes of tokens and emits whole characters. Removes up to `strip` spaces at the start of the text."""

    __slots__ = ("_pieces", "_rest", "_strip")

    def __init__(self, pieces: Mapping[int, bytes], strip: int) -> None:
        self._pieces = pieces
        self._strip = strip
        self._rest = b""

    def push(self, tokens: Sequence[int]) -> str:
        pieces = self._pieces
        data = pieces[tokens[0]] if len(tokens) == 1 else b"".join([pieces[token] for token in tokens])
        if self._rest:
            data = self._rest + data
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._rest, "replace", True)
        self._rest = b""
        return text

    def _stripped(self, text: str) -> str:
        rest = text.lstrip(" ")
        removed = min(self._strip, len(text) - len(rest))
        self._strip = 0 if rest else self._strip - removed
        return text[removed:]


class WindowDetokenizer:
    """Decodes the last tokens with and without the new ones, and emits the difference."""

    __slots__ = ("_context", "_context_text", "_decode", "_pending")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        # One token at a time, so that the text does not depend on how the tokens are batched.
        return "".join([self._step(token) for token in tokens])

    def finish(self) -> str:
        return self._take(self._decode(self._context + self._pending))

    def _step(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING:
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        new = text[len(self._context_text) :]
        # Tokens without text do not tell whether a space precedes the next word: the last with text stay the context.
        if new:
            self._context = self._pending
            self._context_text = self._decode(self._context)
        self._pending = []
        return new
