"""A fake model whose KV caches are counted, token by token, at the worst moment of every step."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from millstream.engine.generation.kv_capacity import kv_capacity, spare_slots
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import ChunkLogprobs, Plan, RowOutput, StepResult
from millstream.types import TokenLogprob

PADDING = 512
"""What the cache of a prompt in prefill may have beyond its class."""


def digest(tokens: Iterable[int], before: int = 0) -> int:
    """Of every token of a context and its place. It is the model's next token, too."""
    return functools.reduce(lambda state, token: (31 * state + token + 1) % 1_000_003, tokens, before)


@dataclass
class _Row:
    context: int
    """The digest of its tokens, including the next input."""
    length: int
    capacity: int
    launched: int | None = None
    """The token of its last step, which is reported in the next one."""


class CountingBackend:
    """Runs one step ahead, as the real one does. `defer`: draws when a chunk is not complete after its step."""

    def __init__(self, defer: random.Random | None = None) -> None:
        self.prompts: dict[int, tuple[Generate, int]] = {}
        self.rows: dict[int, _Row] = {}
        self.peak = 0
        """Tokens of memory at the worst moment of the last step."""
        self._defer = defer
        self._deferred = False

    def step(self, plan: Plan) -> StepResult:
        for request_id in plan.drop:
            known = self.rows.pop(request_id, None) or self.prompts.pop(request_id, None)
            assert known is not None, "dropped a request without a row"
        prompts = sum(self._join(request_id) for request_id in plan.decode if request_id not in self.rows)
        assert set(plan.decode) == set(self.rows)
        outputs, outgrown = [], []
        for request_id, row in self.rows.items():
            if row.launched is not None:
                outputs.append(RowOutput(request_id, (row.launched,)))
            outgrown += self._decode(row)
        logprobs = tuple(self._prefill(plan))
        slots = Counter([*outgrown, *(row.capacity for row in self.rows.values())])
        self.peak = sum(capacity * (rows + spare_slots(capacity)) for capacity, rows in slots.items())
        prompts += sum(kv_capacity(len(submit.prompt)) + PADDING for submit, _ in self.prompts.values())
        self.peak += prompts
        self._deferred = bool(plan.prefill) and self._defer is not None and self._defer.random() < 0.5
        return StepResult(tuple(outputs), prompt_logprobs=logprobs, prefilling=self._deferred)

    def _join(self, request_id: int) -> int:
        """Returns the size of the prompt's own cache, which goes when it is copied."""
        submit, done = self.prompts.pop(request_id)
        assert done == len(submit.prompt) - 1, "joined before its prompt was prefilled"
        self.rows[request_id] = _Row(digest(submit.prompt), len(submit.prompt), kv_capacity(len(submit.prompt)))
        return kv_capacity(len(submit.prompt)) + PADDING

    def _decode(self, row: _Row) -> list[int]:
        """Returns the class of the slot that the row has outgrown, if it has."""
        old = row.capacity
        row.capacity = max(old, kv_capacity(row.length))
        row.launched = row.context
        row.context, row.length = digest([row.launched], row.context), row.length + 1
        return [old] if row.capacity > old else []

    def _prefill(self, plan: Plan) -> list[ChunkLogprobs]:
        found = []
        for chunk in plan.prefill:
            request_id, prompt = chunk.request.request_id, chunk.request.prompt
            known = self.prompts.get(request_id)
            assert chunk.start == (0 if known is None else known[1]), "a chunk was skipped or repeated"
            self.prompts[request_id] = (chunk.request, chunk.end)
            if chunk.request.prompt_logprobs is not None:
                tokens = prompt[chunk.start + 1 : chunk.end + 1]
                found.append(ChunkLogprobs(request_id, tuple(TokenLogprob(token, -1.0) for token in tokens)))
        return found
