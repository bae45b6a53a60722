"""Encodes text to token ids. Text that is far too long is refused before all of it is encoded."""

from __future__ import annotations

import tokenizers

from millstream.errors import BadRequest, ContextOverflow

MOST_CHARS_PER_TOKEN = 64
"""More characters per token than any text has: no more than this times the limit needs to be looked at."""
_SLICE = 65_536
"""Characters per slice when the tokens of a long text are counted."""
_CHARS_PER_TOKEN = 8
"""More characters per token than almost any text has. A text that is longer than this times the limit is counted in
slices first: encoding 31 MB at once takes 43 s and 5 GB."""
_SLACK = 16
"""How many more tokens a slice may have than the same characters have within the whole text. So many next to a cut may
differ."""


def encode(backend: tokenizers.Tokenizer, text: str, *, special: bool, limit: int | None = None) -> list[int]:
    """Returns the token ids. Raises `ContextOverflow` if the text has far more than `limit` tokens."""
    if limit is not None and len(text) > max(_SLICE, _CHARS_PER_TOKEN * limit):
        _check_length(backend, text, limit)
    ids: list[int] = encoding_of(backend, text, special=special).ids
    return ids


def encode_part(
    backend: tokenizers.Tokenizer, text: str, most: int, *, end: bool = False, what: str = "the text"
) -> tokenizers.Encoding:
    """Encodes as much of a text as is needed for its first `most` tokens, or its last ones with `end`: at least these,
    if there are so many, and the same ones as of the whole text. A text of a megabyte takes a second, most of which
    would be cut off again."""
    size = _CHARS_PER_TOKEN * (most + _SLACK)
    while True:
        part = text[-size:] if end else text[:size]
        encoding = encoding_of(backend, part, special=False, what=what)
        if len(part) == len(text) or len(encoding.ids) >= most + _SLACK or size >= MOST_CHARS_PER_TOKEN * most:
            return encoding
        size *= 4


def encoding_of(
    backend: tokenizers.Tokenizer, text: str, *, special: bool, what: str = "the text"
) -> tokenizers.Encoding:
    """`what` names the text in errors."""
    try:
        # A batch of one: `encode` holds the GIL until it returns, `encode_batch_fast` releases it.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=special)
    except TypeError as error:
        raise BadRequest(f"{what} is not valid Unicode: it contains an unpaired surrogate") from error
    return encoding


def _check_length(backend: tokenizers.Tokenizer, text: str, limit: int) -> None:
    count = 0
    for start in range(0, len(text), _SLICE):
        count += len(encode(backend, text[start : start + _SLICE], special=False)) - _SLACK
        if count > limit:
            raise ContextOverflow(
                f"This model's maximum context length is {limit} tokens. However, the prompt has {len(text)} "
                "characters, which are far more tokens. Shorten the prompt.",
                limit=limit,
            )
