"""More answers than asked for, of which the best are given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from millstream.service.generation.choice import Choice
from millstream.service.generation.generation import TextGeneration
from millstream.types import Delta, GenerationRequest, Usage


class BestOf:
    """A generation of `best_of` answers a prompt, seen as one of `n`. Nothing comes before all have ended."""

    def __init__(self, generation: TextGeneration, choices: Sequence[Choice], request: GenerationRequest) -> None:
        self._generation = generation
        self._choices = choices
        self._tries = request.best_of or request.n
        self._n = request.n
        self._logprobs = request.logprobs is not None
        self.model = generation.model

    @property
    def usage(self) -> Usage:
        """Of all answers, those that are not given too: they were computed."""
        return self._generation.usage

    def cancel(self, outcome: str = "cancelled") -> None:
        self._generation.cancel(outcome)

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        answers: dict[int, Delta] = {}
        async for batch in self._generation:
            for delta in batch:
                before = answers.get(delta.index)
                answers[delta.index] = delta if before is None else _joined(before, delta)
        for start in range(0, len(self._choices), self._tries):
            yield self._best(start // self._tries * self._n, [answers[start + number] for number in range(self._tries)])

    def _best(self, index: int, answers: Sequence[Delta]) -> list[Delta]:
        """The likeliest of the answers to one prompt, the best first, numbered from `index` on."""
        ranked = sorted(answers, key=lambda delta: self._choices[delta.index].mean_logprob, reverse=True)
        return [
            replace(delta, index=index + number, logprobs=delta.logprobs if self._logprobs else ())
            for number, delta in enumerate(ranked[: self._n])
        ]


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.index,
        first.text + second.text,
        first.logprobs + second.logprobs,
        second.finish_reason,
        first.prompt or second.prompt,
        stop_string=second.stop_string,
    )
