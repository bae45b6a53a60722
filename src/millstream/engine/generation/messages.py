"""The messages of generation: prompts in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from millstream.engine.messages import EVENT_BYTES, Command, Finished, Output, Outputs, Submit
from millstream.types import (
    FinishReason,
    Grammar,
    Media,
    ReasoningLimit,
    Sampling,
    TokenLogprob,
    Usage,
    pickled_by_value,
    quickly_made,
)

LOGPROB_BYTES, OPTION_BYTES = 160, 120
"""The memory of one token's log-probability in Python, and of each alternative at its position."""


@pickled_by_value
@quickly_made
@dataclass(frozen=True, slots=True)
class Generate(Submit):
    """Generate up to `max_tokens` tokens after `prompt`."""

    prompt: tuple[int, ...] = field(repr=False)
    """Not shown: what is said to a model is never logged."""
    max_tokens: int
    """0: only prefill the prompt."""
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    """No stop token ends the output before it has this many tokens. Not for rows with a grammar: there the grammar
    decides where the output may end."""
    logprobs: int | None = None
    contents: tuple[tuple[int, str], ...] = ()
    """Media in the prompt: (position, hash of an image or an audio clip)."""
    media: tuple[Media, ...] = field(default=(), repr=False)
    grammar: Grammar | None = field(default=None, repr=False)
    reasoning: ReasoningLimit | None = None
    """After so much reasoning the engine writes what closes it, and the model goes on from there."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens but the first. They arrive as `PromptLogprobs` before any `Tokens`."""
    spec_prefill: bool = False
    """The model may read a part of the prompt only, if it is long and a draft model is there to choose the part."""
    resumed: int = 0
    """How many of the last prompt tokens are its own output: set by the scheduler for a request that was preempted."""
    prediction: tuple[int, ...] = field(default=(), repr=False)
    """What the client expects of the output: a draft, which can only change the speed."""
    speculate: bool = True
    """False: this request takes part in no draft."""

    @property
    def output(self) -> tuple[int, ...]:
        """What it had generated when it was preempted."""
        return self.prompt[len(self.prompt) - self.resumed :]


@dataclass(frozen=True, slots=True)
class ClearPrefixCache(Command):
    """Drop all cached prefixes, in memory and on disk."""


def _logprob_bytes(logprobs: tuple[TokenLogprob, ...]) -> int:
    # The first token of a prompt may have no alternatives; all others have the same number.
    return EVENT_BYTES + (len(logprobs) * (LOGPROB_BYTES + OPTION_BYTES * len(logprobs[-1].top)) if logprobs else 0)


@quickly_made
@dataclass(frozen=True, slots=True)
class Tokens(Output):
    """New tokens of a row."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    proposed: int = 0
    """Tokens of drafts that were verified for these. Told at once: an answer may end before the row does, by a stop
    string, and its usage must be complete."""
    accepted: int = 0
    """How many of the proposed ones were right."""

    @property
    def nbytes(self) -> int:
        return _logprob_bytes(self.logprobs)

    def __reduce__(self) -> tuple[Any, ...]:
        """There is one per row and step: pickled by its arguments, it costs half of what a dataclass costs."""
        if self.proposed:
            return Tokens, (self.request_id, self.tokens, self.logprobs, self.proposed, self.accepted)
        return Tokens, (self.request_id, self.tokens, *((self.logprobs,) if self.logprobs else ()))


@pickled_by_value
@quickly_made
@dataclass(frozen=True, slots=True)
class StepTokens(Outputs):
    """One token of each row that has nothing else to tell: the same as a `Tokens` for each."""

    def output(self, request_id: int, values: Sequence[int]) -> Tokens:
        return Tokens(request_id, tuple(values))


@dataclass(frozen=True, slots=True)
class PromptLogprobs(Output):
    """Log-probabilities of the next tokens of a prompt, for a request that asked for them."""

    may_be_large: ClassVar[bool] = True

    logprobs: tuple[TokenLogprob, ...]

    @property
    def nbytes(self) -> int:
        return _logprob_bytes(self.logprobs)


@pickled_by_value
@quickly_made
@dataclass(frozen=True, slots=True)
class Generated(Finished):
    """A row has ended."""

    reason: FinishReason
    usage: Usage
