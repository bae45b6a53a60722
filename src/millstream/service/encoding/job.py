"""Runs one request on an encoder's engine, and collects its vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millstream.engine.jobs.messages import Encode, Encoded, Vectors
from millstream.engine.messages import Failed, Started
from millstream.service.engine_client import EngineClient
from millstream.service.inbox import failure
from millstream.service.unread_output import UnreadOutput

Matrix = NDArray[np.float32]


class Job:
    """A request that the engine has accepted. The caller must `collect` it or `cancel` it."""

    def __init__(
        self, engine: EngineClient, submit: Encode, unread: UnreadOutput, on_started: Callable[[Started], None]
    ) -> None:
        """`on_started` is called when the first batch begins that has some of its inputs. Raises `EngineBusy` or
        `EngineGone` if the engine does not accept it."""
        self._engine = engine
        self._request_id = submit.request_id
        self._count = len(submit.inputs)
        self._inbox = engine.open_inbox([submit], unread, on_started=on_started)

    async def collect(self) -> Matrix:
        """One row per input. If this is cancelled, the engine drops what is left before its next batch."""
        try:
            return await self._collect()
        finally:
            self._engine.close_inbox([self._request_id], self._inbox)

    async def _collect(self) -> Matrix:
        result: Matrix | None = None
        while True:
            for event in await self._inbox.take():
                match event:
                    case Vectors():
                        if result is None:
                            result = np.empty((self._count, event.width), np.float32)
                        vectors = np.frombuffer(event.values, np.float32).reshape(-1, event.width)
                        result[list(event.inputs)] = vectors
                    case Encoded():
                        assert result is not None
                        return result
                    case Failed():
                        raise failure(event)


def token_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
