"""Audio to transcribe: fetches and decodes one file without blocking the event loop, within the memory budget of all
media.

Its limits are its own: hours of audio are normal here, where a chat takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from millstream.errors import MediaRefused
from millstream.media.addresses import Lookup
from millstream.media.limits import MediaLimits
from millstream.media.long_audio import affordable_seconds, likely_seconds, long_audio_bytes, open_long_audio
from millstream.media.sources import is_local, read_source
from millstream.service.media.files import run_reserved
from millstream.service.media.memory import MediaMemory, Reservation
from millstream.speech_types import Samples

PARAM = "file"
T = TypeVar("T")


class DecodedAudio:
    """Samples at `SPEECH_RATE`, and the memory that they are counted for: call `release` when the request ends."""

    def __init__(self, samples: Samples, release: Callable[[], None] = lambda: None) -> None:
        self.samples = samples
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """May be called more than once."""
        release, self._release = self._release, None
        if release is not None:
            release()


class AudioFiles:
    """`network` waits for other machines and decoder processes; `pool` does local work; `lookup` resolves hosts.
    `limits` are those of audio to transcribe."""

    def __init__(
        self, limits: MediaLimits, memory: MediaMemory, pool: Executor, network: Executor, lookup: Lookup
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._pool = pool
        self._network = network
        self._lookup = lookup

    async def decode(self, source: bytes | str | Samples) -> DecodedAudio:
        """`source`: as in `TranscriptionRequest.audio`. Raises `MediaRefused` if it is no audio that can be read, and
        `EngineBusy` if too much memory is in use."""
        if isinstance(source, str):
            self._memory.check()
            return await self._fetch(source)
        if isinstance(source, bytes):
            self._memory.check()
            return await self._decode(source)
        return DecodedAudio(source)

    async def _fetch(self, source: str) -> DecodedAudio:
        memory = self._memory
        local = is_local(source)
        size = min(self._limits.file_bytes, memory.limit)
        if source[:5].lower() == "data:":
            size = min(size, len(source))
        with await memory.reserve(memory.fetches, size) as reservation:
            work = partial(_naming, partial(read_source, source, self._limits, self._lookup))
            data = await run_reserved(self._pool if local else self._network, work, reservation)
            reservation.shrink(len(data))
            return await self._decode(data, reservation)

    async def _decode(self, data: bytes, *held: Reservation) -> DecodedAudio:
        """`held`: the memory of `data`, if it is counted here. An upload is counted where it was received."""
        if not data:
            raise MediaRefused("file: the audio file is empty; send one that has samples.", param=PARAM)
        seconds = await run_reserved(self._pool, partial(_naming, partial(likely_seconds, data, self._limits)), *held)
        memory = self._memory
        most = min(self._limits.audio_seconds, affordable_seconds(memory.limit))
        seconds = min(seconds, most)
        while True:
            with await memory.reserve(memory.av_decodes, min(long_audio_bytes(seconds), memory.limit)) as reservation:
                work = partial(_naming, partial(open_long_audio, data, self._limits, seconds))
                samples = await run_reserved(self._network, work, reservation, *held)
            if samples is not None:
                return self._hold(samples)
            if seconds == most:
                raise MediaRefused(
                    f"file: the audio is over {seconds:.0f} s long; more does not fit into the memory that this server "
                    f"has for media (--media-memory, {memory.limit / 2**20:.0f} MiB). Split it into parts.",
                    param=PARAM,
                )
            seconds = most

    def _hold(self, samples: Samples) -> DecodedAudio:
        size = samples.nbytes
        try:
            self._memory.add_prepared(size, 0)
        except MediaRefused as error:
            raise MediaRefused(f"file: {error.message}", param=PARAM) from error
        return DecodedAudio(samples, partial(self._memory.remove_prepared, size))


def _naming(work: Callable[[], T]) -> T:
    """Run `work`; if it raises `MediaRefused`, name the parameter."""
    try:
        return work()
    except MediaRefused as error:
        raise MediaRefused(f"{PARAM}: {error.message}.", param=PARAM) from error
