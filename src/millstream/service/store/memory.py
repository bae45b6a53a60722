"""Records that clients may ask for again, such as stored responses, in memory. Implements `ports.RecordStore`."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from millstream.service.store.owned import OwnedRecords

log = logging.getLogger(__name__)


class MemoryRecords:
    """Holds at most `max_bytes`, each record for at most `max_age` seconds. The least recently used ones give way."""

    def __init__(self, *, max_bytes: int, max_age: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._records: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def of(self, owner: str) -> OwnedRecords:
        return OwnedRecords(self, owner)

    async def put(self, key: str, record: bytes) -> None:
        self._drop(key)
        if len(record) > self._max_bytes:
            log.warning("a record of %d bytes is not stored: the store holds at most %d", len(record), self._max_bytes)
            return
        self._records[key] = (self._clock() + self._max_age, record)
        self._bytes += len(record)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._records)))

    async def get(self, key: str) -> bytes | None:
        found = self._records.get(key)
        if found is None:
            return None
        expires, record = found
        if expires < self._clock():
            self._drop(key)
            return None
        self._records.move_to_end(key)
        return record

    async def delete(self, key: str) -> bool:
        return await self.get(key) is not None and self._drop(key)

    def _drop(self, key: str) -> bool:
        found = self._records.pop(key, None)
        self._bytes -= len(found[1]) if found else 0
        return found is not None
