"""The response of embeddings, reranking and scores: work of an encoder, then its result in JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from millstream.api.connected import ComputedResponse

Result = TypeVar("Result")


class EncodedResponse(ComputedResponse, Generic[Result]):
    """A client that leaves ends the work."""

    def __init__(
        self,
        work: Callable[[], Awaitable[Result]],
        render: Callable[[Result], bytes],
        *,
        write_timeout: float,
        is_large: Callable[[Result], bool] = lambda result: False,
    ) -> None:
        """`is_large`: whether rendering takes too long for the event loop."""
        super().__init__(write_timeout=write_timeout)
        self._work = work
        self._render = render
        self._is_large = is_large

    async def compute(self) -> bytes:
        result = await self._work()
        return await self.on_thread(lambda: self._render(result)) if self._is_large(result) else self._render(result)
