"""Records on disk, so that a restart finds them. Implements `ports.RecordStore`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from millstream.service.store.folder import RecordFolder
from millstream.service.store.memory import MemoryRecords
from millstream.service.store.owned import OwnedRecords

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class RecordFiles:
    """Hands all work on the folder to `worker`, an executor with one thread: so nothing blocks the event loop, nothing
    needs a lock, and what a caller has asked for is done in full, also if the caller is cancelled.

    A disk that fails costs no request: what cannot be written is in `spare` until the server stops, and what cannot be
    read is not found.
    """

    def __init__(self, folder: RecordFolder, worker: Executor, spare: MemoryRecords) -> None:
        self._folder = folder
        self._worker = worker
        self._spare = spare
        self.fails = False
        """True if the last record could not be written."""
        worker.submit(self._scan)

    def of(self, owner: str) -> OwnedRecords:
        return OwnedRecords(self, owner)

    async def put(self, key: str, record: bytes) -> None:
        self.fails = not await self._run(lambda: self._write(key, record), False)
        if self.fails:
            await self._spare.put(key, record)
        else:
            await self._spare.delete(key)

    async def get(self, key: str) -> bytes | None:
        spare = await self._spare.get(key)
        return await self._run(lambda: self._folder.get(key), None) if spare is None else spare

    async def delete(self, key: str) -> bool:
        spare = await self._spare.delete(key)
        return await self._run(lambda: self._folder.delete(key), False) or spare

    def _write(self, key: str, record: bytes) -> bool:
        self._folder.put(key, record)
        return True

    async def _run(self, work: Callable[[], _T], otherwise: _T) -> _T:
        done = asyncio.get_running_loop().run_in_executor(self._worker, _try, work, otherwise)
        return await asyncio.shield(done)

    def _scan(self) -> None:
        _try(self._folder.scan, None)


def _try(work: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return work()
    except OSError as error:
        log.error("the store fails: %s", error)
        return otherwise
