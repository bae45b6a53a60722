"""Names are looked up within a time, and a resolver that hangs costs no more threads than there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from media.web import running_web
from millstream.errors import MediaRefused
from millstream.media.fetch import fetch
from millstream.media.limits import MediaLimits
from millstream.media.resolver import Resolver

THREADS = 2


class HangingLookUp:
    """Hangs for every name but one."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, seconds: float) -> list[str]:
        self.asked.append(host)
        if host != "quick.test":
            self.release.wait(60)
        return ["127.0.0.1"]


@pytest.fixture
def look_up() -> Iterator[HangingLookUp]:
    subject = HangingLookUp()
    yield subject
    subject.release.set()


@pytest.fixture
def resolver(look_up: HangingLookUp) -> Iterator[Resolver]:
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="test-names")
    yield Resolver(pool, look_up)
    look_up.release.set()
    pool.shutdown(wait=True)


def test_a_fetch_ends_when_its_time_is_over(resolver: Resolver) -> None:
    began = time.monotonic()
    with pytest.raises(MediaRefused, match=r"took longer than 0.2 s \(--media-timeout\)"):
        fetch("http://slow.test/a.png", MediaLimits(seconds=0.2), resolver)
    assert time.monotonic() - began < 3
    assert resolver.hanging


def test_a_name_that_is_found(resolver: Resolver) -> None:
    with running_web() as web:
        web.body("/a", b"here")
        limits = MediaLimits(seconds=20, private=True)
        assert fetch(f"http://quick.test:{web.port}/a", limits, resolver) == b"here"
    assert not resolver.hanging


def test_addresses_are_checked_wherever_they_come_from(resolver: Resolver) -> None:
    with pytest.raises(MediaRefused, match="no public address"):
        fetch("http://quick.test/a", MediaLimits(), resolver)


def test_a_redirect_has_what_is_left_of_the_time(resolver: Resolver) -> None:
    with running_web() as web:
        web.redirect("/a", "http://slow.test/b")
        with pytest.raises(MediaRefused, match=r"took longer than 0\.5 s"):
            fetch(f"http://quick.test:{web.port}/a", MediaLimits(seconds=0.5, private=True), resolver)


def test_many_that_hang_take_no_more_threads_and_leave_nothing_behind(
    resolver: Resolver, look_up: HangingLookUp
) -> None:
    for number in range(8):
        with pytest.raises(TimeoutError):
            resolver(f"slow-{number}.test", 80, 0.05)
    assert len(look_up.asked) == THREADS
    assert sum(thread.name.startswith("test-names") for thread in threading.enumerate()) == THREADS
    look_up.release.set()
    assert resolver("quick.test", 80, 20) == ["127.0.0.1"]
    # Those whose time was over before they began are never asked about.
    assert [*look_up.asked] == ["slow-0.test", "slow-1.test", "quick.test"]
    until = time.monotonic() + 20
    while resolver.hanging and time.monotonic() < until:
        time.sleep(0.01)
    assert not resolver.hanging


def test_what_the_resolver_says_of_a_name_that_is_not_there() -> None:
    def unknown(host: str, port: int, seconds: float) -> list[str]:
        raise OSError("no such name")

    with ThreadPoolExecutor(1) as pool, pytest.raises(MediaRefused, match=r"'x.test' .* is not known: no such name"):
        fetch("http://x.test/", MediaLimits(), Resolver(pool, unknown))
