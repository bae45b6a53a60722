"""The tokens of many rows are one event in columns, and mean the same as an event for each."""

from __future__ import annotations

import pickle

import pytest

from millstream.engine.generation.messages import Generate, Generated, StepTokens, Tokens
from millstream.engine.generation.plan import RowOutput, StepResult
from millstream.engine.generation.scheduler import COLUMNS_FROM, GenerationScheduler
from millstream.engine.messages import Event, expanded
from millstream.types import FinishReason, TokenLogprob


def running(rows: int, *, stop: int = 9, limits: dict[int, int] | None = None) -> GenerationScheduler:
    """Requests 0, 1, ... that all decode."""
    subject = GenerationScheduler(max_rows=rows, prefill_tokens=64)
    for number in range(rows):
        limit = (limits or {}).get(number, 100)
        subject.submit(Generate(number, (1,), limit, stop_tokens=frozenset({stop})))
    while len(subject._running) < rows:
        subject.advance(subject.plan(), StepResult())
    return subject


def advance(subject: GenerationScheduler, *rows: RowOutput) -> list[Event]:
    return subject.advance(subject.plan(), StepResult(rows))


@pytest.mark.parametrize("rows", [1, COLUMNS_FROM - 1, COLUMNS_FROM, 40])
def test_every_row_has_its_token_once(rows: int) -> None:
    subject = running(rows)
    for token in (5, 6):
        events = advance(subject, *(RowOutput(number, (token + number % 3,)) for number in range(rows)))
        assert len(events) == (1 if rows >= COLUMNS_FROM else rows)
        assert list(expanded(events)) == [Tokens(number, (token + number % 3,)) for number in range(rows)]
    assert all(request.generated == 2 for request in subject._running.values())


def test_ends_come_after_the_tokens_and_other_rows_keep_their_own_events() -> None:
    subject = running(8, limits={1: 1})
    scored = (TokenLogprob(3, -0.5),)
    rows = [RowOutput(number, (3,)) for number in range(8)]
    rows[2] = RowOutput(2, (3,), scored)  # log-probabilities
    rows[4] = RowOutput(4, (3, 9, 3))  # several tokens, and its end among them
    rows[6] = RowOutput(6, (9,))  # nothing but its end
    events = advance(subject, *rows)
    assert events[0] == StepTokens((0, 1, 3, 5, 7), (3,) * 5)
    assert {event for event in events if isinstance(event, Tokens)} == {Tokens(2, (3,), scored), Tokens(4, (3,))}
    ends = {event.request_id: event.reason for event in events if isinstance(event, Generated)}
    assert ends == {1: FinishReason.LENGTH, 4: FinishReason.STOP, 6: FinishReason.STOP}


def test_rows_of_requests_that_have_ended_are_left_out() -> None:
    subject = running(COLUMNS_FROM + 1)
    subject.cancel(0)
    events = advance(subject, *(RowOutput(number, (7,)) for number in range(COLUMNS_FROM + 1)))
    assert events == [StepTokens(tuple(range(1, COLUMNS_FROM + 1)), (7,) * COLUMNS_FROM)]


def test_columns_cross_to_another_process() -> None:
    event = StepTokens((1, 2), (3, 4))
    assert pickle.loads(pickle.dumps(event)) == event
    assert event.output(1, [3, 5]) == Tokens(1, (3, 5))
