"""Numbers as clients send them: some languages write every number as a float, so 16.0 counts as 16."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def whole(value: object) -> object:
    """Returns a float without a fraction as an integer, and everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
"""An integer field of a strict model. JSON schema, too, takes 16.0 for an integer."""
