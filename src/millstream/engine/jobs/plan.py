"""A step of an encoder engine as data: inputs of like length, padded to one."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.engine.jobs.messages import Encode
from millstream.engine.protocols import Backend
from millstream.model_facts import EncoderFacts


@dataclass(frozen=True, slots=True)
class BatchInput:
    request_id: int
    index: int
    """Its number among the inputs of its request."""
    tokens: bytes = field(repr=False)
    """Not in the log, which has the plan of a step that failed: they are a user's text."""
    first_part: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    inputs: tuple[BatchInput, ...]
    length: int
    """Tokens of the longest input: all are padded to it."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    values: bytes
    """One vector of 32-bit floats for each input, in the order of the plan."""
    width: int


EncoderBackend = Backend[Encode, BatchPlan, BatchResult, EncoderFacts]
