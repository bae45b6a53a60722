"""A model's tokenizer: encodes text to tokens, and decodes tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tokenizers

from millstream.text.control_tokens import ControlTokens
from millstream.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_scheme,
    decoder_config,
)
from millstream.text.encoding import encode
from millstream.text.templates.template import TemplateSource


class TokenBytes(dict[int, bytes]):
    """Bytes per token, computed on first access: the whole vocabulary would take too long at start-up."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token: int) -> bytes:
        data = self._find(token)
        self[token] = data
        return data


class Tokenizer:
    """A model's `tokenizers.Tokenizer` with its chat template and EOS tokens. Safe to use from several threads.

    It is built from plain values, so that model folders and GGUF files give the same result. `special_tokens` are more
    variables for templates (`pad_token`, ...).
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
        # A tokenizer saved after training may truncate or pad every text, but prompts must stay complete.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.notes = tuple(notes)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._scheme = byte_scheme(decoder_config(backend.decoder.__getstate__()) if backend.decoder else None)
        self._bytes = TokenBytes(self._find_bytes)
        self._without_special = TokenBytes(lambda token: b"" if token in self._special_ids else self._bytes[token])
        self._special_in: dict[tuple[str, ...], frozenset[int]] = {}
        self._with_shown: dict[frozenset[int], TokenBytes] = {}
        self.template: TemplateSource | None = None
        if chat_template is not None:
            names = {"bos_token": bos_token or "", "eos_token": eos_token or "", **(special_tokens or {})}
            self.template = TemplateSource(chat_template, names)

    def encode(self, text: str, *, special: bool = True, limit: int | None = None) -> list[int]:
        """Returns the tokens of a text. With `special`, the tokenizer adds BOS and the like, as it was trained to.

        Raises `ContextOverflow` if the text has far more than `limit` tokens, without encoding all of it.
        """
        return encode(self._backend, text, special=special, limit=limit)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of all tokens, the same as a `detokenizer` does."""
        stream = self.detokenizer()
        return stream.push(list(ids)) + stream.finish()

    def detokenizer(self, *, continues: bool = False, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """Returns a new detokenizer. `continues`: the text follows other text, so a leading space is part of it.
        `shown`: special tokens that are not skipped, because the output parser needs them."""
        if self._scheme is None:
            return WindowDetokenizer(lambda tokens: self._decode_window(tokens, shown))
        return ByteDetokenizer(self._table(shown), 0 if continues else self._scheme.strip)

    def _decode_window(self, tokens: Sequence[int], shown: frozenset[int]) -> str:
        kept = [token for token in tokens if token in shown or token not in self._special_ids]
        return self._backend.decode(kept, skip_special_tokens=False)

    def _table(self, shown: frozenset[int]) -> TokenBytes:
        if not shown:
            return self._without_special
        if shown not in self._with_shown:
            skipped = self._special_ids - shown
            self._with_shown[shown] = TokenBytes(lambda token: b"" if token in skipped else self._bytes[token])
        return self._with_shown[shown]

    @property
    def added_tokens(self) -> dict[str, int]:
        """Added tokens by name, special or not: each is matched as a whole, and never built by merges."""
        return {token.content: number for number, token in self._backend.get_added_tokens_decoder().items()}

    @property
    def names(self) -> dict[int, str]:
        """Every token's name in the vocabulary, by id."""
        return {number: name for name, number in self._backend.get_vocab(with_added_tokens=True).items()}

    def name(self, token: int) -> str | None:
        """Returns a token's text for a message; None for an id without a token."""
        return self.token_bytes(token).decode(errors="replace") or None

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def token_id(self, name: str) -> int | None:
        return self._backend.token_to_id(name)

    def special_tokens_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Returns the special tokens whose names occur in any of these texts. Cached: every request asks the same."""
        if texts not in self._special_in:
            joined = "\n".join(texts)
            names = ((number, self._backend.id_to_token(number)) for number in self._special_ids)
            self._special_in[texts] = frozenset(number for number, name in names if name and name in joined)
        return self._special_in[texts]

    def as_json(self) -> str:
        """Returns the tokenizer without its template, as tokenizer.json."""
        return self._backend.to_str()

    def token_bytes(self, token: int) -> bytes:
        """Returns the exact bytes of one token: the name of a special token, nothing for an id without a token."""
        return self._bytes[token]

    def _find_bytes(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._special_ids:
            return name.encode()
        if self._scheme is None:
            return self._backend.decode([token], skip_special_tokens=False).encode()
        return self._scheme.piece(name)

    def control_tokens(self, markers: Iterable[str]) -> ControlTokens:
        """Returns the model's control tokens. `markers` are more texts that have a meaning in its prompts."""
        return ControlTokens(self._backend, self.template.source if self.template else "", markers)
