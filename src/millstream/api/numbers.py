"""Numbers as clients send them: some languages write every number as a float, so 16.0 counts as 16."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import BeforeValidator


def whole(value: object) -> object:
    """Returns a float without a fraction as an integer, and everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
"""An integer field of a strict model. JSON schema, too, takes 16.0 for an integer."""


def token_ids(values: list[object]) -> tuple[int, ...] | None:
    """Returns None if one of the values is not a token id. There may be a hundred thousand, and streams wait meanwhile:
    no Python for each."""
    if float in (kinds := set(map(type, values))):
        values = [whole(value) for value in values]
        kinds = set(map(type, values))
    tokens = cast("tuple[int, ...]", tuple(values))
    return tokens if kinds <= {int} and min(tokens, default=0) >= 0 else None
