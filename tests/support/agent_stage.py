"""A server that plays a model for real clients: real HTTP and dialects over answers that a function makes."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from millstream.api.app import DEFAULT_DIALECT, create_app
from millstream.api.http1.connections import Connections
from millstream.api.http1.limits import HttpLimits
from millstream.api.http1.protocol import LimitedProtocol
from millstream.errors import NotFound
from millstream.model_facts import ModelCard
from millstream.service.ports import DeltaSink
from millstream.types import CallDelta, ChatPrompt, Delta, FinishReason, GenerationRequest, Sampling, Usage
from support.services import services

CARD = ModelCard("org/player", created=1, state="ready", context_length=65536, capabilities=("completion", "tools"))
Answer = Callable[[GenerationRequest], Sequence[Delta]]


class PlayedGeneration:
    def __init__(self, model: str, deltas: Sequence[Delta]) -> None:
        self.model = model
        self.sampling = Sampling()
        self.usage = Usage()
        self._deltas = deltas

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        for delta in self._deltas:
            yield [delta]
        self.usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3)

    def deliver_to(self, sink: DeltaSink) -> None:
        """It is iterated only."""

    def cancel(self, outcome: str = "cancelled") -> None:
        pass


@dataclass
class Player:
    """Both services. `answer` makes the deltas of each request."""

    answer: Answer = lambda request: [Delta(0, "Hello", finish_reason=FinishReason.STOP)]
    cards: Sequence[ModelCard] = (CARD,)
    requests: list[GenerationRequest] = field(default_factory=list)

    async def start(self, request: GenerationRequest) -> PlayedGeneration:
        self.requests.append(request)
        return PlayedGeneration(request.model or self.cards[0].name, self.answer(request))

    async def count_tokens(self, request: GenerationRequest) -> int:
        return 7

    def models(self) -> Sequence[ModelCard]:
        return self.cards

    def model(self, name: str) -> ModelCard:
        for card in self.cards:
            if name in ("", card.name, *card.aliases):
                return card
        raise NotFound(f"There is no model {name!r}.", param="model")

    def healthy(self) -> dict[str, str]:
        return {card.name: card.state for card in self.cards}


def calls_then_says(name: str, arguments: dict[str, Any], text: str) -> Answer:
    """Calls a tool where a request offers it and no result of it is there yet. Then says something."""

    def answer(request: GenerationRequest) -> Sequence[Delta]:
        offered = request.tools.schemas if request.tools else {}
        if name not in offered or tool_results(request):
            return [Delta(0, text), Delta(0, finish_reason=FinishReason.STOP)]
        call = CallDelta(0, "call_1", name, json.dumps(arguments))
        return [Delta(0, reasoning="A look will help."), Delta(0, calls=(call,), finish_reason=FinishReason.TOOL_CALLS)]

    return answer


def tool_results(request: GenerationRequest) -> list[str]:
    """The texts of all tool messages of the prompt."""
    prompt = request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    contents = [message["content"] for message in prompt.messages if message["role"] == "tool"]
    return [content if isinstance(content, str) else json.dumps(content, default=str) for content in contents]


@contextmanager
def playing(player: Player, **settings: Any) -> Iterator[str]:
    """Serves it and yields the URL. `settings` are those of the app."""
    app = create_app(services(player), body_limit=2**22, **settings)
    limits = HttpLimits()
    protocol = functools.partial(
        LimitedProtocol, limits=limits, connections=Connections(limits), error_format=DEFAULT_DIALECT.errors
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()
