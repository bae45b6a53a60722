"""A backend that generates the tokens of a script, whatever the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.engine.background import BackgroundTask
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, RowOutput, StepResult
from millstream.engine.protocols import Progress, ignore_progress
from millstream.model_facts import GenerationFacts
from millstream.types import TokenLogprob

Script = Callable[[Generate], Sequence[int]]


class ScriptedBackend:
    """`script` returns the whole answer to a request. After its end, the last token is repeated."""

    def __init__(
        self, script: Script, *, vocab: int = 1000, context_length: int = 8192, drafters: tuple[str, ...] = ()
    ) -> None:
        self._script = script
        self._facts = GenerationFacts(context_length, vocab, 4, 0, "none", "cpu (scripted)", drafters=drafters)
        self._rows: dict[int, tuple[Generate, list[int], int]] = {}
        self.submits: list[Generate] = []

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        report(1.0)
        return self._facts

    def step(self, plan: Plan) -> StepResult:
        for request_id in plan.drop:
            self._rows.pop(request_id, None)
        outputs = tuple(self._decode(request_id) for request_id in plan.decode)
        for chunk in plan.prefill:
            if chunk.start == 0 or chunk.request.request_id not in self._rows:
                self.submits.append(chunk.request)
                self._rows[chunk.request.request_id] = (chunk.request, list(self._script(chunk.request)), 0)
        return StepResult(outputs)

    def background_task(self, request: Generate | None) -> BackgroundTask | None:
        return None

    def memory_bytes(self) -> int:
        return 0

    def reset(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._rows.clear()

    def _decode(self, request_id: int) -> RowOutput:
        submit, tokens, position = self._rows[request_id]
        self._rows[request_id] = (submit, tokens, position + 1)
        token = tokens[min(position, len(tokens) - 1)]
        logprobs = () if submit.logprobs is None else (TokenLogprob(token, -1.0, ((token, -1.0),) * submit.logprobs),)
        return RowOutput(request_id, (token,), logprobs)
