"""Records on disk, so that a restart finds them. Implements `ports.RecordStore`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from millstream.service.store.folder import RecordFolder

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class RecordFiles:
    """Hands all work on the folder to `worker`, an executor with one thread: so nothing blocks the event loop, nothing
    needs a lock, and a caller that is cancelled leaves no work half done.

    A disk that fails costs the records, not the requests: what cannot be written or read is not found.
    """

    def __init__(self, folder: RecordFolder, worker: Executor) -> None:
        self._folder = folder
        self._worker = worker
        worker.submit(self._scan)

    async def put(self, key: str, record: bytes) -> None:
        await self._run(lambda: self._folder.put(key, record), None)

    async def get(self, key: str) -> bytes | None:
        return await self._run(lambda: self._folder.get(key), None)

    async def delete(self, key: str) -> bool:
        return await self._run(lambda: self._folder.delete(key), False)

    async def _run(self, work: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except OSError as error:
            log.error("the store fails: %s", error)
            return otherwise

    def _scan(self) -> None:
        try:
            self._folder.scan()
        except OSError as error:
            log.error("the store fails: %s", error)
