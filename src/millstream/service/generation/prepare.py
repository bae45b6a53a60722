"""Renders and tokenizes prompts on the thread pool, so that a long one blocks neither the event loop nor an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from millstream.engine.token_ids import check_token_ids
from millstream.errors import BadRequest, ContextOverflow
from millstream.media.port import PreparedMedia
from millstream.media.prompt import expand_placeholders, locate_media
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.model import GenerationModel
from millstream.service.generation.template_host import render_job
from millstream.service.media.files import RequestMedia
from millstream.text.templates.conversation import template_input
from millstream.types import (
    ChatPrompt,
    GenerationRequest,
    Grammar,
    Media,
    Prompt,
    TextPrompt,
    TokenPrompt,
    quickly_made,
)

MIN_CHARACTER_LIMIT = 4 * 2**20
CHARACTERS_PER_TOKEN = 64
"""The longest conversation accepted, in characters per token of the context. Most text has four characters per token,
and a template may leave old turns out. A longer conversation is surely a mistake, and searching it for control tokens
would waste CPU time."""

INLINE_CHARACTERS = 8_192
"""Conversations up to this size are prepared on the event loop: that costs less than a switch to the pool."""
INLINE_TEXT = 4_096
"""The same for a text that is to be tokenized, which takes less than a millisecond. While many requests arrive, each
switch also waits for the interpreter lock."""


@quickly_made
@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The tokens and media of a prompt, ready for an engine."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()

    @property
    def contents(self) -> tuple[tuple[int, str], ...]:
        """The position and digest of each media file, for block hashes."""
        return tuple((media.start, media.digest) for media in self.media)


async def prepare(
    pool: Executor, files: RequestMedia, model: GenerationModel, request: GenerationRequest
) -> list[PreparedPrompt]:
    """Returns the tokens and media of each prompt. Raises `BadRequest` if the model cannot process one of them."""
    limit = model.facts.context_length
    prompts = await prepare_unchecked(pool, files, model, request, limit)
    check_lengths(model, prompts)
    biased = [token for token, _ in request.sampling.logit_bias]
    for param, tokens in (("logit_bias", biased), ("stop_token_ids", request.stop_token_ids)):
        check_token_ids(tokens, model.facts.vocab_size, where=param, param=param)
    return prompts


async def prepare_unchecked(
    pool: Executor, files: RequestMedia, model: GenerationModel, request: GenerationRequest, limit: int | None
) -> list[PreparedPrompt]:
    """Returns the tokens and media of each prompt, of any length. With a `limit`, a text that surely has more tokens
    is refused before it is tokenized."""
    work = [_prepare(pool, files, model, prompt, request, limit) for prompt in request.prompts]
    return [await work[0]] if len(work) == 1 else list(await asyncio.gather(*work))


async def prepare_grammar(checks: GrammarChecks, model: GenerationModel, request: GenerationRequest) -> Grammar | None:
    """Returns the request's grammar in the form that engines accept. Raises `BadRequest` if it cannot be served."""
    if request.grammar is None:
        return None
    if not model.tokenizer.eos_ids:
        raise BadRequest("this model has no end-of-sequence token, which structured output needs")
    return await checks.check(request.grammar)


async def prepare_prediction(pool: Executor, model: GenerationModel, request: GenerationRequest) -> tuple[int, ...]:
    """Returns the tokens of the expected answer; none if the model has no drafter that could use them."""
    if not request.prediction or not request.speculate or "prediction" not in model.facts.drafters:
        return ()
    return await asyncio.get_running_loop().run_in_executor(pool, _encode_prediction, model, request.prediction)


def _encode_prediction(model: GenerationModel, text: str) -> tuple[int, ...]:
    """The tokens as the model would write them. No answer is longer than the context, so the rest is left out, as are
    tokens for which the model has no embedding."""
    limit = model.facts.context_length
    tokens = model.tokenizer.encode(text[: CHARACTERS_PER_TOKEN * limit], special=False)
    return tuple(token for token in tokens[:limit] if token < model.facts.vocab_size)


async def _prepare(
    pool: Executor,
    files: RequestMedia,
    model: GenerationModel,
    prompt: Prompt,
    request: GenerationRequest,
    limit: int | None,
) -> PreparedPrompt:
    loop = asyncio.get_running_loop()
    if not isinstance(prompt, ChatPrompt):
        if isinstance(prompt, TextPrompt) and prompt.suffix is None and len(prompt.text) <= INLINE_TEXT:
            return PreparedPrompt(_encode(model, prompt, limit))
        return PreparedPrompt(await loop.run_in_executor(pool, _encode, model, prompt, limit))
    if prompt.media and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs is not supported for prompts with media", param="prompt_logprobs")
    media = await files.prepare(prompt.media, model.kinds, model.preprocessor) if prompt.media else ()
    inline = not request.tools and not _is_longer(INLINE_CHARACTERS, prompt.messages, prompt.template_kwargs)
    if inline:
        job, escaped = _template_job(model, prompt, request)
    else:
        job, escaped = await loop.run_in_executor(pool, _long_template_job, model, prompt, request)
    assert model.template is not None
    text = await model.template.render(job)
    if inline and len(text) <= INLINE_TEXT and not media:
        return _encode_chat(model, text, media, escaped, limit)
    return await loop.run_in_executor(pool, _encode_chat, model, text, media, escaped, limit)


def _long_template_job(model: GenerationModel, prompt: ChatPrompt, request: GenerationRequest) -> tuple[bytes, bool]:
    """The same as `_template_job` for a conversation that may be too long."""
    limit = max(MIN_CHARACTER_LIMIT, CHARACTERS_PER_TOKEN * model.facts.context_length)
    if _is_longer(limit, prompt.messages, prompt.template_kwargs):
        raise ContextOverflow(
            f"This model's maximum context length is {model.facts.context_length} tokens. However, the conversation "
            f"has more than {limit} characters. Shorten it.{_context_reason(model)}",
            limit=model.facts.context_length,
        )
    return _template_job(model, prompt, request)


def _template_job(model: GenerationModel, prompt: ChatPrompt, request: GenerationRequest) -> tuple[bytes, bool]:
    """Returns the job for the template's process, and whether control tokens in the messages were escaped."""
    assert model.template is not None
    abilities = model.template.abilities
    template = template_input(model.chat_format, prompt, request.tools, request.thinking, model.control, abilities)
    markers = None
    if prompt.media and model.preprocessor:
        markers = {kind: each.text for kind, each in model.preprocessor.placeholders.items()}
    return render_job(template, markers), template.escaped


def _is_longer(limit: int, *values: object) -> bool:
    """Returns True if JSON values have more than `limit` characters; other values count as one each. Stops there."""
    left = limit
    stack: list[object] = list(values)
    while stack and left >= 0:
        value = stack.pop()
        if isinstance(value, str):
            left -= len(value)
            continue
        left -= 1
        if isinstance(value, dict):
            stack += value.keys()
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
    return left < 0


def _encode_chat(
    model: GenerationModel, text: str, media: Sequence[PreparedMedia], escaped: bool, limit: int | None
) -> PreparedPrompt:
    """Tokenizes a rendered prompt. Adds no special tokens: the template has written them all."""
    placeholders = model.preprocessor.placeholders if media and model.preprocessor else {}
    if media:
        text = expand_placeholders(text, placeholders, media)
    if escaped and model.control is not None:
        tokens = tuple(model.control.encode(text, limit=limit))
    else:
        tokens = tuple(model.tokenizer.encode(text, special=False, limit=limit))
    return PreparedPrompt(tokens, locate_media(tokens, placeholders, media) if media else ())


def _encode(model: GenerationModel, prompt: TextPrompt | TokenPrompt, limit: int | None) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        if prompt.suffix is None:
            return tuple(model.tokenizer.encode(prompt.text, limit=limit))
        if model.fim is None:
            raise BadRequest("suffix: this model cannot fill in the middle", param="suffix")
        return model.fim.encode(model.tokenizer, model.control, prompt.text, prompt.suffix, limit=limit)
    return prompt.tokens


def check_lengths(model: GenerationModel, prompts: Sequence[PreparedPrompt]) -> None:
    """Raises `BadRequest` if a prompt is empty, leaves no room in the context, or has a token without embedding."""
    for index, prompt in enumerate(prompts):
        _check_length(model, prompt, index if len(prompts) > 1 else None)


def _check_length(model: GenerationModel, prompt: PreparedPrompt, index: int | None) -> None:
    which = "the prompt" if index is None else f"prompt {index}"
    if not prompt.tokens:
        raise BadRequest(f"{which} is empty: this model needs at least one token", param="prompt")
    limit = model.facts.context_length
    if len(prompt.tokens) >= limit:
        media = f", {sum(each.length for each in prompt.media)} of them for media" if prompt.media else ""
        # Clients know this error by the first words, which are those of OpenAI and vLLM.
        raise ContextOverflow(
            f"This model's maximum context length is {limit} tokens. However, {which} has {len(prompt.tokens)} "
            f"tokens{media}, and the output needs at least one. Shorten the prompt.{_context_reason(model)}",
            tokens=len(prompt.tokens),
            limit=limit,
        )
    # Features replace the embeddings of media's placeholders.
    replaced = model.preprocessor.placeholders.values() if prompt.media and model.preprocessor else ()
    check_token_ids(
        prompt.tokens,
        model.facts.vocab_size,
        where=which,
        name=model.tokenizer.name,
        exempt={each.token_id for each in replaced},
        param="prompt",
    )


def _context_reason(model: GenerationModel) -> str:
    return f" {model.facts.context_reason}" if model.facts.context_reason else ""
