"""Registry of tool-call formats, and detection of the one that a model uses."""

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
"""In order of detection, special formats first: a Qwen3-Coder template contains the tags of Hermes, too."""

FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _ORDERED}
FALLBACK = hermes.FORMAT
"""For models without a format of their own: the most common one."""


def detect_tool_format(template: str, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """Detects the format from the chat template, then from the vocabulary. Returns None if neither decides."""
    for each in _ORDERED:
        if any(all(hint in template for hint in group) for group in each.template_hints):
            return each
    for each in _ORDERED:
        if each.token_hints and all(has_token(token) for token in each.token_hints):
            return each
    return None
