"""The service as the dialects see it: see `ports.TextService`."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from millstream.config import ModelSpec
from millstream.engine.messages import Submit
from millstream.errors import EngineBusy, EngineGone
from millstream.service.choice import Choice
from millstream.service.entry import ReadyModel
from millstream.service.generation import TextGeneration
from millstream.service.hub import ModelHub
from millstream.service.inbox import Inbox
from millstream.service.media_files import MediaFiles
from millstream.service.metrics import Metrics, RequestTimer
from millstream.service.prepare import ReadPrompt, prepare
from millstream.types import ChatPrompt, GenerationRequest, ModelCard

log = logging.getLogger(__name__)


class MillstreamService:
    def __init__(self, hub: ModelHub, pool: Executor, files: MediaFiles, metrics: Metrics) -> None:
        self._hub = hub
        self._pool = pool
        self._files = files
        self._metrics = metrics
        self._ids = itertools.count(1)

    def models(self) -> Sequence[ModelCard]:
        return self._hub.cards()

    def healthy(self) -> dict[str, str]:
        return {card.name: card.state for card in self._hub.cards()}

    def render_metrics(self) -> tuple[bytes, str]:
        return self._metrics.render()

    async def load(self, name: str) -> ModelCard:
        return await self._hub.load(name)

    async def unload(self, name: str) -> ModelCard:
        return await self._hub.unload(name)

    def clear_cache(self, name: str) -> ModelCard:
        return self._hub.clear_cache(name)

    async def start(self, request: GenerationRequest) -> TextGeneration:
        while True:
            async with self._hub.use(request.model) as model:
                try:
                    return await self._start_on(model, with_defaults(request, model.spec))
                except EngineGone:
                    log.debug("%s: its engine ended before it took the request", model.name)
            # Nothing of the request has run. Once the hub knows, it has another engine for it or says why not.
            await model.engine.wait_gone()

    async def _start_on(self, model: ReadyModel, request: GenerationRequest) -> TextGeneration:
        timer = RequestTimer(self._metrics, model.name)
        self._check_room(model, request)
        prompts = await prepare(self._pool, self._files, model, request)
        read = sum(len(prompt.tokens) for prompt in prompts)
        timer.prepared(read, sum(len(prompt.media) for prompt in prompts))
        submits = [submit for prompt in prompts for submit in self._submits(model, request, prompt)]
        continues = not isinstance(request.prompts[0], ChatPrompt)
        choices = [
            Choice(index, submit.request_id, model.tokenizer, request.stop, continues=continues)
            for index, submit in enumerate(submits)
        ]
        inbox = Inbox()
        try:
            model.engine.submit(submits, inbox)
        except EngineBusy as error:
            self._metrics.rejected.labels(model.name, error.code).inc()
            raise
        return TextGeneration(model.name, model.engine, inbox, choices, read, timer)

    def _check_room(self, model: ReadyModel, request: GenerationRequest) -> None:
        """A full engine says so before images are fetched and prompts prepared for nothing."""
        try:
            model.engine.admission.check(len(request.prompts) * request.n)
        except EngineBusy as error:
            self._metrics.rejected.labels(model.name, error.code).inc()
            raise

    def _submits(self, model: ReadyModel, request: GenerationRequest, prompt: ReadPrompt) -> list[Submit]:
        """One engine request for each answer. Answers to one prompt differ by their seed."""
        room = model.facts.context_length - len(prompt.tokens)
        seed = request.sampling.seed if request.seeded else secrets.randbits(32)
        return [
            Submit(
                request_id=next(self._ids),
                prompt=prompt.tokens,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                sampling=replace(request.sampling, seed=(seed + number) & 0xFFFFFFFFFFFFFFFF),
                stop_tokens=frozenset() if request.ignore_eos else model.tokenizer.eos_ids,
                logprobs=request.logprobs,
                contents=prompt.contents,
                media=prompt.media,
            )
            for number in range(request.n)
        ]


def with_defaults(request: GenerationRequest, spec: ModelSpec) -> GenerationRequest:
    """What the client left to the server, as the model's entry in the configuration has it."""
    sampling = {name: value for name, value in spec.sampling if name in request.unset}
    max_tokens = spec.max_tokens if request.max_tokens is None else request.max_tokens
    return replace(request, sampling=replace(request.sampling, **sampling), max_tokens=max_tokens)  # type: ignore[arg-type]
