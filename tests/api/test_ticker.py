"""One timer serves many checks, on each event loop."""

from __future__ import annotations

import asyncio
import gc

import pytest

from millstream.api import ticker as module
from millstream.api.ticker import ticker


def test_checks_are_called_until_they_are_removed() -> None:
    async def main() -> None:
        calls: list[str] = []
        both = asyncio.Event()

        def first() -> None:
            calls.append("first")
            subject.remove(first)
            subject.remove(first)

        def second() -> None:
            calls.append("second")
            if calls.count("second") == 3:
                subject.remove(second)
                both.set()

        subject = ticker(0.001)
        assert ticker(0.001) is subject
        assert ticker(0.002) is not subject
        subject.add(first)
        subject.add(second)
        await asyncio.wait_for(both.wait(), 30)
        assert (calls.count("first"), calls.count("second")) == (1, 3)
        calls.clear()
        both.clear()
        subject.add(again := both.set)  # it runs again
        await asyncio.wait_for(both.wait(), 30)
        subject.remove(again)
        assert calls == []

    asyncio.run(main())


@pytest.mark.parametrize("left", [False, True])
def test_it_is_forgotten_with_its_loop(left: bool) -> None:
    gc.collect()
    before = len(module._TICKERS)

    async def main() -> None:
        ticker(60.0).add(print)
        if not left:
            ticker(60.0).remove(print)
        assert len(module._TICKERS) == before + 1

    asyncio.run(main())
    gc.collect()
    assert len(module._TICKERS) == before
