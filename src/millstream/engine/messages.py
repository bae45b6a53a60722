"""What crosses the border of an engine: frozen, plain data. Imperative in, past tense out.

No array is ever in a message, so the same messages cross a thread or a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.types import FinishReason, Grammar, Media, ModelFacts, Sampling, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate. Accepted by the mailbox means that exactly one `Finished` or `Failed` follows."""

    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    """0: only read the prompt."""
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    contents: tuple[tuple[int, str], ...] = ()
    """What stands at places of the prompt besides tokens: (place, hash of an image or a sound)."""
    media: tuple[Media, ...] = ()
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """As `logprobs`, of the prompt's tokens but the first: they come in `PromptLogprobs` events before any `Tokens`."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request before the next step. Unknown or ended ids are ignored: the race is normal."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End what is left with `Failed`, free the model on the owner, then stop."""

    reason: str = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class ClearPrefixCache:
    """Free all beginnings of prompts that are kept."""


@dataclass(frozen=True, slots=True)
class Wake:
    """From the engine's own threads: something that it waits for has come."""


Command = Submit | Cancel | ClearPrefixCache | Shutdown | Wake


@dataclass(frozen=True, slots=True)
class Tokens:
    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The next tokens of a prompt, for a request that wants their log-probabilities."""

    request_id: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: int
    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: int
    message: str
    gone: bool = False
    """True when the engine itself is going, false when only this step failed."""
    refused: bool = False
    """True when what the client sent cannot be served: a grammar that no answer can follow."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How much of the model is in memory, from 0 to 1."""

    progress: float


@dataclass(frozen=True, slots=True)
class Loaded:
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class LoadFailed:
    message: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine's arrays take now: weights, keys and values; and, of that, what is kept of earlier prompts, and
    what of them is on disk."""

    memory_bytes: int
    cache_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last event: model, caches and stream are gone."""

    cause: str | None = None
    """Why, if nobody asked for it."""


Event = Tokens | PromptLogprobs | Finished | Failed | Loading | Loaded | LoadFailed | Measured | Stopped
