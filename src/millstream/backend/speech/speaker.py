"""What a family of speech models provides to the backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from millstream.engine.speech.plan import PieceInput
from millstream.speech_types import Samples, Voice


@dataclass(frozen=True, slots=True)
class SpeakerTraits:
    """What a family, or this model of it, can do."""

    vocab_size: int = 0
    """Rows of its embedding table, if it reads tokens. 0: it reads text."""
    takes_speed: bool = True
    takes_instructions: bool = False
    needs_instructions: bool = False
    """It makes a voice from a description."""
    notes: tuple[str, ...] = ()
    """Lines for the log."""


class Speaker(Protocol):
    """A loaded model. Made, used and freed on the owner thread; it caches nothing outside of itself."""

    @property
    def traits(self) -> SpeakerTraits: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def voices(self) -> Sequence[Voice]:
        """The default first. Empty if the model has one voice without a name."""
        ...

    @property
    def weights(self) -> Sequence[mx.array]:
        """All arrays that it holds, so that they can be evaluated at load and counted."""
        ...

    @property
    def dtype(self) -> str: ...

    @property
    def batch_pieces(self) -> int:
        """Most pieces of one call of `speak`. A batch must give each piece what it would get alone."""
        ...

    @property
    def open_batches(self) -> int:
        """Most iterators of `speak` that may be open at a time. More than 1 is for models that yield often, so that
        their steps can take turns."""
        ...

    def speak(self, pieces: Sequence[PieceInput]) -> Iterator[Sequence[Samples]]:
        """Speaks a batch. Each item has the next samples of each piece, computed: NumPy arrays that may be empty. The
        engine may work on other batches between two items, and may close the iterator at any of them. Models that
        compute a sentence as a whole yield once; those that write sound token by token yield every few tokens, so that
        a cancellation takes effect soon. Raises `BadRequest` if a piece cannot be spoken; then all of the batch
        fails."""
        ...
