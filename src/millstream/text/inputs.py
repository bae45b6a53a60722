"""Encodes the inputs of embedding models: many texts at once, each within a limit."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from millstream.errors import BadRequest, ContextOverflow
from millstream.text.encoding import MOST_CHARS_PER_TOKEN, encode_part, encoding_of
from millstream.types import Truncation


class EncoderTokenizer:
    """Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # tokenizers of embedding models often cut and pad by themselves
        backend.no_padding()
        # Text that looks like a control token is text.
        backend.encode_special_tokens = True
        self.backend = backend
        self._around = backend.num_special_tokens_to_add(is_pair=False)

    def name(self, token: int) -> str | None:
        """A token's text for a message; None for an id without a token."""
        found: str | None = self.backend.id_to_token(token)
        return found

    def encode(
        self, inputs: Sequence[str | tuple[int, ...]], *, prompt: str, limit: int, truncation: Truncation | None
    ) -> list[list[int]]:
        """The tokens of each input. Raises `BadRequest` with the number of an input that cannot be encoded."""
        return [
            self._check_tokens(number, each, limit, truncation)
            if isinstance(each, tuple)
            else self._encode(number, prompt + each, limit, truncation)
            for number, each in enumerate(inputs)
        ]

    def _encode(self, number: int, text: str, limit: int, truncation: Truncation | None) -> list[int]:
        most = _most(limit, truncation)
        if truncation is None and len(text) > MOST_CHARS_PER_TOKEN * limit:
            raise _too_long(number, f"{len(text)} characters", limit)
        what = f"input {number}"
        if truncation is None:
            encoding = encoding_of(self.backend, text, special=False, what=what)
        else:
            encoding = encode_part(self.backend, text, most, end=truncation.keep_end, what=what)
        length = len(encoding.ids) + self._around
        if length > most:
            if truncation is None:
                raise _too_long(number, f"{length} tokens", limit)
            # The special tokens around the text stay: the model was trained with them.
            encoding.truncate(max(most - self._around, 1), direction="left" if truncation.keep_end else "right")
        tokens: list[int] = self.backend.post_process(encoding, None, True).ids
        if not tokens:
            raise BadRequest(f"input {number} is empty: it has no tokens", param="input")
        return tokens

    def _check_tokens(
        self, number: int, tokens: tuple[int, ...], limit: int, truncation: Truncation | None
    ) -> list[int]:
        """Tokens are taken as they are: whoever sends them adds the special ones."""
        if not tokens:
            raise BadRequest(f"input {number} is empty: it has no tokens", param="input")
        most = _most(limit, truncation)
        if len(tokens) <= most:
            return list(tokens)
        if truncation is None:
            raise _too_long(number, f"{len(tokens)} tokens", limit)
        return list(tokens[-most:] if truncation.keep_end else tokens[:most])


def _most(limit: int, truncation: Truncation | None) -> int:
    return limit if truncation is None or truncation.tokens is None else min(limit, truncation.tokens)


def _too_long(number: int, size: str, limit: int) -> ContextOverflow:
    return ContextOverflow(
        f"This model's maximum context length is {limit} tokens. However, input {number} has {size}. Shorten it, or "
        "let the server cut it with truncate_prompt_tokens: -1.",
        limit=limit,
        param="input",
    )
