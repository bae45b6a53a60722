"""Drives an engine from a test thread: post, then wait for events."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from millstream.engine.backend import BackendFactory
from millstream.engine.link import Link, ThreadLink
from millstream.engine.messages import (
    Command,
    Event,
    Failed,
    Finished,
    Loaded,
    LoadFailed,
    Shutdown,
    Stopped,
    Submit,
    Tokens,
)
from millstream.engine.scheduler import Scheduler
from millstream.errors import EngineGone
from millstream.types import ModelFacts

PATIENCE = 60


class Driver:
    """Collects what an engine says. `run` is the whole round trip."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.batches: queue.Queue[Sequence[Event]] = queue.Queue()
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[object]] = {}
        self.ends: dict[int, list[Finished | Failed]] = {}
        self.facts: ModelFacts | None = None
        self.load_error: str | None = None
        self.stopped = False

    def start(self) -> ModelFacts:
        self.link.start_soon(self.batches.put)
        self.wait(lambda: self.facts is not None or self.load_error is not None)
        assert self.facts is not None, self.load_error
        return self.facts

    def post(self, command: Command) -> None:
        self.link.post_soon(command)

    def run(self, *submits: Submit) -> list[list[int]]:
        for submit in submits:
            self.post(submit)
        self.wait_ended(*(submit.request_id for submit in submits))
        return [self.tokens.get(submit.request_id, []) for submit in submits]

    def wait_ended(self, *request_ids: int) -> None:
        self.wait(lambda: all(request_id in self.ends for request_id in request_ids))

    def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for event in self.batches.get(timeout=PATIENCE):
                self._book(event)

    def stop(self) -> None:
        with suppress(EngineGone):  # it ended by itself: its Stopped is on the way
            self.post(Shutdown())
        self.wait(lambda: self.stopped)
        assert self.link.join(PATIENCE)

    def _book(self, event: Event) -> None:
        match event:
            case Tokens():
                assert event.request_id not in self.ends, "tokens after the end"
                self.tokens.setdefault(event.request_id, []).extend(event.tokens)
                self.logprobs.setdefault(event.request_id, []).extend(event.logprobs)
            case Finished() | Failed():
                self.ends.setdefault(event.request_id, []).append(event)
                assert len(self.ends[event.request_id]) == 1, "a request ended twice"
            case Loaded():
                self.facts = event.facts
            case LoadFailed():
                self.load_error = event.message
            case Stopped():
                self.stopped = True


@contextmanager
def engine(backend: BackendFactory, *, prefill_tokens: int = 7) -> Iterator[Driver]:
    link = ThreadLink("test", backend, lambda facts: Scheduler(max_rows=facts.max_rows, prefill_tokens=prefill_tokens))
    driver = Driver(link)
    driver.start()
    try:
        yield driver
    finally:
        if not driver.stopped:
            driver.stop()
