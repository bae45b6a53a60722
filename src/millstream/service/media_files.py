"""The files of a request: whatever waits for others, hosts or decoders, keeps no prompt from being prepared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from millstream.errors import MediaRefused, UnsupportedParameter
from millstream.media.addresses import LookUp
from millstream.media.limits import MediaLimits
from millstream.media.port import MediaReader, Prepared
from millstream.media.sources import is_local, read_source
from millstream.types import MediaPart

T = TypeVar("T")

DECODED = 2
"""Videos and sounds at once: most of them have a child process each, with threads of its own."""

_NAMES = {"image": "images", "audio": "sound", "video": "video"}


class MediaFiles:
    """`network` waits for other machines; `pool` decodes and reads what is here; `look_up` finds hosts."""

    def __init__(self, limits: MediaLimits, pool: Executor, network: Executor, look_up: LookUp) -> None:
        self._limits = limits
        self._pool = pool
        self._network = network
        self._look_up = look_up
        self._decoding = asyncio.Semaphore(DECODED)

    async def prepare(
        self, parts: Sequence[MediaPart], data: Sequence[bytes], reader: MediaReader
    ) -> Sequence[Prepared]:
        """What a model takes of each. Each is a task of its own: a request with many leaves room for others between
        them."""
        both = zip(parts, data, strict=True)
        return await asyncio.gather(*(self._prepare(part, content, reader) for part, content in both))

    async def _prepare(self, part: MediaPart, data: bytes, reader: MediaReader) -> Prepared:
        loop = asyncio.get_running_loop()
        work = partial(reader.read, part.kind, data)
        if part.kind == "image":
            return await loop.run_in_executor(self._pool, about, part, work)
        # Who waits for a child must not keep prompts from being prepared.
        async with self._decoding:
            return await loop.run_in_executor(self._network, about, part, work)

    async def read(self, parts: Sequence[MediaPart], kinds: Collection[str]) -> list[bytes]:
        """The bytes of each, in order. What is not of the `kinds` that the model takes is refused before anything is
        fetched."""
        self._check(parts, kinds)
        return list(await asyncio.gather(*(self._read(part) for part in parts)))

    def _check(self, parts: Sequence[MediaPart], kinds: Collection[str]) -> None:
        for part in parts:
            if part.kind not in kinds:
                taken = " and ".join(["text", *(_NAMES[kind] for kind in sorted(kinds))])
                raise UnsupportedParameter(
                    f"This model takes {taken} only; {part.param} is of kind {part.kind}.", param=part.param
                )
        if len(parts) > self._limits.count:
            raise MediaRefused(
                f"the request has {len(parts)} media files; this server takes {self._limits.count} (--media-count)",
                param="messages",
            )

    async def _read(self, part: MediaPart) -> bytes:
        pool = self._pool if is_local(part.source) else self._network
        loop = asyncio.get_running_loop()
        work = partial(read_source, part.source, self._limits, self._look_up)
        return await loop.run_in_executor(pool, about, part, work)


def about(part: MediaPart, work: Callable[[], T]) -> T:
    """What `work` gives; a refusal says which part of the request it is about."""
    try:
        return work()
    except MediaRefused as error:
        raise MediaRefused(f"{part.param}: {error.message}.", param=part.param) from error
