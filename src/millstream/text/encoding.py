"""From text to token ids, without encoding what is far too long."""

from __future__ import annotations

import tokenizers

from millstream.errors import BadRequest, ContextOverflow

_SLICE = 65_536
"""Characters of a long text that are encoded at once to count its tokens."""
_USUAL_LENGTH = 8
"""Characters a token, more than almost any text has. A text of more than this for each token of the limit is counted
in slices first: to encode 31 MB whole takes 43 s and 5 GB."""
_SLACK = 16
"""Tokens that a slice may have more than its text has within the whole."""


def encode(backend: tokenizers.Tokenizer, text: str, *, special: bool, limit: int | None = None) -> list[int]:
    """Raises `ContextOverflow` for a text of far more than `limit` tokens."""
    if limit is not None and len(text) > max(_SLICE, _USUAL_LENGTH * limit):
        _check_length(backend, text, limit)
    try:
        # As a batch of one: `encode` keeps the interpreter lock to its end, a batch gives it up.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=special)
    except TypeError as error:
        raise BadRequest("the text is not valid Unicode: it holds half of a surrogate pair") from error
    return encoding.ids


def _check_length(backend: tokenizers.Tokenizer, text: str, limit: int) -> None:
    count = 0
    for start in range(0, len(text), _SLICE):
        count += len(encode(backend, text[start : start + _SLICE], special=False)) - _SLACK
        if count > limit:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters and far more than {limit} tokens, which is this model's "
                "context. Shorten it."
            )
