"""Chat templates of strangers: they may loop for ever and multiply strings, and nothing but their own request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import psutil
import pytest

from millstream.errors import BadRequest
from millstream.service.generation.template_host import TemplateHost, job_of
from millstream.text.conversation import TemplateInput
from millstream.text.template import TemplateSource
from support import processes
from support.hubs import on_loop

ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ x }}{{ eos_token }}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Only a message that asks for it: every template is tried with a harmless one when it is opened.
SPINS = "{% if messages[0].content == 'go' %}" + NESTED + "{% endif %}done"
GROWS = "{% if messages[0].content == 'go' %}{{ ('x' * 99999) * 99999 }}{% endif %}done"
LONG = "{% if messages[0].content == 'go' %}{{ 'x' * 3000000 }}{% endif %}done"


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
    return job_of(TemplateInput([[{"role": "user", "content": content}]], kwargs), None)


@pytest.fixture(autouse=True)
def others() -> set[int]:
    """Of servers that live for the whole run of the tests."""
    return set(children())


def children(others: Set[int] = frozenset()) -> list[int]:
    return [child.pid for child in processes.children(processes.TEMPLATE) if child.pid not in others]


@on_loop
async def test_renders_with_keywords_and_special_tokens(pool: ThreadPoolExecutor) -> None:
    async with hosted(ECHO, pool) as host:
        assert host.note is None
        assert await host.render(job("Grüße 🌊", x=1)) == "user:Grüße 🌊;1</s>"


@on_loop
async def test_the_first_variant_that_the_template_takes_counts(pool: ThreadPoolExecutor) -> None:
    picky = "{% if messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}fine"
    async with hosted(picky, pool) as host:
        tool, user = [{"role": "tool", "content": ""}], [{"role": "user", "content": ""}]
        assert await host.render(job_of(TemplateInput([tool, user], {}), None)) == "fine"
        with pytest.raises(BadRequest, match="no tool"):
            await host.render(job_of(TemplateInput([tool, tool], {}), None))


@pytest.mark.parametrize(
    ("source", "words"), [(SPINS, "CPU time"), (GROWS, "more than 1024 MiB"), (LONG, "rendered 3000004 characters")]
)
@on_loop
async def test_a_template_that_runs_wild_costs_its_request_alone(
    pool: ThreadPoolExecutor, others: set[int], source: str, words: str
) -> None:
    async with hosted(source, pool) as host:
        wild = asyncio.ensure_future(host.render(job("go")))
        behind = asyncio.ensure_future(host.render(job("hello")))
        with pytest.raises(BadRequest, match=words) as caught:
            await wild
        assert caught.value.param == "messages"
        assert await behind == "done"
        assert len(children(others)) == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "does not compile"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU"),
    ],
)
@on_loop
async def test_a_template_that_cannot_be_used_says_so(pool: ThreadPoolExecutor, source: str, words: str) -> None:
    async with hosted(source, pool) as host:
        assert host.note is not None and words in host.note
        with pytest.raises(BadRequest, match=words):
            await host.render(job("hello"))


@on_loop
async def test_without_a_template_the_other_endpoint_is_named(pool: ThreadPoolExecutor) -> None:
    host = TemplateHost(None, pool)
    await host.open()
    with pytest.raises(BadRequest, match="/v1/completions"):
        await host.render(job("hello"))
    await host.close()


@on_loop
async def test_a_client_that_leaves_does_not_leave_its_prompt_to_the_next(pool: ThreadPoolExecutor) -> None:
    async with hosted(ECHO, pool) as host:
        leaving = [asyncio.ensure_future(host.render(job(f"one {number}"))) for number in range(3)]
        await asyncio.sleep(0)
        for task in leaving:
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
async def test_an_opening_that_is_given_up_leaves_no_process(pool: ThreadPoolExecutor, others: set[int]) -> None:
    for wait in (0.0, 0.001, 0.02, 0.1):
        host = TemplateHost(TemplateSource(ECHO, {}), pool)
        opening = asyncio.ensure_future(host.open())
        await asyncio.sleep(wait)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():  # it was quicker
            await host.close()
        assert children(others) == []


@on_loop
async def test_nothing_stays_behind(pool: ThreadPoolExecutor, others: set[int]) -> None:
    async with hosted(ECHO, pool):
        assert len(children(others)) == 1
    assert children(others) == []
