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
from millstream.service.names import Names

THREADS = 2


class Resolver:
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
def resolver() -> Iterator[Resolver]:
    subject = Resolver()
    yield subject
    subject.release.set()


@pytest.fixture
def names(resolver: Resolver) -> Iterator[Names]:
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="test-names")
    yield Names(pool, resolver)
    resolver.release.set()
    pool.shutdown(wait=True)


def test_a_fetch_ends_when_its_time_is_over(names: Names) -> None:
    began = time.monotonic()
    with pytest.raises(MediaRefused, match=r"took longer than 0.2 s \(--media-timeout\)"):
        fetch("http://slow.test/a.png", MediaLimits(seconds=0.2), names)
    assert time.monotonic() - began < 3
    assert names.hanging


def test_a_name_that_is_found(names: Names) -> None:
    with running_web() as web:
        web.body("/a", b"here")
        limits = MediaLimits(seconds=20, private=True)
        assert fetch(f"http://quick.test:{web.port}/a", limits, names) == b"here"
    assert not names.hanging


def test_addresses_are_checked_wherever_they_come_from(names: Names) -> None:
    with pytest.raises(MediaRefused, match="no public address"):
        fetch("http://quick.test/a", MediaLimits(), names)


def test_a_redirect_has_what_is_left_of_the_time(names: Names) -> None:
    with running_web() as web:
        web.redirect("/a", "http://slow.test/b")
        with pytest.raises(MediaRefused, match=r"took longer than 0\.5 s"):
            fetch(f"http://quick.test:{web.port}/a", MediaLimits(seconds=0.5, private=True), names)


def test_many_that_hang_take_no_more_threads_and_leave_nothing_behind(names: Names, resolver: Resolver) -> None:
    for number in range(8):
        with pytest.raises(TimeoutError):
            names(f"slow-{number}.test", 80, 0.05)
    assert len(resolver.asked) == THREADS
    assert sum(thread.name.startswith("test-names") for thread in threading.enumerate()) == THREADS
    resolver.release.set()
    assert names("quick.test", 80, 20) == ["127.0.0.1"]
    # Those whose time was over before they began are never asked about.
    assert [*resolver.asked] == ["slow-0.test", "slow-1.test", "quick.test"]
    until = time.monotonic() + 20
    while names.hanging and time.monotonic() < until:
        time.sleep(0.01)
    assert not names.hanging


def test_what_the_resolver_says_of_a_name_that_is_not_there() -> None:
    def unknown(host: str, port: int, seconds: float) -> list[str]:
        raise OSError("no such name")

    with ThreadPoolExecutor(1) as pool, pytest.raises(MediaRefused, match=r"'x.test' .* is not known: no such name"):
        fetch("http://x.test/", MediaLimits(), Names(pool, unknown))
