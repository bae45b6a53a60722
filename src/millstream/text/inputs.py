"""Encodes the inputs of embedding models: many texts at once, each within a limit."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from millstream.errors import BadRequest, ContextOverflow
from millstream.types import Truncation

_CHARS_PER_TOKEN = 64
"""More characters per token than any text has: such a text need not be encoded to see that it is too long."""
_LIKELY_TIKTOKEN = (
    "Some clients send tokens of OpenAI's own models: let them send text (LangChain: check_embedding_ctx_length=False)."
)


class EncoderTokenizer:
    """Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # tokenizers of embedding models often cut and pad by themselves
        backend.no_padding()
        # Text that looks like a control token is text.
        backend.encode_special_tokens = True
        self.backend = backend
        self._around = backend.num_special_tokens_to_add(is_pair=False)
        self._vocab_size = backend.get_vocab_size(with_added_tokens=True)

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
        if truncation is None and len(text) > _CHARS_PER_TOKEN * limit:
            raise _too_long(number, f"{len(text)} characters", limit)
        try:
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise BadRequest(f"input {number} is not valid Unicode: it contains an unpaired surrogate") from error
        length = len(encoding.ids) + self._around
        most = _most(limit, truncation)
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
        outside = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            raise BadRequest(
                f"input {number} has the token {outside}; this model's token ids are 0 to {self._vocab_size - 1}. "
                f"{_LIKELY_TIKTOKEN}",
                param="input",
            )
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
