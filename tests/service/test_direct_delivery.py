"""Tokens go to the sink of a generation while its reader waits; everything else, and its end, to the reader."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from millstream.engine.generation.messages import Generate, Generated, StepTokens, Tokens
from millstream.engine.messages import Cancel, Command, Event, Failed
from millstream.errors import StepFailed
from millstream.service.activity import Activities
from millstream.service.admission import Admission
from millstream.service.engine_client import EngineClient
from millstream.service.generation.choice import Choice
from millstream.service.generation.generation import TextGeneration
from millstream.service.generation.merge_tokens import merge_tokens
from millstream.service.generation.metrics import GenerationMetrics
from millstream.service.generation.output_parsing import OutputParsing
from millstream.service.generation.timing import RequestTimer, RequestTimers
from millstream.service.histogram import PlainHistogram
from millstream.service.inbox import Inbox
from millstream.service.journal import Journal
from millstream.service.metrics import Metrics
from millstream.service.unread_output import UnreadOutput
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.types import Delta, FinishReason, TokenLogprob, Usage
from support.tiny import byte_source


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(byte_source(Path(folder)))


class Posted:
    """A link that only records what is posted."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def post_soon(self, command: Command) -> None:
        self.commands.append(command)


class Sink:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_ready = True
        self.error: Exception | None = None

    def ready(self) -> bool:
        return self.is_ready

    def deliver(self, deltas: Sequence[Delta]) -> None:
        if self.error is not None:
            raise self.error
        self.texts += [delta.text for delta in deltas]


class Stage:
    """An engine client without an engine, and generations on it. Request n is choice 0 of generation n."""

    def __init__(self) -> None:
        self.link = Posted()
        self.client = EngineClient(self.link, Admission(capacity=9, queue=9, fail_fast=False))  # type: ignore[arg-type]
        self.emit = self.client._sink()
        self.timers = RequestTimers(Journal(), GenerationMetrics(Metrics()), Activities())

    def generation(self, number: int, parsing: OutputParsing | None = None, choices: int = 1) -> tuple[Any, Sink]:
        submits = [Generate(number + index, (0,), 500) for index in range(choices)]
        inbox = Inbox(UnreadOutput(2**20), merge_tokens)
        timer = RequestTimer(self.timers, self.timers.journal.open("m", "chat"))
        timer.found("m")
        timer.submitted(1, 0)
        self.client.submit(submits, inbox)
        made = [
            Choice(index, submit, tokenizer(), parsing or OutputParsing(), continues=False)
            for index, submit in enumerate(submits)
        ]
        generation = TextGeneration("m", self.client, inbox, made, 1, timer)
        sink = Sink()
        generation.deliver_to(sink)
        return generation, sink


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def while_the_loop_is_busy(call: Callable[[], None]) -> None:
    """On another thread, as an engine's, while the event loop waits for it here."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


async def texts(generation: Any) -> list[str]:
    return [delta.text async for batch in generation for delta in batch]


def tokens(number: int, text: str) -> Tokens:
    return Tokens(number, tuple(tokenizer().encode(text)))


def end(number: int, count: int) -> Generated:
    return Generated(number, FinishReason.LENGTH, Usage(1, count, 0))


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 30))


def test_tokens_are_delivered_and_the_end_is_iterated() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1)
        reader = asyncio.create_task(texts(generation))
        await settle()
        for text in ("one ", "two ", "three"):
            stage.emit([tokens(1, text)])
            await settle()
        assert sink.texts == ["one ", "two ", "three"]
        stage.emit([tokens(1, "!"), end(1, 14)])
        assert "".join(await reader) == ""
        assert "".join(sink.texts) == "one two three!"
        assert generation.usage.completion_tokens == 14

    play(scene())


def test_steps_that_the_loop_was_late_for_come_together() -> None:
    async def scene() -> None:
        stage = Stage()
        first, first_sink = stage.generation(1)
        second, second_sink = stage.generation(2)
        readers = [asyncio.create_task(texts(each)) for each in (first, second)]
        await settle()

        def emit() -> None:
            for text in "abc":
                stage.emit([tokens(1, text), tokens(2, text.upper())])

        while_the_loop_is_busy(emit)
        await settle()
        assert (first_sink.texts, second_sink.texts) == (["abc"], ["ABC"])
        stage.emit([end(1, 3), end(2, 3)])
        await asyncio.gather(*readers)

    play(scene())


def test_a_sink_that_is_not_ready_gets_nothing_and_the_order_stays() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1)
        reader = asyncio.create_task(texts(generation))
        await settle()
        stage.emit([tokens(1, "a")])
        await settle()
        sink.is_ready = False
        stage.emit([tokens(1, "b")])
        await settle()
        sink.is_ready = True
        stage.emit([tokens(1, "c"), end(1, 3)])
        assert await reader == ["b", ""]
        assert sink.texts == ["a", "c"]

    play(scene())


def test_a_reader_that_is_busy_is_not_overtaken() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1)
        seen: list[str] = []
        go_on = asyncio.Event()

        async def read() -> None:
            async for batch in generation:
                seen.extend(delta.text for delta in batch)
                await go_on.wait()

        sink.is_ready = False
        reader = asyncio.create_task(read())
        await settle()
        stage.emit([tokens(1, "a")])
        await settle()
        sink.is_ready = True
        stage.emit([tokens(1, "b")])
        await settle()
        assert (seen, sink.texts) == (["a"], [])
        go_on.set()
        await settle()
        assert seen == ["a", "b"]
        stage.emit([tokens(1, "c")])
        await settle()
        assert sink.texts == ["c"]
        stage.emit([end(1, 3)])
        await reader

    play(scene())


def test_a_stop_string_ends_the_iteration_and_cancels_the_row() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1, OutputParsing(stop=("STOP",)))
        reader = asyncio.create_task(texts(generation))
        await settle()
        stage.emit([tokens(1, "up to STOP and no further")])
        assert await reader == []
        assert "".join(sink.texts) == "up to "
        assert Cancel(1) in stage.link.commands

    play(scene())


def test_readers_of_streams_that_end_together_go_on_one_per_turn() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.client._turnstile._clock = lambda: 0.0  # nothing takes time: so it is one per turn, however busy we are
        ended: list[int] = []

        async def read(number: int) -> None:
            await texts(stage.generation(number)[0])
            ended.append(number)

        readers = [asyncio.create_task(read(number)) for number in range(1, 6)]
        await settle()
        stage.emit([tokens(1, "a"), *(end(number, 1) for number in range(1, 6))])
        for _ in range(20):
            before = len(ended)
            await asyncio.sleep(0)
            assert len(ended) <= before + 1
        assert ended == [1, 2, 3, 4, 5]
        await asyncio.gather(*readers)

    play(scene())


def test_a_reader_that_is_cancelled_while_its_end_waits() -> None:
    async def scene() -> None:
        stage = Stage()
        readers = [asyncio.create_task(texts(stage.generation(number)[0])) for number in (1, 2)]
        await settle()
        stage.emit([end(1, 1), end(2, 1)])
        readers[1].cancel()
        assert await readers[0] == [""]
        with pytest.raises(asyncio.CancelledError):
            await readers[1]
        await settle()

    play(scene())


def test_a_generation_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1)
        reader = asyncio.create_task(texts(generation))
        await settle()
        stage.emit([tokens(1, "a"), end(1, 1)])
        await reader
        left = [weakref.ref(generation), weakref.ref(sink)]
        del generation, sink, reader
        await settle()
        assert [each() for each in left] == [None, None]

    gc.collect()
    gc.disable()
    try:
        play(scene())
    finally:
        gc.enable()


def test_one_of_several_choices_ends() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1, OutputParsing(stop=("X",)), choices=2)
        reader = asyncio.create_task(texts(generation))
        await settle()
        stage.emit([tokens(1, "aX"), tokens(2, "b")])
        await settle()
        stage.emit([tokens(2, "c"), Generated(1, FinishReason.CANCELLED, Usage(1, 2, 0)), end(2, 2)])
        await reader
        assert "".join(sink.texts) == "abc"

    play(scene())


def test_logprobs_are_left_to_the_reader() -> None:
    """They may be so many that a thread renders them."""

    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1)
        reader = asyncio.create_task(texts(generation))
        await settle()
        (token,) = tokenizer().encode("a")
        stage.emit([Tokens(1, (token,), (TokenLogprob(token, -0.5),))])
        stage.emit([end(1, 1)])
        assert "".join(await reader) == "a"
        assert sink.texts == []

    play(scene())


def test_what_a_sink_raises_ends_its_own_request() -> None:
    async def scene() -> None:
        stage = Stage()
        broken, broken_sink = stage.generation(1)
        other, other_sink = stage.generation(2)
        readers = [asyncio.create_task(texts(each)) for each in (broken, other)]
        await settle()
        broken_sink.error = ValueError("cannot render")
        stage.emit([tokens(1, "a"), tokens(2, "b")])
        with pytest.raises(ValueError, match="cannot render"):
            await readers[0]
        assert Cancel(1) in stage.link.commands
        stage.emit([Generated(1, FinishReason.CANCELLED, Usage(1, 1, 0)), end(2, 1)])
        await readers[1]
        assert other_sink.texts == ["b"]

    play(scene())


def test_a_failure_is_raised_in_the_reader() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, _ = stage.generation(1)
        reader = asyncio.create_task(texts(generation))
        await settle()
        events: list[Event] = [tokens(1, "a"), Failed(1, "broken")]
        stage.emit(events)
        with pytest.raises(StepFailed, match="broken"):
            await reader

    play(scene())


def step(**texts: str) -> StepTokens:
    """A step in columns: one token, which is a byte, of each of the requests `r1`, `r2`, ..."""
    return StepTokens(
        tuple(int(name[1:]) for name in texts), tuple(tokenizer().encode(text)[0] for text in texts.values())
    )


def test_a_step_in_columns_is_delivered_at_once() -> None:
    async def scene() -> None:
        stage = Stage()
        first, first_sink = stage.generation(1)
        second, second_sink = stage.generation(2, OutputParsing(stop=("STOP",)))
        readers = [asyncio.create_task(texts(each)) for each in (first, second)]
        await settle()
        for one, two in ("ax", "by"):
            stage.emit([step(r1=one, r2=two)])
            await settle()
        assert (first_sink.texts, second_sink.texts) == (["a", "b"], ["x", "y"])
        stage.emit([step(r1="c", r2="z"), end(1, 3), end(2, 3)])
        assert ["".join(await reader) for reader in readers] == ["", ""]
        assert ("".join(first_sink.texts), "".join(second_sink.texts)) == ("abc", "xyz")
        assert (first.usage.completion_tokens, second.usage.completion_tokens) == (3, 3)

    play(scene())


@pytest.mark.parametrize("apart", [True, False])
def test_several_steps_in_columns_come_together(apart: bool) -> None:
    """Also those of one frame, and with the ends of requests between them."""

    async def scene() -> None:
        stage = Stage()
        first, first_sink = stage.generation(1)
        second, second_sink = stage.generation(2)
        readers = [asyncio.create_task(texts(each)) for each in (first, second)]
        await settle()
        steps: list[list[Event]] = [[step(r1="a", r2="A")], [step(r1="b", r2="B"), end(1, 2)], [step(r2="C")]]

        def emit() -> None:
            for events in steps if apart else [list(itertools.chain(*steps))]:
                stage.emit(events)

        while_the_loop_is_busy(emit)
        assert "".join(await readers[0]) == ""
        assert (first_sink.texts, second_sink.texts) == (["ab"], ["ABC"])
        stage.emit([end(2, 3)])
        await readers[1]

    play(scene())


def test_a_step_in_columns_waits_for_a_sink_that_is_not_ready() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1)
        reader = asyncio.create_task(texts(generation))
        await settle()
        sink.is_ready = False
        stage.emit([step(r1="a")])
        await settle()
        sink.is_ready = True
        stage.emit([step(r1="b")])
        await settle()
        stage.emit([step(r1="c"), end(1, 3)])
        assert "".join(await reader) == "a"
        assert sink.texts == ["b", "c"]

    play(scene())


def test_a_stop_string_within_columns_ends_the_iteration() -> None:
    async def scene() -> None:
        stage = Stage()
        generation, sink = stage.generation(1, OutputParsing(stop=("ST",)))
        reader = asyncio.create_task(texts(generation))
        await settle()
        for text in "aST":
            stage.emit([step(r1=text)])
            await settle()
        assert "".join(await reader) == ""
        assert "".join(sink.texts) == "a"
        assert Cancel(1) in stage.link.commands

    play(scene())


def test_what_a_sink_raises_on_columns_ends_its_own_request() -> None:
    async def scene() -> None:
        stage = Stage()
        broken, broken_sink = stage.generation(1)
        other, other_sink = stage.generation(2)
        readers = [asyncio.create_task(texts(each)) for each in (broken, other)]
        await settle()
        broken_sink.error = ValueError("cannot render")
        stage.emit([step(r1="a", r2="b")])
        with pytest.raises(ValueError, match="cannot render"):
            await readers[0]
        assert Cancel(1) in stage.link.commands
        stage.emit([step(r1="c", r2="d"), Generated(1, FinishReason.CANCELLED, Usage(1, 2, 0)), end(2, 2)])
        await readers[1]
        assert other_sink.texts == ["b", "d"]

    play(scene())


def test_the_plain_histogram_is_scraped_like_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("gap_seconds", "Gaps", buckets=(0.001, 0.5, 1, 2.5), registry=ours)
    usual = Histogram("gap_seconds", "Gaps", ["model"], buckets=(0.001, 0.5, 1, 2.5), registry=theirs)
    for model, value in (("a", 0.001), ("a", 0.25), ("b", 7.0), ("a", 0.5), ("b", 1.0)):
        plain.labels(model).observe(value)
        usual.labels(model).observe(value)
    lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == lines
