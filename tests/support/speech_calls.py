"""Speech through the service of a running server, without HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from millstream.server import MillServer
from millstream.speech_types import Samples, SpeechRequest
from support.server import RunningServer


def say(server: RunningServer, text: str, model: str = "", **options: Any) -> Samples:
    """The whole sound of a text."""

    async def run(mill: MillServer) -> bytes:
        speech = await mill.mill.services.speech.start(SpeechRequest(model, text, **options))
        return b"".join([samples async for samples in speech])

    found = server.call(lambda mill: run(mill))
    return np.frombuffer(found, np.float32)


def say_soon(server: RunningServer, text: str, model: str = "") -> Any:
    """A task on the server's loop: await it with `outcome_of`."""

    async def run(mill: MillServer) -> bytes:
        speech = await mill.mill.services.speech.start(SpeechRequest(model, text))
        return b"".join([samples async for samples in speech])

    return server.call(lambda mill: asyncio.ensure_future(run(mill)))


def outcome_of(server: RunningServer, task: Any) -> BaseException | bytes:
    """What a task of `say_soon` returned or raised."""

    async def wait() -> BaseException | bytes:
        (found,) = await asyncio.gather(task, return_exceptions=True)
        return found  # type: ignore[no-any-return]

    result: BaseException | bytes = server.call(lambda mill: wait())
    return result
