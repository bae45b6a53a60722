"""Which format a model writes its calls in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millstream.text.tool_formats import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    lists,
    llama,
    minimax,
    mistral,
    pythonic,
    qwen3_coder,
)
from millstream.text.tool_formats.format import ToolFormat

_ORDERED = (
    harmony.FORMAT,
    gemma.GEMMA_4,
    gemma.FUNCTION_GEMMA,
    kimi.FORMAT,
    minimax.FORMAT,
    deepseek.V3_2,
    deepseek.V3,
    deepseek.V3_1,
    mistral.FORMAT,
    mistral.JSON,
    lists.NEMOTRON,
    lists.GRANITE,
    glm.FORMAT,
    qwen3_coder.FORMAT,
    hermes.FORMAT,
    pythonic.LFM2,
    pythonic.FORMAT,
    llama.FORMAT,
)
"""Special ones first: a template of Qwen3-Coder shows Hermes' tags as well."""

FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _ORDERED}
FALLBACK = hermes.FORMAT
"""For models that were never shown a format: it is the commonest."""


def tool_format(template: str, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """The format that a chat template shows, or that the vocabulary was made for; None if neither tells."""
    for each in _ORDERED:
        if any(all(sign in template for sign in signs) for signs in each.signs):
            return each
    for each in _ORDERED:
        if each.tokens and all(has_token(token) for token in each.tokens):
            return each
    return None
