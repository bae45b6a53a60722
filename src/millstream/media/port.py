"""What the service needs of a model's media, as a protocol. Imports no image library: a text model needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from millstream.types import Kind


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image, sound or video, ready for its model."""

    kind: Kind
    tensors: dict[str, npt.NDArray[Any]]
    text: str
    """What stands in the prompt where the template has written the marker."""
    places: int
    """How many of the tokens in `text` are places for features."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How a kind of media is written in prompts."""

    text: str
    """What the template writes for one."""
    token_id: int
    """The token that features stand at."""


class MediaPreprocessor(Protocol):
    """Makes of a file what a model takes. Called on the CPU pool, from several threads."""

    @property
    def marks(self) -> Mapping[Kind, Mark]:
        """The kinds that the model takes."""
        ...

    def decoding_bytes(self, kind: Kind, data: bytes) -> int:
        """What `read` takes at its peak, about, from the file's header. Raises `MediaRefused`."""
        ...

    def read(self, kind: Kind, data: bytes) -> Prepared:
        """Raises `MediaRefused`."""
        ...
