"""The files of a request: whatever waits for others, hosts or decoders, keeps no prompt from being prepared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from millstream.errors import MediaRefused, UnsupportedParameter
from millstream.media.addresses import LookUp
from millstream.media.limits import MediaLimits
from millstream.media.port import MediaPreprocessor, Prepared
from millstream.media.sources import is_local, read_source
from millstream.service.media.memory import MediaMemory, Share
from millstream.types import MediaPart

T = TypeVar("T")

IMAGES = 2
"""Decoded at once: half of the pool's threads, so that prompts of text need not wait for images."""
DECODED = 2
"""Videos and sounds at once: most of them have a child process each, with threads of its own."""

_NAMES = {"image": "images", "audio": "sound", "video": "video"}


class MediaFiles:
    """`network` waits for other machines; `pool` decodes and reads what is here; `look_up` finds hosts."""

    def __init__(
        self, limits: MediaLimits, memory: MediaMemory, pool: Executor, network: Executor, look_up: LookUp
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._pool = pool
        self._network = network
        self._look_up = look_up

    def of_request(self, answers: int) -> RequestMedia:
        """`answers`: how many an engine is asked for; each of them may be given a copy of the media."""
        return RequestMedia(self, self._memory, answers)

    def check(self, parts: Sequence[MediaPart], kinds: Collection[str]) -> None:
        """What is not of the `kinds` that the model takes is refused before anything is fetched."""
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
        self._memory.check()

    async def prepare(self, part: MediaPart, reader: MediaPreprocessor) -> Prepared:
        """What a model takes of a file. Its bytes are here no longer than that takes."""
        local = is_local(part.source)
        most = min(self._limits.size, len(part.source)) if local and part.source[:5].lower() == "data:" else None
        memory = self._memory
        with await memory.share(memory.files, min(most or self._limits.size, memory.limit)) as share:
            work = partial(read_source, part.source, self._limits, self._look_up)
            data = await _run(self._pool if local else self._network, partial(about, part, work), share)
            share.shrink(len(data))
            return await self._decode(part, data, reader, share)

    async def _decode(self, part: MediaPart, data: bytes, reader: MediaPreprocessor, held: Share) -> Prepared:
        size = await _run(self._pool, partial(about, part, partial(reader.decoding_bytes, part.kind, data)), held)
        memory = self._memory
        image = part.kind == "image"
        try:
            share = await memory.share(memory.images if image else memory.others, size)
        except MediaRefused as error:
            raise _named(part, error) from error
        with share:
            work = partial(about, part, partial(reader.read, part.kind, data))
            # Who waits for a child must not keep prompts from being prepared.
            return await _run(self._pool if image else self._network, work, share, held)


class RequestMedia:
    """The media of one request, and the memory that they take until it has ended: then `release` it."""

    def __init__(self, files: MediaFiles, memory: MediaMemory, answers: int) -> None:
        self._files = files
        self._memory = memory
        self._answers = answers
        self._kept = 0
        self._released = False

    async def prepare(
        self, parts: Sequence[MediaPart], kinds: Collection[str], reader: MediaPreprocessor | None
    ) -> Sequence[Prepared]:
        """What a model takes of each, in order. Each is a task of its own: a request with many leaves room for others
        between them."""
        self._files.check(parts, kinds)
        assert reader is not None  # otherwise the files would have been refused
        tasks = [asyncio.create_task(self._prepare(part, reader)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def release(self) -> None:
        """Safe more than once."""
        self._released = True
        if self._kept:
            size, self._kept = self._kept, 0
            self._memory.forget(size)

    async def _prepare(self, part: MediaPart, reader: MediaPreprocessor) -> Prepared:
        prepared = await self._files.prepare(part, reader)
        size = self._answers * sum(array.nbytes for array in prepared.tensors.values())
        if not self._released:
            self._memory.keep(size, self._kept)
            self._kept += size
        return prepared


async def _run(pool: Executor, work: Callable[[], T], *shares: Share) -> T:
    """Run `work` on a thread. A thread cannot be stopped: what it holds is given back when it has ended, even if
    nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    future = pool.submit(work)
    for share in shares:
        share.hold()

    def ended(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has gone
            loop.call_soon_threadsafe(drop)

    def drop() -> None:
        for share in shares:
            share.drop()

    future.add_done_callback(ended)
    return await asyncio.wrap_future(future)


def about(part: MediaPart, work: Callable[[], T]) -> T:
    """What `work` gives; a refusal says which part of the request it is about."""
    try:
        return work()
    except MediaRefused as error:
        raise _named(part, error) from error


def _named(part: MediaPart, error: MediaRefused) -> MediaRefused:
    return MediaRefused(f"{part.param}: {error.message}.", param=part.param)
