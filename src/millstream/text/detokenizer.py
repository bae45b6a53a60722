"""From tokens to text as they come: never half a character, and the same text for every split.

Most tokenizers write text in pieces of bytes, so the way back is a table of bytes and an incremental UTF-8 decoder.
The streaming decoder of `tokenizers` decodes a window again at each token, and a run of bytes that never become a
character makes its window grow without end. The window below is bounded, and only for decoders that have no bytes.
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
_LONGEST_WAIT = 16
"""Tokens that may stay unreadable before the window emits them as they are; a character has at most four bytes."""


class Detokenizer(Protocol):
    """Text of one stream of tokens. Special tokens are silent."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never got all its bytes."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with: printable Latin-1 as it is, others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class ByteScheme:
    """How a decoder reads the name of one token as bytes, without looking at its neighbours."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    """Spaces that the decoder takes off the beginning of a text."""

    def piece(self, name: str) -> bytes:
        if self.byte_fallback and (byte := _BYTE_NAME.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for old, new in self.replacements:
            name = name.replace(old, new)
        if self.byte_level and all(letter in _ALPHABET for letter in name):
            return bytes([_ALPHABET[letter] for letter in name])
        return name.encode()


def read_scheme(decoder: Mapping[str, Any] | None) -> ByteScheme | None:
    """The scheme of a decoder, given as in a tokenizer.json; None if it needs more than one token at a time."""
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
            case {"type": "Metaspace", "replacement": str(mark), **rest}:
                replacements.append((mark, " "))
                strip = 0 if rest.get("prepend_scheme", "always") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip = start
            case _:
                return None
    return ByteScheme(byte_level, byte_fallback, tuple(replacements), strip)


def decoder_settings(state: bytes) -> Mapping[str, Any] | None:
    """A `tokenizers` decoder as in a tokenizer.json, from the state that it pickles."""
    settings = json.loads(state)
    return settings if isinstance(settings, dict) else None


class ByteDetokenizer:
    """Joins bytes and lets whole characters out. `strip` spaces at the beginning of the text are left away."""

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
        kept = text.lstrip(" ")
        gone = min(self._strip, len(text) - len(kept))
        self._strip = 0 if kept else self._strip - gone
        return text[gone:]


class WindowDetokenizer:
    """Asks the tokenizer for the text of the last tokens with and without the new ones, and takes the difference."""

    __slots__ = ("_decode", "_open", "_settled", "_settled_text")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._settled: list[int] = []
        self._settled_text = ""
        self._open: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        # One token at a time: the text must not depend on how the tokens were split.
        return "".join([self._step(token) for token in tokens])

    def finish(self) -> str:
        return self._settle(self._decode(self._settled + self._open))

    def _step(self, token: int) -> str:
        self._open.append(token)
        text = self._decode(self._settled + self._open)
        if text.endswith(_REPLACEMENT) and len(self._open) < _LONGEST_WAIT:
            return ""
        return self._settle(text)

    def _settle(self, text: str) -> str:
        new = text[len(self._settled_text) :]
        # Silent tokens tell nothing of what stands before the next word: the last ones that spoke stay the context.
        if new:
            self._settled = self._open
            self._settled_text = self._decode(self._settled)
        self._open = []
        return new
