"""Parsers for parameters that clients send in several forms. Each returns the one form that the service takes."""

from __future__ import annotations

from millstream.errors import BadRequest
from millstream.types import Prompt, TextPrompt, TokenPrompt

MAX_STOPS = 16
MAX_STOP_LENGTH = 1_024
MAX_PROMPTS = 2048
MAX_BIAS = 100
MAX_BIASES = 10_000


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of token ids, or a list of either."""
    if isinstance(value, list) and value and not all(type(item) is int for item in value):
        if len(value) > MAX_PROMPTS:
            raise BadRequest(f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt")
        return tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))
    return (_prompt(value, "prompt"),)


def _prompt(value: object, path: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and value and set(map(type, value)) == {int} and min(value) >= 0:
        return TokenPrompt(tuple(value))
    expected = "a string or a non-empty list of token ids"
    if path == "prompt":
        expected += ", or a list of such prompts"
    raise BadRequest(f"{path} must be {expected}.", param=path)


def parse_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"stop must be a string or a list of at most {MAX_STOPS} strings.", param="stop")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            path = "stop" if isinstance(value, str) else f"stop[{index}]"
            raise BadRequest(f"{path} must be a non-empty string.", param=path)
        if len(stop) > MAX_STOP_LENGTH:
            raise BadRequest(
                f"A stop string has {len(stop)} characters; at most {MAX_STOP_LENGTH} are allowed.", param="stop"
            )
    return tuple(stops)


def parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise BadRequest("logit_bias must be an object that maps token ids to numbers.", param="logit_bias")
    if len(value) > MAX_BIASES:
        raise BadRequest(f"logit_bias has {len(value)} tokens; at most {MAX_BIASES} are allowed.", param="logit_bias")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        path = f"logit_bias.{token}"
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise BadRequest(f'logit_bias has the key "{token[:40]}", which is not a token id.', param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise BadRequest(f"{path} must be a number from {-MAX_BIAS} to {MAX_BIAS}.", param=path)
        biases[int(token)] = float(bias)
    return tuple(biases.items())
