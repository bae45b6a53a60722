"""A fake model whose KV caches are counted, token by token, at the worst moment of every step."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from millstream.engine.generation.kv_capacity import KEPT_TOKENS, kv_capacity, spare_slots
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import ChunkLogprobs, Plan, RowOutput, StepResult
from millstream.engine.generation.speculation.lengths import pass_length
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
    """Runs one step ahead, as the real one does. `defer`: draws when a chunk is not complete after its step. `drafts`:
    draws which of the drafts that a plan asks for there are, and how much of them is right."""

    def __init__(self, defer: random.Random | None = None, drafts: random.Random | None = None) -> None:
        self._drafts = drafts
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
        drafted = self._propose(plan)
        length = pass_length(max(drafted.values())) if drafted else 1
        for request_id, row in self.rows.items():
            before = () if row.launched is None else (row.launched,)
            if drafted:
                outgrown += self._grow(row, length)
                outputs.append(self._verify(request_id, row, before, drafted.get(request_id, 0)))
                continue
            if before:
                outputs.append(RowOutput(request_id, before))
            outgrown += self._grow(row, 1)
            self._decode(row)
        logprobs = tuple(self._prefill(plan))
        slots = Counter([*outgrown, *(row.capacity for row in self.rows.values())])
        self.peak = sum(capacity * (rows + spare_slots(capacity)) for capacity, rows in slots.items())
        prompts += sum(kv_capacity(len(submit.prompt)) + PADDING for submit, _ in self.prompts.values())
        self.peak += prompts + (0 if plan.tight else KEPT_TOKENS)
        self._deferred = bool(plan.prefill) and self._defer is not None and self._defer.random() < 0.5
        return StepResult(tuple(outputs), prompt_logprobs=logprobs, prefilling=self._deferred, length=length)

    def _join(self, request_id: int) -> int:
        """Returns the size of the prompt's own cache, which goes when it is copied."""
        submit, done = self.prompts.pop(request_id)
        assert done == len(submit.prompt) - 1, "joined before its prompt was prefilled"
        self.rows[request_id] = _Row(digest(submit.prompt), len(submit.prompt), kv_capacity(len(submit.prompt)))
        return kv_capacity(len(submit.prompt)) + PADDING

    def _propose(self, plan: Plan) -> dict[int, int]:
        """The lengths of drafts."""
        if self._drafts is None:
            return {}
        assert all(most > 0 and request_id in self.rows for request_id, most in plan.drafts)
        found = {request_id: self._drafts.randint(0, most) for request_id, most in plan.drafts}
        return {request_id: count for request_id, count in found.items() if count}

    def _grow(self, row: _Row, length: int) -> list[int]:
        """For a pass of `length` tokens. Returns the class of the slot that the row has outgrown, if it has."""
        old = row.capacity
        row.capacity = max(old, kv_capacity(row.length + length - 1))
        return [old] if row.capacity > old else []

    def _decode(self, row: _Row) -> int:
        token = row.launched = row.context
        row.context, row.length = digest([token], token), row.length + 1
        return token

    def _verify(self, request_id: int, row: _Row, before: tuple[int, ...], proposed: int) -> RowOutput:
        assert self._drafts is not None
        accepted = self._drafts.choice([0, proposed, self._drafts.randint(0, proposed)])
        gained = [self._decode(row) for _ in range(accepted + 1)]
        row.launched = None
        return RowOutput(request_id, (*before, *gained), (), proposed, accepted, "known" if proposed else "")

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
