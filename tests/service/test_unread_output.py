"""Output that waits for its reader: counted, bounded, and given in order."""

from __future__ import annotations

import asyncio

import pytest

from millstream.engine.generation.messages import Generated, PromptLogprobs, Tokens
from millstream.engine.messages import EVENT_BYTES, Finished, RequestEvent
from millstream.errors import OutputUnread
from millstream.service.inbox import TURN, Inbox
from millstream.service.unread_output import SHARES, UnreadOutput
from millstream.types import FinishReason, TokenLogprob, Usage

END = Generated(1, FinishReason.LENGTH, Usage())


def tokens(count: int, *, top: int = 0) -> list[RequestEvent]:
    logprobs = (TokenLogprob(7, -1.0, ((7, -1.0),) * top),) if top else ()
    return [Tokens(1, (number,), logprobs) for number in range(count)]


def fill(inbox: Inbox, events: list[RequestEvent]) -> Inbox:
    for event in events:
        inbox.push(event)
    return inbox


async def drained(inbox: Inbox) -> list[int]:
    found: list[int] = []
    while True:
        for event in await inbox.take():
            if isinstance(event, Finished):
                return found
            assert isinstance(event, Tokens)
            found += event.tokens


@pytest.mark.parametrize("count", [0, 1, TURN - 1, TURN, TURN + 1, 10 * TURN + 3])
def test_a_slow_reader_gets_all_in_order(count: int) -> None:
    budget = UnreadOutput(2**20)
    inbox = fill(Inbox(budget), [*tokens(count), END])
    assert budget.total == inbox.unread == (count + 1) // TURN * TURN * EVENT_BYTES
    assert asyncio.run(drained(inbox)) == list(range(count))
    assert budget.total == inbox.unread == 0


def test_what_is_over_its_share_ends() -> None:
    budget, ended = UnreadOutput(100 * EVENT_BYTES), []
    inbox = Inbox(budget)
    inbox.on_overflow(lambda: ended.append(1))
    fill(inbox, tokens(96))
    assert not ended
    fill(inbox, [*tokens(500), END])
    assert ended == [1]
    assert budget.total == 0
    with pytest.raises(OutputUnread, match="of the answer waited to be read, so it was ended"):
        asyncio.run(inbox.take())


def test_log_probabilities_weigh_more() -> None:
    plain, scored = (tokens(1, top=top)[0].nbytes for top in (0, 20))
    assert scored > 10 * plain
    prompt = PromptLogprobs(1, (TokenLogprob(1, -1.0, ((1, -1.0),) * 20),) * 1000)
    assert prompt.nbytes > 1000 * 20 * 100
    budget = UnreadOutput(2**20)
    inbox = fill(Inbox(budget), [prompt])
    with pytest.raises(OutputUnread):
        asyncio.run(inbox.take())


def test_over_the_total_the_largest_ends_and_nobody_else() -> None:
    budget = UnreadOutput(100 * EVENT_BYTES)
    large = fill(Inbox(budget), tokens(96))
    others = [fill(Inbox(budget), tokens(64)) for _ in range(SHARES * 100 // 64 - 2)]
    ended: list[str] = []
    large.on_overflow(lambda: ended.append("large"))
    for other in others:
        other.on_overflow(lambda: ended.append("other"))
    last = Inbox(budget)
    last.on_overflow(lambda: ended.append("last"))
    fill(last, tokens(64))
    assert ended == ["large"]
    assert budget.total <= budget.limit
    assert asyncio.run(drained(fill(last, [END]))) == list(range(64))


def test_who_has_left_counts_no_longer() -> None:
    budget = UnreadOutput(100 * EVENT_BYTES)
    inbox = fill(Inbox(budget), tokens(64))
    inbox.close()
    inbox.close()
    assert budget.total == 0
    fill(inbox, tokens(1000))
    assert budget.total == 0


def test_a_reader_that_waits_is_told() -> None:
    async def main() -> None:
        inbox = Inbox(UnreadOutput(1000))
        reader = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.end(OutputUnread("too slow"))
        with pytest.raises(OutputUnread, match="too slow"):
            await reader

    asyncio.run(main())
