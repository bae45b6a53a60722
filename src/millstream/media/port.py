"""What the service needs of a model's media, as a protocol. Imports no image library: a text model needs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image, ready for its model."""

    tensors: dict[str, npt.NDArray[Any]]
    text: str
    """What stands in the prompt where the template has written the marker."""
    places: int
    """How many of the tokens in `text` are places for features."""


class MediaReader(Protocol):
    """Makes of a file what a model takes. Called on the CPU pool, from several threads."""

    @property
    def kinds(self) -> frozenset[str]:
        """Which of `image`, `audio` and `video` the model takes."""
        ...

    @property
    def marker(self) -> str:
        """What the template writes for an image."""
        ...

    @property
    def token_id(self) -> int:
        """The token that features stand at."""
        ...

    def read(self, data: bytes) -> Prepared:
        """Raises `MediaRefused`."""
        ...
