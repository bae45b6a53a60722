"""A backend without a model, for tests that control each step. The conformance tests keep it close to the real one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from millstream.engine.background import BackgroundTask
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import EncodeMedia, Plan, RowOutput, StepResult
from millstream.engine.protocols import Progress, ignore_progress
from millstream.model_facts import GenerationFacts
from millstream.types import TokenLogprob

VOCAB = 97


def answer(submit: Generate, count: int) -> list[int]:
    """The tokens that the fake generates: they depend on the prompt alone, like a model's at temperature 0."""
    prompt = submit.prompt[: len(submit.prompt) - submit.resumed]
    start = sum((position + 1) * token for position, token in enumerate(prompt))
    return [(start + 13 * position) % VOCAB for position in range(count)]


class Gate:
    """Holds a backend inside `step` until the test releases it, without sleeps."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._open = threading.Event()

    def pass_through(self) -> None:
        self.entered.release()
        while not self._open.is_set() and not self._go.acquire(timeout=0.01):
            pass

    def let_one(self) -> None:
        self._go.release()

    def open(self) -> None:
        self._open.set()

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=60), "the backend was never called"


class FakeBackend:
    """Has rows like a real backend, and asserts that a real one could run every plan."""

    def __init__(
        self, *, max_rows: int = 8, context_length: int = 4096, vocab_size: int = VOCAB, gate: Gate | None = None
    ) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.gate = gate
        self.prompts: dict[int, Generate] = {}
        self.progress: dict[int, int] = {}
        self.rows: dict[int, tuple[Generate, int]] = {}
        self.encoded_media: dict[int, int] = {}
        self.plans: list[Plan] = []
        self.threads: set[int] = {threading.get_ident()}
        self.fail_next: Exception | None = None
        self.closed = False
        self.on_load: Callable[[], None] = lambda: None

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        self._check_thread()
        self.on_load()
        report(1.0)
        return GenerationFacts(
            self.context_length, self.vocab_size, self.max_rows, 0, "none", "cpu (fake)", media=("image", "video")
        )

    def step(self, plan: Plan) -> StepResult:
        self._check_thread()
        self.plans.append(plan)
        if self.gate is not None:
            self.gate.pass_through()
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self._drop(plan)
        self._join(plan)
        outputs = [self._decode(request_id) for request_id in plan.decode]
        self._prefill(plan)
        encoded = tuple((order.request.request_id, self._encode(order)) for order in plan.encode)
        assert len(self.rows) + len(self.progress) <= self.max_rows, "more rows than max_rows"
        return StepResult(tuple(outputs), encoded=encoded)

    def background_task(self, request: Generate | None) -> BackgroundTask | None:
        self._check_thread()
        return None

    def memory_bytes(self) -> int:
        self._check_thread()
        return 1000 + len(self.rows)

    def reset(self) -> None:
        self._check_thread()
        self.progress.clear()
        self.prompts.clear()
        self.rows.clear()

    def close(self) -> None:
        self._check_thread()
        self.closed = True

    def _drop(self, plan: Plan) -> None:
        for request_id in plan.drop:
            known = request_id in self.rows or request_id in self.progress
            assert known, f"dropped {request_id}, which has no row"
            self.rows.pop(request_id, None)
            self.progress.pop(request_id, None)

    def _join(self, plan: Plan) -> None:
        for request_id in plan.decode:
            if request_id in self.progress:
                submit = self.prompts.pop(request_id)
                assert self.progress.pop(request_id) == len(submit.prompt) - 1, "joined before its prompt was prefilled"
                self.rows[request_id] = (submit, submit.resumed)
        assert set(plan.decode) == set(self.rows), "a row in the batch was not decoded"

    def _decode(self, request_id: int) -> RowOutput:
        submit, position = self.rows[request_id]
        self.rows[request_id] = (submit, position + 1)
        token = answer(submit, position + 1)[-1]
        logprobs = () if submit.logprobs is None else (TokenLogprob(token, -1.0, ((token, -1.0),) * submit.logprobs),)
        return RowOutput(request_id, (token,), logprobs)

    def _encode(self, order: EncodeMedia) -> int:
        """Encodes one image per step."""
        request_id = order.request.request_id
        assert request_id in self.progress, "encoded media of a request without a row"
        assert order.first < len(order.request.media) and order.tokens > 0
        self.encoded_media[request_id] = order.first + 1
        return order.first + 1

    def _prefill(self, plan: Plan) -> None:
        for chunk in plan.prefill:
            request_id = chunk.request.request_id
            assert self.progress.get(request_id, 0) == chunk.start, "a chunk was skipped or repeated"
            assert chunk.start <= chunk.end <= len(chunk.request.prompt) - 1
            encoded_media = self.encoded_media.get(request_id, 0)
            assert all(media.start >= chunk.end for media in chunk.request.media[encoded_media:]), (
                "prefilled media that are not encoded"
            )
            self.progress[request_id] = chunk.end
            self.prompts[request_id] = chunk.request

    def _check_thread(self) -> None:
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1, "the backend was called on two threads"
        assert not self.closed, "the backend was used after close"


def exit_at_once() -> FakeBackend:
    """A backend whose native code ends the process."""
    os._exit(3)


class Panic(BaseException):
    """Not an Exception, like the panics of pyo3."""


def panic() -> FakeBackend:
    raise Panic("capacity overflow")
