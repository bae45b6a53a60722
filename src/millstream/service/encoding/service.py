"""Embeds and scores texts: tokenises on the pool, runs on the model's engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from millstream.engine.jobs.messages import TOKEN_BYTES, Encode
from millstream.engine.token_ids import check_token_ids
from millstream.errors import BadRequest, EngineGone
from millstream.service.encoding.job import Job, Matrix, token_bytes
from millstream.service.encoding.model import EmbeddingModel, EncoderModel, RerankModel
from millstream.service.encoding.timing import EncodingTimers, RequestTimer
from millstream.service.hub import ModelHub
from millstream.service.unread_output import UnreadOutput
from millstream.types import EmbeddingRequest, Embeddings, RerankRequest, Scores

log = logging.getLogger(__name__)

MAX_VECTOR_BYTES = 2**30
"""Vectors of a request that may wait for the event loop, which reads them at once."""

ModelT = TypeVar("ModelT", bound=EncoderModel)
T = TypeVar("T")

_LIKELY_TIKTOKEN = (
    "Some clients send tokens of OpenAI's own models: let them send text (LangChain: check_embedding_ctx_length=False)."
)
_INPUT_TYPES = {
    "query": ("query", "search_query", "s2p_query", "web_search_query"),
    "document": ("document", "search_document", "passage", "corpus"),
}
"""Words for the two sides of a search: what models call their prompts for it."""


class TextEncoder:
    """Implements `ports.EmbeddingService` and `ports.RerankService`."""

    def __init__(self, hub: ModelHub, pool: Executor, unread: UnreadOutput, timers: EncodingTimers) -> None:
        self._timers = timers
        self._hub = hub
        self._pool = pool
        self._unread = unread
        self._ids = itertools.count(1)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        async def prepare(model: EmbeddingModel) -> Encode:
            _check_dimensions(model, request.dimensions)
            number = next(self._ids)
            return await self._on_pool(lambda: _embedding(number, model, request))

        with self._timers.open(request.model, "embeddings") as timer:
            model, job = await self._start(request.model, EmbeddingModel, prepare, timer)
            matrix = await job.collect()
            size = request.dimensions or matrix.shape[1]
            values = await self._on_pool(lambda: _cut(matrix, size).tobytes())
        return Embeddings(model.name, values, size, timer.tokens)

    async def score(self, request: RerankRequest) -> Scores:
        async def prepare(model: RerankModel) -> Encode:
            number = next(self._ids)
            return await self._on_pool(lambda: _scoring(number, model, request))

        with self._timers.open(request.model, "rerank") as timer:
            model, job = await self._start(request.model, RerankModel, prepare, timer)
            matrix = await job.collect()
        return Scores(model.name, tuple(matrix[:, 0].tolist()), timer.tokens)

    async def _start(
        self, name: str, kind: type[ModelT], prepare: Callable[[ModelT], Awaitable[Encode]], timer: RequestTimer
    ) -> tuple[ModelT, Job]:
        """Has a job prepared and accepted, again if the engine ends before it has accepted it."""
        while True:
            async with self._hub.use(name, kind) as model:
                timer.found(model.name)
                model.engine.admission.check(1)  # before anything is tokenised for nothing
                encode = await prepare(model)
                timer.submitted(_count(encode))
                try:
                    return model, Job(model.engine, encode, self._unread, timer.started)
                except EngineGone:
                    log.debug("%s: the engine ended before the request was submitted", model.name)
            # Nothing has run, so try again. Once the hub knows, it restarts the engine or raises the reason why not.
            await model.engine.wait_gone()

    async def _on_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _embedding(number: int, model: EmbeddingModel, request: EmbeddingRequest) -> Encode:
    """On the pool."""
    tokenizer, facts = model.tokenizer, model.facts
    tokens = tokenizer.encode(
        request.inputs, prompt=prompt_of(model, request), limit=facts.context_length, truncation=request.truncation
    )
    for place, (sent, each) in enumerate(zip(request.inputs, tokens, strict=True)):
        where, hint = f"input {place}", _LIKELY_TIKTOKEN if isinstance(sent, tuple) else ""
        check_token_ids(each, facts.vocab_size, where=where, name=tokenizer.name, param="input", hint=hint)
    return Encode(number, tuple(map(token_bytes, tokens)))


def _scoring(number: int, model: RerankModel, request: RerankRequest) -> Encode:
    """On the pool."""
    facts = model.facts
    pairs = model.pairs.encode(
        request.pairs,
        limit=facts.context_length,
        document_limit=request.max_tokens_per_document,
        instruction=request.instruction,
    )
    for place, pair in enumerate(pairs):
        check_token_ids(pair.tokens, facts.vocab_size, where=f"the query with text {place}", name=model.pairs.name)
    parts = tuple(pair.first_part for pair in pairs if pair.first_part is not None)
    return Encode(number, tuple(token_bytes(pair.tokens) for pair in pairs), parts)


def _count(encode: Encode) -> int:
    return sum(map(len, encode.inputs)) // TOKEN_BYTES


def prompt_of(model: EmbeddingModel, request: EmbeddingRequest) -> str:
    """What to put before each text."""
    if request.prompt_name is not None:
        if request.prompt_name not in model.prompts:
            known = ", ".join(model.prompts) or "none"
            raise BadRequest(
                f"{model.name!r} has no prompt {request.prompt_name!r}. Its prompts: {known}.", param="prompt_name"
            )
        return model.prompts[request.prompt_name]
    for name in _INPUT_TYPES.get(request.input_type or "", (request.input_type,)):
        if name in model.prompts:
            return model.prompts[name]
    if request.input_type is None and model.default_prompt is not None:
        return model.prompts[model.default_prompt]
    return ""


def _check_dimensions(model: EmbeddingModel, dimensions: int | None) -> None:
    if dimensions is None or dimensions == model.facts.width:
        return
    allowed = model.dimensions
    if dimensions > model.facts.width or (allowed and dimensions not in allowed):
        sizes = f"one of {', '.join(map(str, sorted(allowed)))}" if allowed else f"at most {model.facts.width}"
        raise BadRequest(f"dimensions is {dimensions}; for {model.name!r} it must be {sizes}", param="dimensions")


def _cut(matrix: Matrix, size: int) -> Matrix:
    """Shorter vectors, of length 1 again."""
    if size == matrix.shape[1]:
        return matrix
    cut = matrix[:, :size]
    norms = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.ascontiguousarray(cut / np.maximum(norms, 1e-12), np.float32)
