"""The messages of encoder engines: token sequences in, vectors out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from millstream.engine.messages import EVENT_BYTES, Finished, Output, Submit

TOKEN_BYTES = 4
"""Tokens travel as 32-bit integers of this machine: a request may have a million of them."""


@dataclass(frozen=True, slots=True)
class Encode(Submit):
    """Encode each input. One `Vectors` or more carry the results, in any order, and `Encoded` ends the request."""

    inputs: tuple[bytes, ...]
    """The tokens of each input, at least one."""
    first_parts: tuple[int, ...] = ()
    """For pairs of texts: how many tokens of each input belong to the first one. Empty: inputs are single texts."""


@dataclass(frozen=True, slots=True)
class Vectors(Output):
    """The results of some inputs of a request."""

    may_be_large: ClassVar[bool] = True

    inputs: tuple[int, ...]
    """Which of the request's inputs these are."""
    values: bytes
    """32-bit floats of this machine, one vector after the other."""
    width: int
    """Numbers per vector."""

    @property
    def nbytes(self) -> int:
        return EVENT_BYTES + len(self.values)


@dataclass(frozen=True, slots=True)
class Encoded(Finished):
    """All vectors of the request were sent, or it was cancelled."""
