"""Reads fields of a client's event, with errors that name the field."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final

from millstream.errors import BadRequest


class Missing:
    """A field that was not sent, as opposed to null."""


MISSING: Final = Missing()


class Fields:
    """An object of an event. `path` is where it stands in it, such as `session.audio`."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self.path = path

    @classmethod
    def of(cls, value: object, path: str) -> Fields:
        if not isinstance(value, dict):
            raise BadRequest(f"{path or 'The body'} must be an object.", param=path or None)
        return cls(value, path)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> Sequence[str]:
        return list(self._values)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        """`MISSING` if it was not sent."""
        return self._values.get(name, MISSING)

    def inner(self, name: str) -> Fields | None:
        """An object; None if it is missing or null."""
        value = self._values.get(name)
        return None if value is None else Fields.of(value, self.at(name))

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"{self.at(name)} must be a string.", param=self.at(name))
        return value

    def needed(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise BadRequest(f"{self.at(name)} is required.", param=self.at(name))
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise BadRequest(f"{self.at(name)} must be a number from {low:g} to {high:g}.", param=self.at(name))
        return float(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.number(name, low, high)
        if value is not None and value != int(value):
            raise BadRequest(f"{self.at(name)} must be an integer.", param=self.at(name))
        return None if value is None else int(value)

    def flag(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{self.at(name)} must be true or false.", param=self.at(name))
        return value

    def one_of(self, name: str, choices: Sequence[str]) -> str | None:
        value = self._values.get(name)
        if value is None or (isinstance(value, str) and value in choices):
            return value
        raise BadRequest(f"{self.at(name)} must be one of {', '.join(choices)}.", param=self.at(name))

    def list(self, name: str) -> list[Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise BadRequest(f"{self.at(name)} must be a list.", param=self.at(name))
        return value

    def audio(self, name: str) -> bytes:
        value = self.needed(name)
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"{self.at(name)} is not valid base64: {error}.", param=self.at(name)) from error
