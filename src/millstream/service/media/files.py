"""Fetches and preprocesses the media of a request, without blocking other prompts.

Blocking work runs on two pools: decoding of images on the CPU pool, fetches and decoder processes on the network pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from millstream.errors import MediaRefused, UnsupportedParameter
from millstream.media.addresses import Lookup
from millstream.media.limits import MediaLimits
from millstream.media.port import MediaPreprocessor, PreparedMedia
from millstream.media.sources import is_local, read_source
from millstream.service.media.memory import MediaMemory, Reservation
from millstream.types import MediaPart

T = TypeVar("T")

MAX_IMAGE_DECODES = 2
"""Images decoded at once: half of the CPU pool's threads, so that text prompts need not wait for images."""
MAX_AV_DECODES = 2
"""Videos and audio files decoded at once: most of them have a child process each, with threads of its own."""

_KIND_NAMES = {"image": "images", "audio": "audio", "video": "video"}


class MediaFiles:
    """`network` waits for other machines and decoder processes; `pool` does local work; `lookup` resolves hosts."""

    def __init__(
        self, limits: MediaLimits, memory: MediaMemory, pool: Executor, network: Executor, lookup: Lookup
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._pool = pool
        self._network = network
        self._lookup = lookup

    def for_request(self, copies: int) -> RequestMedia:
        """`copies`: how many generations the engine runs for the request; each may be sent the media."""
        return RequestMedia(self, self._memory, copies)

    def check(self, parts: Sequence[MediaPart], kinds: Collection[str]) -> None:
        """Before anything is fetched: raises if the model does not take these `kinds` of media, or not so many."""
        for part in parts:
            if part.kind not in kinds:
                accepted = " and ".join(["text", *(_KIND_NAMES[kind] for kind in sorted(kinds))])
                raise UnsupportedParameter(
                    f"This model takes {accepted} only; {part.param} is of kind {part.kind}.", param=part.param
                )
        if len(parts) > self._limits.count:
            raise MediaRefused(
                f"the request has {len(parts)} media files; this server takes at most {self._limits.count} "
                "(--media-count)",
                param="messages",
            )
        self._memory.check()

    async def prepare(self, part: MediaPart, preprocessor: MediaPreprocessor) -> PreparedMedia:
        """Fetch and preprocess one file. Its bytes are held no longer than that."""
        local = is_local(part.source)
        data_uri = local and part.source[:5].lower() == "data:"
        max_bytes = min(self._limits.file_bytes, len(part.source)) if data_uri else None
        memory = self._memory
        size = min(max_bytes or self._limits.file_bytes, memory.limit)
        with await memory.reserve(memory.fetches, size) as reservation:
            work = partial(read_source, part.source, self._limits, self._lookup)
            data = await run_reserved(
                self._pool if local else self._network, partial(_for_part, part, work), reservation
            )
            reservation.shrink(len(data))
            return await self._decode(part, data, preprocessor, reservation)

    async def _decode(
        self, part: MediaPart, data: bytes, preprocessor: MediaPreprocessor, file: Reservation
    ) -> PreparedMedia:
        measure = partial(preprocessor.decoding_bytes, part.kind, data)
        size = await run_reserved(self._pool, partial(_for_part, part, measure), file)
        memory = self._memory
        is_image = part.kind == "image"
        try:
            reservation = await memory.reserve(memory.image_decodes if is_image else memory.av_decodes, size)
        except MediaRefused as error:
            raise _naming(part, error) from error
        with reservation:
            work = partial(_for_part, part, partial(preprocessor.preprocess, part.kind, data))
            # Videos and audio wait for a child process: on the CPU pool they would block text prompts.
            return await run_reserved(self._pool if is_image else self._network, work, reservation, file)


class RequestMedia:
    """The media of one request, and the memory that they hold until it ends: call `release` then."""

    def __init__(self, files: MediaFiles, memory: MediaMemory, copies: int) -> None:
        self._files = files
        self._memory = memory
        self._copies = copies
        self._prepared_bytes = 0
        self._released = False

    async def prepare(
        self, parts: Sequence[MediaPart], kinds: Collection[str], preprocessor: MediaPreprocessor | None
    ) -> Sequence[PreparedMedia]:
        """The preprocessed media, in order. Each file is a task of its own, so that other requests get their turn
        between the files of a request with many."""
        self._files.check(parts, kinds)
        assert preprocessor is not None  # otherwise `check` would have raised
        tasks = [asyncio.create_task(self._prepare(part, preprocessor)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def release(self) -> None:
        """May be called more than once."""
        self._released = True
        if self._prepared_bytes:
            size, self._prepared_bytes = self._prepared_bytes, 0
            self._memory.remove_prepared(size)

    async def _prepare(self, part: MediaPart, preprocessor: MediaPreprocessor) -> PreparedMedia:
        prepared = await self._files.prepare(part, preprocessor)
        size = self._copies * sum(array.nbytes for array in prepared.tensors.values())
        if not self._released:
            self._memory.add_prepared(size, self._prepared_bytes)
            self._prepared_bytes += size
        return prepared


async def run_reserved(pool: Executor, work: Callable[[], T], *reservations: Reservation) -> T:
    """Run `work` on a thread. A thread cannot be stopped, so it holds the reservations until it has ended, even if the
    caller was cancelled."""
    loop = asyncio.get_running_loop()
    future = pool.submit(work)
    for reservation in reservations:
        reservation.hold()

    def ended(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped
            loop.call_soon_threadsafe(drop)

    def drop() -> None:
        for reservation in reservations:
            reservation.drop()

    future.add_done_callback(ended)
    return await asyncio.wrap_future(future)


def _for_part(part: MediaPart, work: Callable[[], T]) -> T:
    """Run `work`; if it raises `MediaRefused`, name the part of the request."""
    try:
        return work()
    except MediaRefused as error:
        raise _naming(part, error) from error


def _naming(part: MediaPart, error: MediaRefused) -> MediaRefused:
    return MediaRefused(f"{part.param}: {error.message}.", param=part.param)
