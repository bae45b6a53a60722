"""Encodes a query and a document for a reranker, which reads both together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import tokenizers

from millstream.errors import BadRequest
from millstream.text.encoding import MOST_CHARS_PER_TOKEN, encode_part, encoding_of

MAX_QUERY_SHARE = 0.75
"""A query that leaves a document less than the rest of the context is refused: the score would mean nothing."""

_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen's rerankers were trained with."""


@dataclass(frozen=True, slots=True)
class EncodedPair:
    tokens: list[int]
    first_part: int | None
    """How many of them belong to the query; None if the model does not tell parts apart."""


class PairEncoder(Protocol):
    """Safe to use from several threads."""

    def encode(
        self, pairs: Sequence[tuple[str, str]], *, limit: int, document_limit: int | None, instruction: str | None
    ) -> list[EncodedPair]:
        """Documents are cut to what fits; a query that takes too much raises `BadRequest`."""
        ...

    def name(self, token: int) -> str | None:
        """A token's text for a message; None for an id without a token."""
        ...


class CrossEncoderPairs:
    """As the tokenizer's own template joins two texts."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._around = backend.num_special_tokens_to_add(is_pair=True)

    def encode(
        self, pairs: Sequence[tuple[str, str]], *, limit: int, document_limit: int | None, instruction: str | None
    ) -> list[EncodedPair]:
        if instruction is not None:
            raise BadRequest("this model takes no instruction; leave it out", param="instruction")
        joined = _encoded(self._backend, pairs, limit - self._around, document_limit)
        return [self._pair(first, second) for first, second in joined]

    def name(self, token: int) -> str | None:
        found: str | None = self._backend.id_to_token(token)
        return found

    def _pair(self, first: tokenizers.Encoding, second: tokenizers.Encoding) -> EncodedPair:
        joined = self._backend.post_process(first, second, add_special_tokens=True)
        return EncodedPair(joined.ids, joined.type_ids.count(0))


class YesNoPairs:
    """A question to a language model whose next token is the answer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._prefix = backend.encode(_PREFIX, add_special_tokens=False).ids
        self._suffix = backend.encode(_SUFFIX, add_special_tokens=False).ids
        # From here on, text that looks like a control token is text: a document must not end its own message.
        backend.encode_special_tokens = True
        self._backend = backend

    def encode(
        self, pairs: Sequence[tuple[str, str]], *, limit: int, document_limit: int | None, instruction: str | None
    ) -> list[EncodedPair]:
        around = len(self._prefix) + len(self._suffix)
        instruct = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: "
        asked = [(f"{instruct}{query}\n<Document>:", f" {document}") for query, document in pairs]
        joined = _encoded(self._backend, asked, limit - around, document_limit)
        return [EncodedPair([*self._prefix, *first.ids, *second.ids, *self._suffix], None) for first, second in joined]

    def name(self, token: int) -> str | None:
        found: str | None = self._backend.id_to_token(token)
        return found


def answer_tokens(backend: tokenizers.Tokenizer) -> tuple[int, int] | None:
    """The tokens for no and yes; None if the vocabulary lacks one."""
    no, yes = backend.token_to_id("no"), backend.token_to_id("yes")
    return None if no is None or yes is None else (no, yes)


def _encoded(
    backend: tokenizers.Tokenizer, pairs: Sequence[tuple[str, str]], limit: int, document_limit: int | None
) -> Iterator[tuple[tokenizers.Encoding, tokenizers.Encoding]]:
    """Both parts of each pair, which together have at most `limit` tokens. A query that most pairs share is encoded
    once, and of no text more than could fit."""
    shared, first = None, None
    for query, document in pairs:
        if first is None or query != shared:
            shared, first = query, _query(backend, query, limit)
        room = limit - len(first.ids)
        room = room if document_limit is None else min(room, document_limit)
        second = encode_part(backend, document, room)
        second.truncate(room)
        yield first, second


def _query(backend: tokenizers.Tokenizer, text: str, limit: int) -> tokenizers.Encoding:
    size = f"{len(text)} characters"
    if len(text) <= MOST_CHARS_PER_TOKEN * limit:
        encoding = encoding_of(backend, text, special=False)
        if len(encoding.ids) <= MAX_QUERY_SHARE * limit:
            return encoding
        size = f"{len(encoding.ids)} tokens"
    raise BadRequest(
        f"the query has {size}; this model takes {limit} tokens for the query and a document together. Shorten the "
        "query.",
        param="query",
    )
