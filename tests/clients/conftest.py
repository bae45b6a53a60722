"""Clients of other projects leave things behind that would fail a later test."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def closed_event_loop() -> Iterator[None]:
    """Some clients make an event loop for the main thread and never close it. When another test replaces it, Python
    warns of that, and the warning would count as that test's failure."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # and sockets, which must not be found within a later test
        gc.collect()
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            loop = asyncio.get_event_loop()
        except RuntimeError:  # there is none
            return
    loop.close()
    asyncio.set_event_loop(None)
