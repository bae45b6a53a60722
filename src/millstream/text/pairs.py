"""Encodes a query and a document for a reranker, which reads both together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tokenizers

from millstream.errors import BadRequest

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
        return [self._pair(query, document, limit, document_limit) for query, document in pairs]

    def _pair(self, query: str, document: str, limit: int, document_limit: int | None) -> EncodedPair:
        first, second = _encode(self._backend, query, document)
        room = _room(len(first.ids), limit - self._around, document_limit)
        second.truncate(room)
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
        encoded = []
        for query, document in pairs:
            question = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>:"
            first, second = _encode(self._backend, question, f" {document}")
            room = _room(len(first.ids), limit - around, document_limit)
            encoded.append(EncodedPair([*self._prefix, *first.ids, *second.ids[:room], *self._suffix], None))
        return encoded


def answer_tokens(backend: tokenizers.Tokenizer) -> tuple[int, int] | None:
    """The tokens for no and yes; None if the vocabulary lacks one."""
    no, yes = backend.token_to_id("no"), backend.token_to_id("yes")
    return None if no is None or yes is None else (no, yes)


def _encode(backend: tokenizers.Tokenizer, first: str, second: str) -> list[tokenizers.Encoding]:
    try:
        return backend.encode_batch([first, second], add_special_tokens=False)
    except TypeError as error:
        raise BadRequest("a text is not valid Unicode: it contains an unpaired surrogate") from error


def _room(query_tokens: int, limit: int, document_limit: int | None) -> int:
    """How many tokens of a document fit."""
    if query_tokens > MAX_QUERY_SHARE * limit:
        raise BadRequest(
            f"the query has {query_tokens} tokens; this model takes {limit} for the query and a document together. "
            "Shorten the query.",
            param="query",
        )
    room = limit - query_tokens
    return room if document_limit is None else min(room, document_limit)
