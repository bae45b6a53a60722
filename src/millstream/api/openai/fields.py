"""Parsers for parameters that clients send in several forms. Each returns the one form that the service takes."""

from __future__ import annotations

from millstream.api.numbers import token_ids
from millstream.errors import BadRequest
from millstream.types import Prompt, TextPrompt, TokenPrompt

MAX_PROMPTS = 2048


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of token ids, or a list of either."""
    if isinstance(value, list) and value and not set(map(type, value)) <= {int, float}:
        if len(value) > MAX_PROMPTS:
            raise BadRequest(f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt")
        return tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))
    return (_prompt(value, "prompt"),)


def _prompt(value: object, path: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and value and (tokens := token_ids(value)) is not None:
        return TokenPrompt(tokens)
    expected = "a string or a non-empty list of token ids"
    if path == "prompt":
        expected += ", or a list of such prompts"
    raise BadRequest(f"{path} must be {expected}.", param=path)
