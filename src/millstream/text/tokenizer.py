"""A model's tokenizer: text to tokens, tokens to text, and conversations to prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tokenizers

from millstream.errors import BadRequest, ModelError
from millstream.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    decoder_settings,
    read_scheme,
)
from millstream.text.template import ChatTemplate, Message

_NO_TEMPLATE = "this model has no chat template: it continues text, so use /v1/completions"


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
    templates (`pad_token`, ...). A template that does not compile leaves a note: the model can still continue text.
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
        self.template_source: str | None = None
        self._template: ChatTemplate | None = None
        self._no_template = _NO_TEMPLATE
        if chat_template is not None:
            self._compile(chat_template, special_tokens or {})

    def _compile(self, source: str, special_tokens: Mapping[str, str]) -> None:
        names = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or "", **special_tokens}
        try:
            self._template = ChatTemplate(source, names)
            self.template_source = source
        except ModelError as error:
            self._no_template = error.message
            self.notes = (*self.notes, error.message)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text. `special` lets the tokenizer add what it was trained to see around one (BOS, ...)."""
        try:
            # As a batch of one: `encode` keeps the interpreter lock to its end, a batch gives it up.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        except TypeError as error:
            raise BadRequest("the text is not valid Unicode: it holds half of a surrogate pair") from error
        return encoding.ids

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

    def render_chat(self, messages: Sequence[Message], /, **kwargs: object) -> str:
        """The prompt of a conversation, as text. `kwargs` go to the template (`tools`, `enable_thinking`, ...)."""
        if self._template is None:
            raise BadRequest(self._no_template, param="messages")
        return self._template.render(messages, **kwargs)

    def render_media(self, messages: Sequence[Message], markers: Mapping[str, str], /, **kwargs: object) -> str:
        """The same for a conversation with media: the marker of its kind stands wherever there is one."""
        if self._template is None:
            raise BadRequest(self._no_template, param="messages")
        return self._template.render_media(messages, markers, **kwargs)

    def encode_chat(self, messages: Sequence[Message], /, **kwargs: object) -> list[int]:
        """The prompt of a conversation, as tokens. A template writes all special tokens itself; none are added."""
        return self.encode(self.render_chat(messages, **kwargs), special=False)
