"""One owner's part of a store of records. To anyone else, what is in it does not exist."""

from __future__ import annotations

from typing import Protocol


class _Records(Protocol):
    async def put(self, key: str, record: bytes) -> None: ...

    async def get(self, key: str) -> bytes | None: ...

    async def delete(self, key: str) -> bool: ...


class OwnedRecords:
    """Implements `ports.RecordStore`. The owner is a part of each key: no reader can forget to ask for it, and servers
    that share a folder agree about it."""

    def __init__(self, records: _Records, owner: str) -> None:
        self._records = records
        self._owner = owner

    def of(self, owner: str) -> OwnedRecords:
        return OwnedRecords(self._records, owner)

    async def put(self, key: str, record: bytes) -> None:
        await self._records.put(self._key(key), record)

    async def get(self, key: str) -> bytes | None:
        return await self._records.get(self._key(key))

    async def delete(self, key: str) -> bool:
        return await self._records.delete(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._owner}/{key}" if self._owner else key
