"""The generation use case: from a request of any dialect to a running generation. See `ports.GenerationService`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace

from millstream.config import ModelSpec
from millstream.engine.generation.messages import Generate
from millstream.errors import EngineBusy, EngineGone
from millstream.service.generation.best_of import BestOf
from millstream.service.generation.choice import Choice
from millstream.service.generation.generation import TextGeneration
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.merge_tokens import merge_tokens
from millstream.service.generation.metrics import GenerationMetrics, RequestTimer
from millstream.service.generation.model import GenerationModel
from millstream.service.generation.output_parsing import OutputParsing, check_parsings, plan_parsings
from millstream.service.generation.prepare import PreparedPrompt, prepare, prepare_grammar
from millstream.service.generation.prompt_echo import PromptEcho, prompt_logprobs
from millstream.service.hub import ModelHub
from millstream.service.inbox import Inbox
from millstream.service.media.files import MediaFiles, RequestMedia
from millstream.service.ports import Generation
from millstream.service.unread_output import UnreadOutput
from millstream.types import ChatPrompt, GenerationRequest

log = logging.getLogger(__name__)


class TextGenerator:
    def __init__(
        self,
        hub: ModelHub,
        pool: Executor,
        files: MediaFiles,
        grammars: GrammarChecks,
        unread: UnreadOutput,
        metrics: GenerationMetrics,
    ) -> None:
        self._hub = hub
        self._pool = pool
        self._files = files
        self._grammars = grammars
        self._unread = unread
        self._metrics = metrics
        self._ids = itertools.count(1)

    async def start(self, request: GenerationRequest) -> Generation:
        while True:
            async with self._hub.use(request.model, GenerationModel) as model:
                try:
                    return await self._start_on(model, with_defaults(request, model.spec))
                except EngineGone:
                    log.debug("%s: the engine ended before it took the request", model.name)
            # Nothing of the request has run. Once the hub knows, it restarts the engine or says why not.
            await model.engine.wait_gone()

    async def _start_on(self, model: GenerationModel, request: GenerationRequest) -> Generation:
        tries = request.best_of or request.n
        with self._counting_refusals(model):
            # Before images are fetched and prompts prepared for nothing.
            model.engine.admission.check(len(request.prompts) * tries)
            media = self._files.for_request(tries)
            try:
                return await self._begin(model, request, media)
            except BaseException:
                media.release()
                raise

    async def _begin(self, model: GenerationModel, request: GenerationRequest, media: RequestMedia) -> Generation:
        timer = RequestTimer(self._metrics, model.name)
        prompts = await prepare(self._pool, media, model, request)
        request = replace(request, grammar=await prepare_grammar(self._grammars, model, request))
        read = sum(len(prompt.tokens) for prompt in prompts)
        timer.prepared(read, sum(len(prompt.media) for prompt in prompts))
        planned = await self._plan(model, request, prompts)
        submits = [submit for submit, _ in planned]
        continues = not isinstance(request.prompts[0], ChatPrompt)
        tries = request.best_of or request.n
        prompts_of = [(index // tries, submit.prompt) for index, submit in enumerate(submits)]
        openings = await self._openings(model, request, prompts_of)
        choices = [
            Choice(index, submit, model.tokenizer, reading, continues=continues, opening=opening)
            for index, ((submit, reading), opening) in enumerate(zip(planned, openings, strict=True))
        ]
        inbox = Inbox(self._unread, merge_tokens)
        model.engine.submit(submits, inbox)
        generation = TextGeneration(
            model.name,
            model.engine,
            inbox,
            choices,
            read,
            timer,
            next_id=lambda: next(self._ids),
            context_length=model.facts.context_length,
            on_end=media.release,
        )
        return generation if request.best_of is None else BestOf(generation, choices, request)

    async def _openings(
        self, model: GenerationModel, request: GenerationRequest, prompts: Sequence[tuple[int, tuple[int, ...]]]
    ) -> list[PromptEcho | None]:
        """What answers say of their prompts. On the pool: a prompt that came as tokens is turned into text for it."""
        if not request.echo and request.prompt_logprobs is None:
            return [None] * len(prompts)
        made = lambda: [PromptEcho.of(request, place, prompt, model) for place, prompt in prompts]  # noqa: E731
        return await asyncio.get_running_loop().run_in_executor(self._pool, made)

    @contextmanager
    def _counting_refusals(self, model: GenerationModel) -> Iterator[None]:
        try:
            yield
        except EngineBusy as error:
            self._metrics.common.rejected.labels(model.name, error.code).inc()
            raise

    async def _plan(
        self, model: GenerationModel, request: GenerationRequest, prompts: Sequence[PreparedPrompt]
    ) -> list[tuple[Generate, OutputParsing]]:
        """What is asked of the engine, and how each answer is read. Schemas of tools go into a grammar, on the pool."""
        tokens = [prompt.tokens for prompt in prompts]
        if request.tools is None:
            readings = plan_parsings(model, request, tokens)
        else:
            loop = asyncio.get_running_loop()
            readings = await loop.run_in_executor(self._pool, plan_parsings, model, request, tokens)
            if request.tools.choice == "required":
                await check_parsings(self._grammars, readings)
        return [
            (submit, reading)
            for (reading, run), prompt in zip(readings, prompts, strict=True)
            for submit in self._submits(model, request, replace(prompt, tokens=run), reading)
        ]

    def _submits(
        self, model: GenerationModel, request: GenerationRequest, prompt: PreparedPrompt, reading: OutputParsing
    ) -> list[Generate]:
        """One engine request for each answer. Answers to one prompt differ by their seed."""
        room = model.facts.context_length - len(prompt.tokens)
        seed = request.sampling.seed if request.seeded else secrets.randbits(32)
        return [
            Generate(
                request_id=next(self._ids),
                prompt=prompt.tokens,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                sampling=replace(request.sampling, seed=(seed + number) & 0xFFFFFFFFFFFFFFFF),
                stop_tokens=frozenset() if request.ignore_eos else model.tokenizer.eos_ids | reading.stop_tokens,
                logprobs=(request.logprobs or 0) if request.best_of else request.logprobs,
                grammar=reading.grammar,
                prompt_logprobs=prompt_logprobs(request),
                contents=prompt.contents,
                media=prompt.media,
            )
            for number in range(request.best_of or request.n)
        ]


def with_defaults(request: GenerationRequest, spec: ModelSpec) -> GenerationRequest:
    """What the client left to the server, as the model's entry in the configuration has it."""
    sampling = {name: value for name, value in spec.sampling if name in request.unset}
    max_tokens = spec.max_tokens if request.max_tokens is None else request.max_tokens
    return replace(request, sampling=replace(request.sampling, **sampling), max_tokens=max_tokens)  # type: ignore[arg-type]
