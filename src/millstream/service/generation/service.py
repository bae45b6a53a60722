"""Starts generations: prepares a request of any dialect, has it admitted, and submits it to the model's engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from millstream.config import ModelSpec
from millstream.engine.generation.messages import Generate
from millstream.errors import BadRequest, EngineGone
from millstream.service.generation.best_of import BestOf
from millstream.service.generation.choice import Choice
from millstream.service.generation.generation import TextGeneration
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.merge_tokens import merge_tokens
from millstream.service.generation.model import GenerationModel
from millstream.service.generation.output_parsing import (
    OutputParsing,
    check_input_grammars,
    check_parsings,
    plan_parsings,
)
from millstream.service.generation.prepare import (
    PreparedPrompt,
    check_lengths,
    prepare,
    prepare_grammar,
    prepare_prediction,
    prepare_unchecked,
)
from millstream.service.generation.prompt_echo import PromptEcho, prompt_logprobs
from millstream.service.generation.timing import RequestTimer, RequestTimers
from millstream.service.hub import ModelHub
from millstream.service.media.files import MediaFiles, RequestMedia
from millstream.service.ports import Generation
from millstream.service.unread_output import UnreadOutput
from millstream.types import ChatPrompt, GenerationRequest, TextPrompt

log = logging.getLogger(__name__)


class TextGenerator:
    """Implements `ports.GenerationService`."""

    def __init__(
        self,
        hub: ModelHub,
        pool: Executor,
        files: MediaFiles,
        grammar_checks: GrammarChecks,
        unread: UnreadOutput,
        timers: RequestTimers,
    ) -> None:
        self._hub = hub
        self._pool = pool
        self._files = files
        self._grammar_checks = grammar_checks
        self._unread = unread
        self._timers = timers
        self._ids = itertools.count(1)

    async def start(self, request: GenerationRequest) -> Generation:
        with self._timers.open(request) as timer:
            while True:
                async with self._hub.use(request.model, GenerationModel) as model:
                    timer.found(model.name)
                    try:
                        complete = with_defaults(request, model.spec, model.sampling)
                        check_ends(complete)
                        return await self._start_on(model, complete, timer)
                    except EngineGone:
                        log.debug("%s: the engine ended before the request was submitted", model.name)
                # Nothing has run, so try again. Once the hub knows, it restarts the engine or raises why not.
                await model.engine.wait_gone()

    async def count_tokens(self, request: GenerationRequest) -> int:
        async with self._hub.use(request.model, GenerationModel) as model:
            media = self._files.for_request(1)
            try:
                prompts = await prepare_unchecked(self._pool, media, model, request, limit=None)
            finally:
                media.release()
        return sum(len(prompt.tokens) for prompt in prompts)

    async def _start_on(self, model: GenerationModel, request: GenerationRequest, timer: RequestTimer) -> Generation:
        choices = request.best_of or request.n
        # Fail early, before media are fetched and prompts prepared for nothing.
        model.engine.admission.check(len(request.prompts) * choices)
        media = self._files.for_request(choices)
        try:
            return await self._submit(model, request, media, timer)
        except BaseException:
            media.release()
            raise

    async def _submit(
        self, model: GenerationModel, request: GenerationRequest, media: RequestMedia, timer: RequestTimer
    ) -> Generation:
        prompts = await prepare(self._pool, media, model, request)
        if request.grammar is not None:
            request = replace(request, grammar=await prepare_grammar(self._grammar_checks, model, request))
        prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        prediction = await prepare_prediction(self._pool, model, request)
        planned = await self._plan(model, request, prompts, prediction)
        submits = [submit for submit, _ in planned]
        first = request.prompts[0]
        continues = not isinstance(first, ChatPrompt) or first.continue_final
        echoes = await self._prompt_echoes(model, request, submits)
        choices = [
            Choice(index, submit, model.tokenizer, parsing, continues=continues, prompt_echo=echo)
            for index, ((submit, parsing), echo) in enumerate(zip(planned, echoes, strict=True))
        ]
        timer.submitted(prompt_tokens, sum(len(prompt.media) for prompt in prompts))
        inbox = model.engine.open_inbox(submits, self._unread, merge=merge_tokens)
        generation = TextGeneration(
            model.name,
            model.engine,
            inbox,
            choices,
            prompt_tokens,
            timer,
            per_prompt=request.best_of or request.n,
            on_end=media.release,
        )
        return generation if request.best_of is None else BestOf(generation, choices, request)

    async def _prompt_echoes(
        self, model: GenerationModel, request: GenerationRequest, submits: Sequence[Generate]
    ) -> list[PromptEcho | None]:
        """Returns the prompt echo of each choice. Runs on the pool, because token prompts have to be decoded."""
        if not request.echo and request.prompt_logprobs is None:
            return [None] * len(submits)
        choices = request.best_of or request.n

        def create() -> list[PromptEcho | None]:
            return [
                PromptEcho.create(request, index // choices, submit.prompt, model)
                for index, submit in enumerate(submits)
            ]

        return await asyncio.get_running_loop().run_in_executor(self._pool, create)

    async def _plan(
        self,
        model: GenerationModel,
        request: GenerationRequest,
        prompts: Sequence[PreparedPrompt],
        prediction: tuple[int, ...],
    ) -> list[tuple[Generate, OutputParsing]]:
        """Returns each choice's engine request and how its output is parsed. Tool grammars are built on the pool."""
        tokens = [prompt.tokens for prompt in prompts]
        if request.tools is None:
            planned = plan_parsings(model, request, tokens)
        else:
            tools = await check_input_grammars(self._grammar_checks, request.tools)
            request = replace(request, tools=tools)
            loop = asyncio.get_running_loop()
            planned = await loop.run_in_executor(self._pool, plan_parsings, model, request, tokens)
            if tools.choice == "required" or tools.input_grammars or request.grammar is not None:
                await check_parsings(self._grammar_checks, planned)
        run = [replace(prompt, tokens=tokens) for (_, tokens), prompt in zip(planned, prompts, strict=True)]
        if run != prompts:  # the reasoning of some is closed, which makes them longer
            check_lengths(model, run)
        return [
            (submit, parsing)
            for (parsing, _), prompt in zip(planned, run, strict=True)
            for submit in self._submits(model, request, prompt, parsing, prediction)
        ]

    def _submits(
        self,
        model: GenerationModel,
        request: GenerationRequest,
        prompt: PreparedPrompt,
        parsing: OutputParsing,
        prediction: tuple[int, ...],
    ) -> list[Generate]:
        """Returns one engine request per choice. The choices of one prompt differ by their seed."""
        max_tokens = model.facts.context_length - len(prompt.tokens)
        if request.max_tokens is not None:
            max_tokens = min(request.max_tokens, max_tokens)
        seed = request.sampling.seed if request.seeded else random.getrandbits(32)
        # A sampler folds the halves of a seed together, so choices count in one half: no two of them get the same.
        high, low = seed & 0xFFFFFFFF_00000000, seed & 0xFFFFFFFF
        stop_tokens = _stop_tokens(model, request, parsing)
        in_part = request.tools is None if request.spec_prefill is None else request.spec_prefill
        return [
            Generate(
                request_id=next(self._ids),
                prompt=prompt.tokens,
                max_tokens=max_tokens,
                sampling=request.sampling.with_seed(high | ((low + number) & 0xFFFFFFFF)),
                stop_tokens=stop_tokens,
                min_tokens=request.min_tokens if parsing.grammar is None else 0,
                logprobs=(request.logprobs or 0) if request.best_of else request.logprobs,
                grammar=parsing.grammar,
                reasoning=parsing.reasoning_limit,
                prompt_logprobs=prompt_logprobs(request),
                contents=prompt.contents,
                media=prompt.media,
                spec_prefill=in_part,
                prediction=prediction,
                speculate=request.speculate,
            )
            for number in range(request.best_of or request.n)
        ]


def _stop_tokens(model: GenerationModel, request: GenerationRequest, parsing: OutputParsing) -> frozenset[int]:
    own: frozenset[int] = frozenset()
    if not request.ignore_eos:
        own = model.tokenizer.eos_ids | parsing.stop_tokens
        if model.fim is not None and any(isinstance(p, TextPrompt) and p.suffix is not None for p in request.prompts):
            own |= model.fim.stop_tokens
    return own.union(request.stop_token_ids)


def with_defaults(
    request: GenerationRequest, spec: ModelSpec, recommended: Sequence[tuple[str, float]] = ()
) -> GenerationRequest:
    """Fills in the model's defaults for fields that the client left unset: as configured, else as its files
    recommend."""
    defaults = {name: value for name, value in (*recommended, *spec.sampling) if name in request.unset}
    limits = (request.max_tokens, spec.max_tokens, request.default_max_tokens)
    max_tokens = next((each for each in limits if each is not None), None)
    if not defaults and max_tokens == request.max_tokens:
        return request
    return replace(request, sampling=replace(request.sampling, **defaults), max_tokens=max_tokens)  # type: ignore[arg-type]


def check_ends(request: GenerationRequest) -> None:
    """Raises `BadRequest` for an output that is to go on where it must end. After `with_defaults`."""
    least, most = request.min_tokens, request.max_tokens
    if most is not None and least > most:
        raise BadRequest(f"min_tokens ({least}) is more than the token limit ({most}).", param="min_tokens")
    grammar = "structured output" if request.grammar is not None else None
    if request.tools is not None and request.tools.choice == "required":
        grammar = "a required tool call"
    elif request.tools is not None and request.tools.choice == "auto" and request.tools.input_grammars:
        grammar = "a tool that has a grammar"
    for name, given in (("ignore_eos", request.ignore_eos), ("min_tokens", least > 0)):
        if grammar is not None and given:
            raise BadRequest(f"{name} cannot be combined with {grammar}.", param=name)
