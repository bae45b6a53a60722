"""DNS lookups have a time limit, and hanging ones occupy only the resolver's own threads."""

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


class HangingLookup:
    """Hangs for every host but one."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, seconds: float) -> list[str]:
        self.asked.append(host)
        if host != "quick.test":
            self.release.wait(60)
        return ["127.0.0.1"]


@pytest.fixture
def lookup() -> Iterator[HangingLookup]:
    subject = HangingLookup()
    yield subject
    subject.release.set()


@pytest.fixture
def resolver(lookup: HangingLookup) -> Iterator[Resolver]:
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="test-dns")
    yield Resolver(pool, lookup)
    lookup.release.set()
    pool.shutdown(wait=True)


def test_a_fetch_ends_at_its_timeout(resolver: Resolver) -> None:
    began = time.monotonic()
    with pytest.raises(MediaRefused, match=r"took longer than 0.2 s \(--media-timeout\)"):
        fetch("http://slow.test/a.png", MediaLimits(timeout=0.2), resolver)
    assert time.monotonic() - began < 20


def test_a_host_that_is_resolved(resolver: Resolver) -> None:
    with running_web() as web:
        web.body("/a", b"here")
        limits = MediaLimits(timeout=20, allow_private=True)
        assert fetch(f"http://quick.test:{web.port}/a", limits, resolver) == b"here"


def test_resolved_addresses_are_checked(resolver: Resolver) -> None:
    with pytest.raises(MediaRefused, match="not a public address"):
        fetch("http://quick.test/a", MediaLimits(), resolver)


def test_a_redirect_shares_the_timeout(resolver: Resolver) -> None:
    with running_web() as web:
        web.redirect("/a", "http://slow.test/b")
        with pytest.raises(MediaRefused, match=r"took longer than 0\.5 s"):
            fetch(f"http://quick.test:{web.port}/a", MediaLimits(timeout=0.5, allow_private=True), resolver)


def test_many_hanging_lookups_take_no_more_threads(resolver: Resolver, lookup: HangingLookup) -> None:
    for number in range(8):
        with pytest.raises(TimeoutError):
            resolver(f"slow-{number}.test", 80, 1.0 if number < THREADS else 0.05)  # the first begin new threads
    assert len(lookup.asked) == THREADS
    assert sum(thread.name.startswith("test-dns") for thread in threading.enumerate()) == THREADS
    lookup.release.set()
    assert resolver("quick.test", 80, 20) == ["127.0.0.1"]
    # Lookups that timed out in the queue are never started.
    assert [*lookup.asked] == ["slow-0.test", "slow-1.test", "quick.test"]


def test_an_unknown_host() -> None:
    def unknown(host: str, port: int, seconds: float) -> list[str]:
        raise OSError("no such name")

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(MediaRefused, match=r"'x.test' .* cannot be resolved: no such name"),
    ):
        fetch("http://x.test/", MediaLimits(), Resolver(pool, unknown))
