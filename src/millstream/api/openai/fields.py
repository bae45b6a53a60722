"""Parsers for parameters that clients send in several forms. Each returns the one form that the service takes."""

from __future__ import annotations

from typing import cast

from millstream.api.numbers import whole
from millstream.errors import BadRequest
from millstream.types import Prompt, TextPrompt, TokenPrompt

MAX_STOPS = 16
MAX_STOP_LENGTH = 1_024
MAX_PROMPTS = 2048
MAX_BIAS = 100
MAX_BIASES = 10_000
MAX_STOP_TOKENS = 256


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


def token_ids(values: list[object]) -> tuple[int, ...] | None:
    """Returns None if one of the values is not a token id. There may be a hundred thousand, and streams wait meanwhile:
    no Python for each."""
    if float in (kinds := set(map(type, values))):
        values = [whole(value) for value in values]
        kinds = set(map(type, values))
    tokens = cast("tuple[int, ...]", tuple(values))
    return tokens if kinds <= {int} and min(tokens, default=0) >= 0 else None


def parse_stop_token_ids(value: object) -> tuple[int, ...]:
    tokens = token_ids(value) if isinstance(value, list) and len(value) <= MAX_STOP_TOKENS else None
    if tokens is None:
        raise BadRequest(
            f"stop_token_ids must be a list of at most {MAX_STOP_TOKENS} token ids.", param="stop_token_ids"
        )
    return tokens


def parse_stop(value: object) -> tuple[str, ...]:
    """Empty strings are left out: they stand for "none" in the forms of many clients."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"stop must be a string or a list of at most {MAX_STOPS} strings.", param="stop")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise BadRequest(f"stop[{index}] must be a string.", param=f"stop[{index}]")
        if len(stop) > MAX_STOP_LENGTH:
            raise BadRequest(
                f"A stop string has {len(stop)} characters; at most {MAX_STOP_LENGTH} are allowed.", param="stop"
            )
    return tuple(stop for stop in stops if stop)


def parse_prediction(value: object) -> str:
    """The text that the client expects, from `{"type": "content", "content": a string or text parts}`."""
    if not isinstance(value, dict) or value.get("type") != "content":
        raise BadRequest('prediction must be an object with the type "content".', param="prediction")
    content, path = value.get("content"), "prediction.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{path} must be a string or a list of text parts.", param=path)
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f'{path}[{index}] must be an object with the type "text" and a text.', param=f"{path}[{index}]"
            )
    return "".join(part["text"] for part in content)


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
