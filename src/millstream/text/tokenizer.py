"""A model's tokenizer: text to tokens, and tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tokenizers

from millstream.text.control_tokens import ControlTokens
from millstream.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    decoder_settings,
    read_scheme,
)
from millstream.text.encoding import encode
from millstream.text.template import TemplateSource


class _Pieces(dict[int, bytes]):
    """The bytes of tokens, worked out when first asked for: a whole vocabulary would cost a start-up its time."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token: int) -> bytes:
        piece = self._find(token)
        self[token] = piece
        return piece


class Tokenizer:
    """One model's `tokenizers.Tokenizer` with its template and its ends. Safe to use from several threads.

    Takes plain parts, so that a folder and a GGUF file give the same thing. `special_tokens` are further names for
    templates (`pad_token`, ...).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        # Files saved after training may cut or pad every text; a prompt must arrive whole.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.notes = tuple(notes)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._scheme = read_scheme(decoder_settings(backend.decoder.__getstate__()) if backend.decoder else None)
        self._exact = _Pieces(self._exact_bytes)
        self._spoken = _Pieces(lambda token: b"" if token in self._special_ids else self._exact[token])
        self._found: dict[tuple[str, ...], frozenset[int]] = {}
        self._heard: dict[frozenset[int], _Pieces] = {}
        self.template: TemplateSource | None = None
        if chat_template is not None:
            names = {"bos_token": bos_token or "", "eos_token": eos_token or "", **(special_tokens or {})}
            self.template = TemplateSource(chat_template, names)

    def encode(self, text: str, *, special: bool = True, limit: int | None = None) -> list[int]:
        """Tokens of a text. `special` lets the tokenizer add what it was trained to see around one (BOS, ...).

        Raises `ContextOverflow` for a text of far more than `limit` tokens, without encoding all of it.
        """
        return encode(self._backend, text, special=special, limit=limit)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all tokens: what a `detokenizer` gives for them in any split."""
        stream = self.detokenizer()
        return stream.push(list(ids)) + stream.finish()

    def detokenizer(self, *, continues: bool = False, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh stream. `continues`: the text goes on after another, so a space at its beginning is text. `shown`:
        special tokens that are not silent, because whoever reads the text must see them."""
        if self._scheme is None:
            return WindowDetokenizer(lambda tokens: self._decode_window(tokens, shown))
        return ByteDetokenizer(self._pieces(shown), 0 if continues else self._scheme.strip)

    def _decode_window(self, tokens: Sequence[int], shown: frozenset[int]) -> str:
        heard = [token for token in tokens if token in shown or token not in self._special_ids]
        return self._backend.decode(heard, skip_special_tokens=False)

    def _pieces(self, shown: frozenset[int]) -> _Pieces:
        if not shown:
            return self._spoken
        if shown not in self._heard:
            silent = self._special_ids - shown
            self._heard[shown] = _Pieces(lambda token: b"" if token in silent else self._exact[token])
        return self._heard[shown]

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that stand for themselves, special or not: text never becomes one of them piece by piece."""
        return {token.content: number for number, token in self._backend.get_added_tokens_decoder().items()}

    def token_id(self, name: str) -> int | None:
        return self._backend.token_to_id(name)

    def special_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The special tokens whose names stand in any of these texts. Remembered: every request asks the same."""
        if texts not in self._found:
            joined = "\n".join(texts)
            names = ((number, self._backend.id_to_token(number)) for number in self._special_ids)
            self._found[texts] = frozenset(number for number, name in names if name and name in joined)
        return self._found[texts]

    def as_json(self) -> str:
        """All of it but the template, in the form of a tokenizer.json."""
        return self._backend.to_str()

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token. Special tokens are their names; an id without a token is nothing."""
        return self._exact[token]

    def _exact_bytes(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._special_ids:
            return name.encode()
        if self._scheme is None:
            return self._backend.decode([token], skip_special_tokens=False).encode()
        return self._scheme.piece(name)

    def control_tokens(self, markers: Iterable[str]) -> ControlTokens:
        """Those of this model; `markers` are texts that mean something in its prompts, whatever its files say."""
        return ControlTokens(self._backend, self.template.source if self.template else "", markers)
