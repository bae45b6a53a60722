"""Audio of transcription requests: fetched and decoded within the memory budget of all media."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pytest

from media.test_audio import encoded_tone
from media.web import Web, running_web
from millstream.errors import EngineBusy, MediaRefused
from millstream.media.addresses import system_lookup
from millstream.media.limits import MediaLimits
from millstream.media.long_audio import WORKING_BYTES
from millstream.service.media import audio_files
from millstream.service.media.audio_files import AudioFiles
from millstream.service.media.memory import MediaMemory
from support.audio_files import tone, wav

WAV = wav(tone(440, 2))


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def files(pool: Executor, limit: int = 2**30, **limits: object) -> tuple[AudioFiles, MediaMemory]:
    memory = MediaMemory(limit, image_decodes=2, av_decodes=2)
    made = MediaLimits(timeout=60.0, audio_seconds=14_400, allow_private=True, **limits)  # type: ignore[arg-type]
    return AudioFiles(made, memory, pool, pool, system_lookup), memory


def test_bytes_and_data_uris_are_counted_until_released(pool: Executor) -> None:
    async def check() -> None:
        subject, memory = files(pool)
        uri = "data:audio/wav;base64," + base64.b64encode(WAV).decode()
        first, second = await asyncio.gather(subject.decode(WAV), subject.decode(uri))
        np.testing.assert_array_equal(first.samples, second.samples)
        assert len(first.samples) == 32_000
        await asyncio.sleep(0)
        assert memory.used == memory.prepared == 2 * 32_000 * 4
        for audio in (first, first, second):
            audio.release()
        assert memory.used == memory.prepared == 0

    asyncio.run(check())


def test_a_url_with_the_guards_of_other_media(pool: Executor) -> None:
    async def check(web: Web) -> None:
        url = web.body("/a.mp3", encoded_tone("mp3", "libmp3lame"), kind="audio/mpeg")
        subject, memory = files(pool)
        audio = await subject.decode(url)
        assert len(audio.samples) > 15_000
        audio.release()
        guarded = AudioFiles(MediaLimits(), memory, pool, pool, system_lookup)
        with pytest.raises(MediaRefused, match=r"^file: .*not a public"):
            await guarded.decode(url)
        small, _ = files(pool, file_bytes=100, bytes_option="--audio-bytes")
        with pytest.raises(MediaRefused, match=r"takes at most 100 \(--audio-bytes\)"):
            await small.decode(url)
        assert memory.used == 0

    with running_web() as web:
        asyncio.run(check(web))


@pytest.mark.parametrize("data", [WAV, encoded_tone("mp3", "libmp3lame", seconds=2)])
def test_audio_that_is_too_long_for_the_memory(pool: Executor, data: bytes) -> None:
    async def check() -> None:
        subject, memory = files(pool, limit=WORKING_BYTES + 16_000 * 5)
        with pytest.raises(MediaRefused, match=r"the audio is over 1 s long; more does not fit .*--media-memory"):
            await subject.decode(data)
        await asyncio.sleep(0)
        assert memory.used == 0

    asyncio.run(check())


def test_a_file_that_is_longer_than_it_looks_is_decoded_again(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        subject, _ = files(pool)
        audio = await subject.decode(encoded_tone("flac", "flac", seconds=3))
        assert len(audio.samples) == 48_000

    monkeypatch.setattr(audio_files, "likely_seconds", lambda *_: 1.0)
    asyncio.run(check())


def test_what_others_hold_makes_a_request_wait_or_fail(pool: Executor) -> None:
    async def check() -> None:
        subject, memory = files(pool, limit=WORKING_BYTES * 2)
        memory.add_prepared(memory.limit, 0)
        with pytest.raises(EngineBusy, match="--media-memory"):
            await subject.decode(WAV)
        memory.remove_prepared(memory.limit)
        first = await subject.decode(WAV)
        assert memory.used == first.samples.nbytes

    asyncio.run(check())


def test_bad_files_free_what_they_held(pool: Executor) -> None:
    async def check() -> None:
        subject, memory = files(pool)
        for bad, words in ((b"", "is empty"), (b"text", "not audio"), (WAV[:-99], "truncated"), ("nowhere", "send an")):
            with pytest.raises(MediaRefused, match=rf"^file: .*{words}") as refused:
                await subject.decode(bad)
            assert refused.value.param == "file"
        await asyncio.sleep(0)
        assert memory.used == 0

    asyncio.run(check())


def test_samples_are_taken_as_they_are(pool: Executor) -> None:
    async def check() -> None:
        subject, memory = files(pool)
        samples = tone(440, 1)
        audio = await subject.decode(samples)
        assert audio.samples is samples and memory.used == 0
        audio.release()

    asyncio.run(check())
