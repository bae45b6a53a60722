"""Fill in the middle: the text between a prefix and a suffix, for models that were trained for it.

Such models have control tokens for the parts of the prompt. The names differ by family, and so does the order of the
parts. A model is known by its vocabulary: it can fill in the middle if all tokens of a family are in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millstream.text.control_tokens import ControlTokens
from millstream.text.tokenizer import Tokenizer

Slot = Literal["prefix", "suffix"]


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family of models marks the parts: token, part, token, part, token."""

    parts: tuple[tuple[str, Slot], tuple[str, Slot]]
    """Each part after the token that opens it."""
    middle: str = ""
    """The token after which the output begins. Empty: there is none."""
    ends: tuple[str, ...] = ()
    """Tokens that end the output, besides the model's own."""


def _prefix_first(prefix: str, suffix: str, middle: str, *ends: str) -> _Family:
    return _Family(((prefix, "prefix"), (suffix, "suffix")), middle, ends)


_FAMILIES = (
    # Qwen, CodeGemma, and others that took over the names
    _prefix_first(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|endoftext|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|file_separator|>",
    ),
    # StarCoder, Granite, SmolLM
    _prefix_first("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "<fim_pad>", "<file_sep>"),
    # SantaCoder
    _prefix_first("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<|endoftext|>", "<fim-pad>"),
    # GLM
    _prefix_first("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|endoftext|>"),
    # DeepSeek: the hole stands between the parts
    _prefix_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|EOT|>"),
    # CodeLlama
    _prefix_first("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    # Codestral: the suffix comes first
    _Family((("[SUFFIX]", "suffix"), ("[PREFIX]", "prefix"))),
)


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The control tokens of one model."""

    parts: tuple[tuple[int, Slot], tuple[int, Slot]]
    """Each part after the token that opens it."""
    middle: int | None
    stop_tokens: frozenset[int]
    """Tokens that end the output, besides the model's own."""

    def encode(
        self, tokenizer: Tokenizer, control: ControlTokens | None, prefix: str, suffix: str, *, limit: int | None = None
    ) -> tuple[int, ...]:
        """Returns the prompt. `control` escapes control tokens in the client's text; None if clients may write them.

        Raises `ContextOverflow` if a part has far more than `limit` tokens.
        """
        texts: dict[Slot, str] = {"prefix": prefix, "suffix": suffix}
        tokens = tokenizer.encode("")[:1]  # BOS, if the model has one
        for opening, slot in self.parts:
            tokens += [opening, *_encode_text(tokenizer, control, texts[slot], limit)]
        return (*tokens, self.middle) if self.middle is not None else tuple(tokens)


def _encode_text(tokenizer: Tokenizer, control: ControlTokens | None, text: str, limit: int | None) -> list[int]:
    if control is not None:
        found, (_, (text,)) = control.escape([], [text])
        if found:
            return control.encode(text, limit=limit)
    return tokenizer.encode(text, special=False, limit=limit)


def detect_fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """Returns None if the vocabulary has the control tokens of no family."""
    for family in _FAMILIES:
        (first, first_slot), (second, second_slot) = family.parts
        opening, following = tokenizer.token_id(first), tokenizer.token_id(second)
        middle = tokenizer.token_id(family.middle) if family.middle else None
        if opening is None or following is None or (family.middle and middle is None):
            continue
        ends = (tokenizer.token_id(name) for name in family.ends)
        stops = {opening, following, middle, *ends} - {None}
        return FillInMiddle(
            ((opening, first_slot), (following, second_slot)),
            middle,
            frozenset(token for token in stops if token is not None),
        )
    return None
