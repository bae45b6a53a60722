"""The request journal and its log lines: phases, bounds, slow requests, and what is never said."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest

from millstream.errors import BadRequest, ContextOverflow, EngineBusy, MillstreamError, StepFailed
from millstream.request_context import RequestContext, in_request
from millstream.service import journal as subject
from millstream.service.journal import Journal, Phase, RequestRecord
from millstream.service.request_log import log_request
from millstream.types import Usage

CONTEXT = ("req_ab12", "openai", "/v1/chat/completions")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(subject, "time", SimpleNamespace(monotonic=clock.monotonic, time=clock.time))
    return clock


def opened(journal: Journal, model: str = "smollm2") -> RequestRecord:
    with in_request(RequestContext(*CONTEXT)):
        return journal.open(model, "chat")


def run(journal: Journal, clock: Clock, *seconds: float) -> RequestRecord:
    """A request that spends so many seconds in each phase."""
    record = opened(journal)
    record.found("smollm2")
    for phase, spent in zip(Phase, seconds, strict=False):
        record.enter(phase)
        clock.now += spent
    return record


def line(caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    [record] = caplog.records
    return record.levelname, record.getMessage()


def test_phases_follow_each_other_and_end_with_the_request(clock: Clock) -> None:
    journal = Journal()
    record = run(journal, clock, 1.0, 2.0, 3.0)
    assert record.state == "prefill" and record.phases[-1].end is None
    assert record.seconds(Phase.PREFILL) == 3.0 and record.seconds(Phase.DECODE) == 0.0
    record.enter(Phase.QUEUE)
    assert record.state == "prefill", "a second row of the request does not take it back"
    clock.now += 1.0
    journal.end(record, "done", Usage(5, 7, 3), finish_reason="stop")
    assert [(span.phase, span.start, span.end) for span in record.phases] == [
        (Phase.PREPARE, 0.0, 1.0),
        (Phase.QUEUE, 1.0, 3.0),
        (Phase.PREFILL, 3.0, 7.0),
    ]
    assert (record.state, record.total, record.completion_tokens) == ("done", 7.0, 7)
    record.enter(Phase.DECODE)
    assert len(record.phases) == 3, "an event that comes after the end changes nothing"


def test_a_request_that_starts_over_is_prepared_again(clock: Clock) -> None:
    record = run(Journal(), clock, 1.0, 1.0)
    record.found("smollm2")
    assert [span.phase for span in record.phases] == [Phase.PREPARE] and record.load_seconds == 2.0


def test_the_journal_is_bounded_and_newest_comes_first() -> None:
    ended: list[RequestRecord] = []
    journal = Journal(ended.append, max_ended=3)
    records = [opened(journal, f"m{number}") for number in range(5)]
    assert [record.model for record in journal.running] == ["m4", "m3", "m2", "m1", "m0"]
    for record in records[:4]:
        journal.end(record, "done")
        journal.end(record, "cancelled")
    assert [record.model for record in journal.running] == ["m4"]
    assert [(record.model, record.state) for record in journal.recent(2)] == [("m3", "done"), ("m2", "done")]
    assert [record.model for record in journal.recent(100)] == ["m3", "m2", "m1"]
    assert ended == records[:4], "the first end counts"


def test_the_line_tells_what_was_drafted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    journal = Journal(log_request)
    record = run(journal, clock, 0.002, 0.003, 0.08, 0.525)
    usage = Usage(135, 40, accepted_prediction_tokens=30, rejected_prediction_tokens=5)
    journal.end(record, "done", usage, finish_reason="stop")
    assert "135 prompt tokens, 40 tokens out (30 of 35 drafted), stop; " in line(caplog)[1]
    fields = caplog.records[0].fields  # type: ignore[attr-defined]
    assert (fields["drafted_tokens"], fields["accepted_tokens"]) == (35, 30)


def test_the_line_of_a_request(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    journal = Journal(log_request)
    record = run(journal, clock, 0.002, 0.003, 0.08, 0.525)
    record.first_output = 0.085
    journal.end(record, "done", Usage(135, 40, 120), finish_reason="stop")
    assert line(caplog) == (
        "INFO",
        "req_ab12 openai smollm2: 135 prompt tokens (120 cached), 40 tokens out, stop; "
        "queue 3 ms, first token 85 ms, total 0.61 s",
    )
    fields = caplog.records[0].fields  # type: ignore[attr-defined]
    assert fields["queue_seconds"] == 0.003 and fields["total_seconds"] == 0.61 and fields["outcome"] == "done"


@pytest.mark.parametrize(
    ("seconds", "tokens", "slow"),
    [
        ((9.0, 0.1, 0.1, 0.1), 5, "slow prepare: prepare 9.00 s (9.00 s of it until the model was loaded), queue"),
        ((0.1, 6.0, 0.1, 0.1), 5, "slow queue: prepare 0.10 s, queue 6.00 s, prefill 0.10 s, decode 0.10 s"),
        ((0.1, 6.0, 11.0, 0.1), 5, "slow queue and prefill: "),
        ((0.1, 0.1, 0.1, 60.0), 50, "slow decode: "),
    ],
)
def test_slow_requests_say_where_the_time_went(
    clock: Clock, caplog: pytest.LogCaptureFixture, seconds: tuple[float, ...], tokens: int, slow: str
) -> None:
    journal = Journal(log_request)
    record = opened(journal)
    clock.now += seconds[0]
    record.found("smollm2")
    for phase, spent in zip(list(Phase)[1:], seconds[1:], strict=True):
        record.enter(phase)
        clock.now += spent
    journal.end(record, "done", Usage(5, tokens), finish_reason="stop")
    level, text = line(caplog)
    assert level == "WARNING" and slow in text


def test_a_long_answer_is_not_slow(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    journal = Journal(log_request)
    journal.end(run(journal, clock, 0.1, 0.1, 0.1, 200.0), "done", Usage(5, 4000), finish_reason="stop")
    assert line(caplog)[0] == "INFO"


SECRET = "my password is swordfish"


@pytest.mark.parametrize(
    ("error", "level", "said"),
    [
        (BadRequest(f"no: {SECRET}", param="messages[0]"), "INFO", "refused with 400, invalid_request (messages[0])"),
        (ContextOverflow("This model's maximum context length is 8 tokens."), "INFO", "refused with 400, This model's"),
        (EngineBusy("the engine is full", active=1, waiting=2, retry_after=1), "INFO", "refused with 503, the engine"),
        (StepFailed("the model failed\nin this step"), "WARNING", "failed with 500, the model failed in this step"),
    ],
)
def test_refused_and_failed_requests_say_why_and_quote_nobody(
    caplog: pytest.LogCaptureFixture, error: MillstreamError, level: str, said: str
) -> None:
    caplog.set_level(logging.INFO)
    journal = Journal(log_request)
    record = opened(journal)
    journal.end(record, "failed", error=error)
    assert line(caplog)[0] == level and f"req_ab12 openai smollm2: {said}" in line(caplog)[1]
    assert SECRET not in caplog.text and SECRET not in str(caplog.records[0].fields)  # type: ignore[attr-defined]
    assert record.context.reported == id(error), "the edge must not log it again"


def test_a_record_holds_nothing_that_its_request_held() -> None:
    """An exception holds its frames, and they hold prompts and media: 500 records must not."""

    class Media:
        pass

    def fail(journal: Journal) -> weakref.ref[Media]:
        media = Media()
        record = opened(journal)
        try:
            raise StepFailed("bang")
        except StepFailed as error:
            journal.end(record, "failed", error=error)
        return weakref.ref(media)

    journal = Journal()
    held = fail(journal)
    gc.collect()
    assert held() is None and journal.recent(1)[0].failure is not None


def test_a_name_that_a_client_made_up_is_cut_and_cannot_break_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    journal = Journal(log_request)
    record = opened(journal, "x\n12:00:00 E forged " + "y" * 10**6)
    journal.end(record, "failed", error=BadRequest("no"))
    assert len(record.model) < 300 and "\n" not in line(caplog)[1]
