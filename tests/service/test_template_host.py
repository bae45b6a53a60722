"""Untrusted chat templates: one that loops or exhausts memory fails only its own request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import psutil
import pytest

from millstream.errors import BadRequest, EngineGone
from millstream.pools import OwnThreads
from millstream.service.generation.template_host import TemplateHost, render_job
from millstream.text.templates.conversation import TemplateInput
from millstream.text.templates.template import TemplateSource
from support import processes
from support.hubs import on_loop

ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ x }}{{ eos_token }}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Only for the message `go`: `open` tries every template with a harmless message.
SPINS = "{% if messages[0].content == 'go' %}" + NESTED + "{% endif %}done"
GROWS = "{% if messages[0].content == 'go' %}{{ ('x' * 99999) * 99999 }}{% endif %}done"
LONG = "{% if messages[0].content == 'go' %}{{ 'x' * 3000000 }}{% endif %}done"
PATIENCE = 30


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@asynccontextmanager
async def hosted(source: str, pool: ThreadPoolExecutor) -> AsyncIterator[TemplateHost]:
    host = TemplateHost(TemplateSource(source, {"eos_token": "</s>"}), pool)
    await host.open()
    try:
        yield host
    finally:
        await host.close()


def job(content: str, **kwargs: object) -> bytes:
    return render_job(TemplateInput([[{"role": "user", "content": content}]], kwargs), None)


@pytest.fixture(autouse=True)
def others() -> set[int]:
    """Template processes of servers that live for the whole test session."""
    return set(children())


def children(others: Set[int] = frozenset()) -> list[int]:
    return [child.pid for child in processes.children(processes.TEMPLATE) if child.pid not in others]


@on_loop
async def test_renders_with_keywords_and_special_tokens(pool: ThreadPoolExecutor) -> None:
    async with hosted(ECHO, pool) as host:
        assert host.note is None
        assert await host.render(job("Grüße 🌊", x=1)) == "user:Grüße 🌊;1</s>"


@on_loop
async def test_the_first_variant_that_the_template_accepts_is_used(pool: ThreadPoolExecutor) -> None:
    picky = "{% if messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}fine"
    async with hosted(picky, pool) as host:
        tool, user = [{"role": "tool", "content": ""}], [{"role": "user", "content": ""}]
        assert await host.render(render_job(TemplateInput([tool, user], {}), None)) == "fine"
        with pytest.raises(BadRequest, match="no tool"):
            await host.render(render_job(TemplateInput([tool, tool], {}), None))


@pytest.mark.parametrize(
    ("source", "words"), [(SPINS, "CPU time"), (GROWS, "more than 1024 MiB"), (LONG, "rendered 3000004 characters")]
)
@on_loop
async def test_a_runaway_template_fails_only_its_own_request(
    pool: ThreadPoolExecutor, others: set[int], source: str, words: str
) -> None:
    async with hosted(source, pool) as host:
        runaway = asyncio.ensure_future(host.render(job("go")))
        queued = asyncio.ensure_future(host.render(job("hello")))
        with pytest.raises(BadRequest, match=words) as caught:
            await runaway
        assert caught.value.param == "messages"
        assert await queued == "done"
        assert len(children(others)) == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "does not compile"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU"),
    ],
)
@on_loop
async def test_an_unusable_template_has_a_note(pool: ThreadPoolExecutor, source: str, words: str) -> None:
    async with hosted(source, pool) as host:
        assert host.note is not None and words in host.note
        with pytest.raises(BadRequest, match=words):
            await host.render(job("hello"))


@on_loop
async def test_without_a_template_the_error_names_completions(pool: ThreadPoolExecutor) -> None:
    host = TemplateHost(None, pool)
    await host.open()
    with pytest.raises(BadRequest, match="/v1/completions"):
        await host.render(job("hello"))
    await host.close()


@on_loop
async def test_the_reply_to_a_cancelled_request_is_not_given_to_the_next(pool: ThreadPoolExecutor) -> None:
    async with hosted(ECHO, pool) as host:
        cancelled = [asyncio.ensure_future(host.render(job(f"one {number}"))) for number in range(3)]
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        assert await host.render(job("two")) == "user:two;</s>"


@on_loop
async def test_a_child_that_was_killed_is_replaced(pool: ThreadPoolExecutor, others: set[int]) -> None:
    async with hosted(ECHO, pool) as host:
        (first,) = children(others)
        psutil.Process(first).kill()
        with pytest.raises(BadRequest, match="Try again"):
            await host.render(job("one"))
        assert await host.render(job("two")) == "user:two;</s>"


@on_loop
async def test_a_cancelled_open_leaves_no_process(pool: ThreadPoolExecutor, others: set[int]) -> None:
    for wait in (0.0, 0.001, 0.02, 0.1):
        host = TemplateHost(TemplateSource(ECHO, {}), pool)
        opening = asyncio.ensure_future(host.open())
        await asyncio.sleep(wait)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():  # it finished first
            await host.close()
        assert children(others) == []


@on_loop
async def test_close_ends_a_child_that_hangs_before_it_has_compiled(pool: ThreadPoolExecutor, others: set[int]) -> None:
    host = TemplateHost(TemplateSource(ECHO, {}), pool)
    opening = asyncio.ensure_future(host.open())
    while not (found := children(others)):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    psutil.Process(found[0]).suspend()
    async with asyncio.timeout(PATIENCE):
        await host.close()
        await asyncio.wait([opening])
    assert children(others) == []


@on_loop
async def test_a_child_that_renders_while_it_is_stopped_leaves_no_trace(
    others: set[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.service.generation.template_host.EXIT_TIMEOUT", PATIENCE)
    host = TemplateHost(TemplateSource(ECHO, {"eos_token": "</s>"}), OwnThreads())
    await host.open()
    child = psutil.Process(children(others)[0])
    child.suspend()
    asking = asyncio.ensure_future(host.render(job("hello")))
    await asyncio.sleep(0)  # the job is written
    closing = asyncio.ensure_future(host.close())
    await asyncio.sleep(0.01)  # the socket is closed
    child.resume()
    with pytest.raises(EngineGone, match="is being unloaded"):
        await asking
    await closing
    assert capfd.readouterr().err == ""


@on_loop
async def test_close_leaves_no_process(pool: ThreadPoolExecutor, others: set[int]) -> None:
    async with hosted(ECHO, pool) as host:
        assert len(children(others)) == 1
        first = asyncio.ensure_future(host.close())
        await asyncio.sleep(0)
        await host.close()  # it waits, though another call has begun
        await first
        assert children(others) == []
