"""Which rows' beginnings are kept for later requests, and which requests begin with one. Pure, as the scheduler is."""

from __future__ import annotations

from millstream.engine.backend import Keep, Prefill
from millstream.engine.prefix import PrefixIndex
from millstream.engine.request import Request


class Keeper:
    """Beside a scheduler. A prompt is kept when its row joins the batch, so that others who come find it, and
    with its answer when the row ends, so that the next turn of a conversation does."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._joined: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._forgotten: list[int] = []

    @property
    def has_orders(self) -> bool:
        return bool(self._forgotten)

    def begin(self, request: Request) -> None:
        """The last token of a prompt is always read anew: it is the first input of the row."""
        if request.submit.prompt_logprobs is not None:
            return  # all of the prompt must be computed
        request.hit = self._index.match(request.submit.prompt[:-1], request.submit.contents)
        request.prefilled = request.hit.tokens

    def was_read(self, request: Request, chunk: Prefill) -> None:
        if chunk.reuse:
            self._index.release(request.hit)
        if chunk.joins:
            self._joined[request.request_id] = request

    def ended(self, request: Request) -> None:
        """A row has left the batch, or will in the next step."""
        if self._joined.pop(request.request_id, None) is None:
            self._ended.append(request)

    def orders(self) -> tuple[tuple[Keep, ...], tuple[int, ...]]:
        """What the backend has to keep and to forget in the next step."""
        keep: list[Keep] = []
        forget, self._forgotten = self._forgotten, []
        # The last token that a row gave may not have been read by it.
        for request in self._ended:
            self._insert(request, (*request.submit.prompt, *request.answer[:-1]), keep, forget)
        for request in self._joined.values():
            self._insert(request, request.submit.prompt[:-1], keep, forget)
        self._ended.clear()
        self._joined.clear()
        return tuple(keep), tuple(forget)

    def forget(self) -> None:
        """Between two steps: nobody has a hit that is not restored yet."""
        self._forgotten += self._index.clear()

    def clear(self) -> None:
        """The backend has lost what it kept."""
        self._index.clear()
        self._forgotten.clear()
        self._joined.clear()
        self._ended.clear()

    def _insert(self, request: Request, tokens: tuple[int, ...], keep: list[Keep], forget: list[int]) -> None:
        kept = self._index.insert(tokens, request.submit.contents)
        if kept.handles:
            keep.append(Keep(request.request_id, kept.first, self._index.block, kept.handles))
        forget += kept.evicted
