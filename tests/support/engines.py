"""Drives an engine from a test: posts commands and waits for events."""

from __future__ import annotations

import functools
import os
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.link import Link, ThreadLink
from millstream.engine.messages import (
    Command,
    Event,
    Failed,
    Finished,
    Loaded,
    LoadFailed,
    Measured,
    Output,
    Shutdown,
    Stopped,
    Submit,
    expanded,
)
from millstream.engine.process_link import ProcessLink
from millstream.engine.protocols import BackendFactory, SchedulerFactory
from millstream.errors import EngineGone
from millstream.model_facts import GenerationFacts
from support.stacks import whereabouts

TIMEOUT = 60 if shutil.which("nvidia-smi") is None else 300
"""Seconds. A load on a GPU may compile kernels, beside other tests."""

Run = Callable[[Callable[[], Any]], Any]
"""Calls a function on a thread; returns its result or raises its error."""


class Driver:
    """Collects the events of an engine. `run` is the whole round trip."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.batches: queue.Queue[Sequence[Event]] = queue.Queue()
        self.outputs: dict[int, list[Output]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[object]] = {}
        self.ends: dict[int, list[Finished | Failed]] = {}
        self.facts: GenerationFacts | None = None
        self.load_error: str | None = None
        self.measured = Measured(0)
        self.stopped = False

    def start(self) -> GenerationFacts:
        self.link.start_soon(self.batches.put)
        self.wait(lambda: self.facts is not None or self.load_error is not None)
        assert self.facts is not None, self.load_error
        return self.facts

    def post(self, command: Command) -> None:
        self.link.post_soon(command)

    def complete(self, *submits: Submit) -> None:
        """Post these requests and wait for their ends."""
        for submit in submits:
            self.post(submit)
        self.wait_ended(*(submit.request_id for submit in submits))

    def run(self, *submits: Generate) -> list[list[int]]:
        self.complete(*submits)
        return [self.tokens.get(submit.request_id, []) for submit in submits]

    def reset(self) -> None:
        """Forget ended requests, so that their ids can be used again."""
        self.outputs, self.tokens, self.logprobs, self.ends = {}, {}, {}, {}

    def wait_ended(self, *request_ids: int) -> None:
        self.wait(lambda: all(request_id in self.ends for request_id in request_ids))

    def wait(self, condition: Callable[[], bool], nudge: Callable[[], None] | None = None) -> None:
        """Collect events until `condition` holds. `nudge` is called whenever no event comes for a moment."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            try:
                for event in expanded(self.batches.get(timeout=TIMEOUT if nudge is None else 0.02)):
                    self._collect(event)
            except queue.Empty:
                if nudge is not None:
                    nudge()

    def stop(self) -> None:
        with suppress(EngineGone):  # it ended by itself; its Stopped will arrive
            self.post(Shutdown())
        try:
            self.wait(lambda: self.stopped)
            assert self.link.join(TIMEOUT)
        except AssertionError as error:
            pid = self.link.where()[0]
            if pid is not None and pid != os.getpid():
                os.kill(pid, signal.SIGABRT)  # Python then writes its stacks: see PYTHONFAULTHANDLER in conftest.py
            raise AssertionError(f"the engine did not stop: {error}\n{whereabouts()}") from error

    def _collect(self, event: Event) -> None:
        match event:
            case Output():
                assert event.request_id not in self.ends, "output after the end"
                self.outputs.setdefault(event.request_id, []).append(event)
                if isinstance(event, Tokens):
                    self.tokens.setdefault(event.request_id, []).extend(event.tokens)
                    self.logprobs.setdefault(event.request_id, []).extend(event.logprobs)
            case Finished() | Failed():
                self.ends.setdefault(event.request_id, []).append(event)
                assert len(self.ends[event.request_id]) == 1, "a request ended twice"
            case Loaded():
                self.facts = event.facts
            case LoadFailed():
                self.load_error = event.message
            case Measured():
                self.measured = event
            case Stopped():
                self.stopped = True


def scheduler(prefill_tokens: int, facts: GenerationFacts) -> GenerationScheduler:
    return GenerationScheduler(max_rows=facts.max_rows, prefill_tokens=prefill_tokens, whole_media=facts.whole_media)


@contextmanager
def engine(
    backend: BackendFactory,
    *,
    prefill_tokens: int = 7,
    kind: type[ThreadLink | ProcessLink] = ThreadLink,
    make_scheduler: SchedulerFactory | None = None,
) -> Iterator[Driver]:
    driver = Driver(kind("test", backend, make_scheduler or functools.partial(scheduler, prefill_tokens)))
    driver.start()
    try:
        yield driver
    finally:
        if not driver.stopped:
            driver.stop()
