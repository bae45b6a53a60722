"""Implements `best_of`: generates more completions than the client asked for and returns the likeliest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from millstream.service.generation.choice import Choice
from millstream.service.generation.generation import TextGeneration
from millstream.service.ports import DeltaSink
from millstream.types import Delta, GenerationRequest, Usage


class BestOf:
    """Wraps a generation of `best_of` choices per prompt as one of `n`. Yields nothing until all choices have ended."""

    def __init__(self, generation: TextGeneration, choices: Sequence[Choice], request: GenerationRequest) -> None:
        self._generation = generation
        self._choices = choices
        self._candidates = request.best_of or request.n
        self._n = request.n
        self._logprobs = request.logprobs is not None
        self.model = generation.model
        self.sampling = generation.sampling

    @property
    def usage(self) -> Usage:
        """Counts all candidates, not only those returned: the model computed all of them."""
        return self._generation.usage

    def cancel(self, outcome: str = "cancelled") -> None:
        self._generation.cancel(outcome)

    def deliver_to(self, sink: DeltaSink) -> None:
        """Nothing is delivered before the end."""

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        completions: dict[int, Delta] = {}
        async for batch in self._generation:
            for delta in batch:
                earlier = completions.get(delta.index)
                completions[delta.index] = delta if earlier is None else _join(earlier, delta)
        for start in range(0, len(self._choices), self._candidates):
            candidates = [completions[start + offset] for offset in range(self._candidates)]
            yield self._best(start // self._candidates * self._n, candidates)

    def _best(self, first_index: int, candidates: Sequence[Delta]) -> list[Delta]:
        """Returns the `n` likeliest completions of one prompt, best first, with indices from `first_index` on."""
        ranked = sorted(candidates, key=lambda delta: self._choices[delta.index].mean_logprob, reverse=True)
        return [
            replace(delta, index=first_index + rank, logprobs=delta.logprobs if self._logprobs else ())
            for rank, delta in enumerate(ranked[: self._n])
        ]


def _join(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.index,
        first.text + second.text,
        first.logprobs + second.logprobs,
        second.finish_reason,
        first.prompt or second.prompt,
        stop_string=second.stop_string,
    )
