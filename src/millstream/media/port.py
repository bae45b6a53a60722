"""The protocol between the service and a model's media preprocessing. Imports no image library: a text model needs
none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from millstream.types import Kind


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """One image, audio file or video, preprocessed for its model."""

    kind: Kind
    tensors: dict[str, npt.NDArray[Any]]
    text: str
    """Replaces the placeholder that the chat template wrote."""
    feature_tokens: int
    """How many of the tokens of `text` are replaced by features."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """How a kind of media appears in prompts."""

    text: str
    """What the chat template writes for one file."""
    token_id: int
    """The token whose embedding is replaced by features."""


class MediaPreprocessor(Protocol):
    """Turns a media file into tensors for a model. Called from several worker threads; both methods may block."""

    @property
    def placeholders(self) -> Mapping[Kind, Placeholder]:
        """By kind: the kinds of media that the model takes."""
        ...

    def decoding_bytes(self, kind: Kind, data: bytes) -> int:
        """Estimated peak memory of `preprocess`, from the file's header. Raises `MediaRefused`."""
        ...

    def preprocess(self, kind: Kind, data: bytes) -> PreparedMedia:
        """Raises `MediaRefused`."""
        ...
