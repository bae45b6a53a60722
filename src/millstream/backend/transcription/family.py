"""What a family of transcription models provides to the backend. Owner only, all of it.

There are two sorts. A `SteppingFamily` advances all of its rows by one token per step, so rows join and leave at any
step: Whisper. A `WholeFamily` computes some windows from begin to end in one step: models of libraries that cannot be
stopped in between. New requests and cancellations wait for the end of such a step, so keep its windows short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millstream.engine.transcription.messages import WindowText
from millstream.engine.transcription.plan import RowKey, TranscriptionResult, WindowStart


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family, or this model of it, can do."""

    window_seconds: float
    """The longest window that it takes. The service cuts longer audio at silences."""
    languages: tuple[str, ...] = ()
    """Codes of the languages that it knows, if its files say that. A request for another one is refused."""
    detects_language: bool = False
    """It finds out the language by itself: the first window of a request runs alone until it has."""
    translates: bool = False
    """It takes the task `translate`."""
    word_times: bool = False
    takes_prompt: bool = False
    vocab_size: int = 0
    """Rows of the embedding table that was loaded, for families that take a prompt."""
    row_bytes: int = 0
    """Memory of one row beside the weights."""
    max_rows: int = 16
    """Windows that it runs at the same time; for a `WholeFamily`, the windows of a step."""
    start_windows: int = 1
    """Windows that begin in one step, at most."""
    notes: tuple[str, ...] = ()
    """Lines for the log."""


class _Model(Protocol):
    @property
    def traits(self) -> Traits: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def dtype(self) -> str:
        """Of the weights: `float32`."""
        ...


class WholeFamily(_Model, Protocol):
    def transcribe(self, windows: Sequence[WindowStart]) -> Sequence[WindowText]:
        """Compute all windows, in one batch or one by one. One text for each, in any order, with the ids of its window.
        The samples are float32: `np.frombuffer(window.samples, np.float32)`. Everything is evaluated on return."""
        ...


class SteppingFamily(_Model, Protocol):
    def drop(self, keys: Sequence[RowKey]) -> None:
        """Free rows. Unknown keys are ignored."""
        ...

    def start(self, windows: Sequence[WindowStart]) -> None:
        """Encode windows and make rows of them."""
        ...

    def advance(self) -> TranscriptionResult:
        """One token for every row. Rows that end are freed."""
        ...

    def cache_bytes(self) -> int:
        """The memory of all rows."""
        ...

    def reset(self) -> None:
        """Free all rows."""
        ...


class WholeWindows:
    """A whole family as a stepping one: what was started is computed by the next `advance`."""

    def __init__(self, family: WholeFamily) -> None:
        self._family = family
        self._started: list[WindowStart] = []

    @property
    def traits(self) -> Traits:
        return replace(self._family.traits, start_windows=self._family.traits.max_rows)

    @property
    def weight_bytes(self) -> int:
        return self._family.weight_bytes

    @property
    def dtype(self) -> str:
        return self._family.dtype

    def drop(self, keys: Sequence[RowKey]) -> None:
        """Nothing runs between two steps."""

    def start(self, windows: Sequence[WindowStart]) -> None:
        self._started += windows

    def advance(self) -> TranscriptionResult:
        started, self._started = self._started, []
        texts = tuple(self._family.transcribe(started)) if started else ()
        found = ((text.request_id, text.language) for text in texts)
        return TranscriptionResult(texts, tuple((number, code) for number, code in found if code is not None))

    def cache_bytes(self) -> int:
        return 0

    def reset(self) -> None:
        self._started.clear()
