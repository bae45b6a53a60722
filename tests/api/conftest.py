"""A scripted service behind a real uvicorn, so that the tests go over a socket."""

from __future__ import annotations

import asyncio
import functools
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx
import openai
import pytest
import uvicorn

from millstream.api.app import DEFAULT_DIALECT, create_app, is_websocket
from millstream.api.http1.connections import Connections
from millstream.api.http1.limits import HttpLimits
from millstream.api.http1.protocol import LimitedProtocol, TakeTurn
from millstream.errors import NotFound
from millstream.model_facts import ModelCard
from millstream.service.ports import DeltaSink
from millstream.service.turnstile import enter_new
from millstream.types import Delta, FinishReason, GenerationRequest, Sampling, Usage
from support.services import services

WAIT = 60
BODY_LIMIT = 64 * 1024
LIMITS = HttpLimits()
Step = Sequence[Delta] | Exception


class ScriptedGeneration:
    """Yields batches from its queue. Events tell the test thread what happened to it."""

    def __init__(self, model: str, steps: Sequence[Step], *, ends: bool) -> None:
        self.model = model
        self.sampling = Sampling()
        self.usage = Usage()
        self.cancelled = threading.Event()
        self.left_early = False
        self.outcome: str | None = None
        self.waiting = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[Step | None] = asyncio.Queue()
        self._ended = False
        self._sink: DeltaSink | None = None
        for step in [*steps, *([None] if ends else [])]:
            self._steps.put_nowait(step)

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        while True:
            if self._steps.empty():
                self.waiting.set()
            step = await self._steps.get()
            if step is None:
                self.usage = Usage(
                    prompt_tokens=7,
                    completion_tokens=5,
                    cached_tokens=3,
                    accepted_prediction_tokens=2,
                    rejected_prediction_tokens=1,
                )
                self._ended = True
                return
            if isinstance(step, Exception):
                raise step
            yield step

    def deliver_to(self, sink: DeltaSink) -> None:
        self._sink = sink

    def cancel(self, outcome: str = "cancelled") -> None:
        if not self.cancelled.is_set():
            self.left_early = not self._ended
            self.outcome = outcome
        self.cancelled.set()

    def push(self, step: Step | None) -> None:
        """Called from the test thread. None ends the generation."""
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)

    def deliver(self, step: Sequence[Delta]) -> bool:
        """Called from the test thread: give the sink a step, if it is ready. Returns whether it was."""

        async def deliver() -> bool:
            assert self._sink is not None
            if not self._sink.ready():
                return False
            self._sink.deliver(step)
            return True

        return asyncio.run_coroutine_threadsafe(deliver(), self._loop).result(WAIT)


@dataclass
class ScriptedService:
    steps: Sequence[Step] = ((Delta(0, "Hello"),), (Delta(0, " world", finish_reason=FinishReason.STOP),))
    ends: bool = True
    """False: after the steps the generation waits for `push`."""
    start_error: Exception | None = None
    counted: int = 42
    """What `count_tokens` returns."""
    hold_start: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)
    generations: queue.Queue[ScriptedGeneration] = field(default_factory=queue.Queue)
    start_entered: threading.Event = field(default_factory=threading.Event)
    start_cancelled: threading.Event = field(default_factory=threading.Event)
    loads: list[str] = field(default_factory=list)
    kept: list[tuple[str, float | None]] = field(default_factory=list)
    """Calls of `keep_loaded`."""
    cards: Sequence[ModelCard] = (
        ModelCard("org/tiny", created=11, state="ready", context_length=2048),
        ModelCard("plain", created=12, state="loading"),
    )

    def models(self) -> Sequence[ModelCard]:
        return self.cards

    def model(self, name: str) -> ModelCard:
        found = (card for card in self.cards if not name or name in (card.name, *card.aliases))
        if (card := next(found, None)) is None:
            raise NotFound(f"the model {name!r} is not served here.", param="model")
        return card

    async def load(self, name: str) -> ModelCard:
        self.loads.append(name)
        return self.model(name)

    def keep_loaded(self, name: str, seconds: float | None) -> ModelCard:
        self.kept.append((name, seconds))
        return self.model(name)

    def healthy(self) -> dict[str, str]:
        return {card.name: card.state for card in self.cards}

    def render_metrics(self) -> tuple[bytes, str]:
        return b"millstream_up 1\n", "text/plain; version=1.0.0; charset=utf-8"

    async def start(self, request: GenerationRequest) -> ScriptedGeneration:
        self.requests.append(request)
        self.start_entered.set()
        if self.hold_start:
            try:
                await asyncio.Event().wait()
            finally:
                self.start_cancelled.set()
        if self.start_error is not None:
            raise self.start_error
        generation = ScriptedGeneration(request.model or "org/tiny", self.steps, ends=self.ends)
        self.generations.put(generation)
        return generation

    async def count_tokens(self, request: GenerationRequest) -> int:
        self.requests.append(request)
        if self.start_error is not None:
            raise self.start_error
        return self.counted

    def generation(self) -> ScriptedGeneration:
        return self.generations.get(timeout=WAIT)


class Stage:
    """The service of the shared server: delegates to the current test's service, so one app serves all tests."""

    def __init__(self) -> None:
        self.service = ScriptedService()

    def models(self) -> Sequence[ModelCard]:
        return self.service.models()

    def model(self, name: str) -> ModelCard:
        return self.service.model(name)

    async def load(self, name: str) -> ModelCard:
        return await self.service.load(name)

    def keep_loaded(self, name: str, seconds: float | None) -> ModelCard:
        return self.service.keep_loaded(name, seconds)

    def healthy(self) -> dict[str, str]:
        return self.service.healthy()

    def render_metrics(self) -> tuple[bytes, str]:
        return self.service.render_metrics()

    async def start(self, request: GenerationRequest) -> ScriptedGeneration:
        return await self.service.start(request)

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self.service.count_tokens(request)


@contextmanager
def running(
    app: object, *, limits: HttpLimits = LIMITS, take_turn: TakeTurn = enter_new, **options: object
) -> Iterator[int]:
    """Runs a real uvicorn in a thread, with our protocol, and yields its port. The socket listens before it runs, so no
    test has to wait."""
    protocol = functools.partial(
        LimitedProtocol,
        limits=limits,
        connections=Connections(limits),
        error_format=DEFAULT_DIALECT.errors,
        is_websocket=is_websocket,
        take_turn=take_turn,
    )
    options.setdefault("http", protocol)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", **options)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(WAIT)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture(scope="session")
def stage() -> Stage:
    return Stage()


@pytest.fixture(scope="session")
def _port(stage: Stage) -> Iterator[int]:
    with running(create_app(services(stage), body_limit=BODY_LIMIT), timeout_keep_alive=60) as port:
        yield port


@pytest.fixture
def port(_port: int, stage: Stage, service: ScriptedService) -> int:
    stage.service = service
    return _port


@pytest.fixture(scope="module")
def open_client(stage: Stage) -> Iterator[Callable[..., httpx.Client]]:
    """Starts an app with other settings that serves the tests of a module, and gives a client for it."""
    with ExitStack() as stack:

        def start(**settings: object) -> httpx.Client:
            port = stack.enter_context(running(create_app(services(stage), **settings), timeout_keep_alive=60))  # type: ignore[arg-type]
            return stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT))

        yield start


@pytest.fixture(scope="session")
def serve_module() -> Callable[..., AbstractContextManager[int]]:
    """As `serve`, for servers that several tests share."""
    return running


@pytest.fixture
def serve() -> Callable[..., AbstractContextManager[int]]:
    """For tests that need another app or server than the shared one."""
    return running


@pytest.fixture(scope="session")
def _http(_port: int) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{_port}", timeout=WAIT, verify=False) as client:
        yield client


@pytest.fixture
def http(_http: httpx.Client, port: int) -> httpx.Client:
    return _http


@pytest.fixture(scope="session")
def _client(_port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{_port}/v1", api_key="-", max_retries=0, timeout=WAIT) as client:
        yield client


@pytest.fixture
def client(_client: openai.OpenAI, port: int) -> openai.OpenAI:
    return _client
