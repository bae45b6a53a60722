"""From a client's prompt to token ids, on the CPU pool, so that a long one stops neither the loop nor an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from millstream.errors import BadRequest, ContextOverflow
from millstream.media.port import PreparedMedia
from millstream.media.prompt import expand_placeholders, locate_media
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.model import GenerationModel
from millstream.service.generation.template_host import job_of
from millstream.service.media.files import RequestMedia
from millstream.text.conversation import template_input
from millstream.types import ChatPrompt, GenerationRequest, Grammar, Media, Prompt, TextPrompt, TokenPrompt

LEAST_CHARACTERS = 4 * 2**20
CHARACTERS_A_TOKEN = 64
"""Of a conversation, for each token of the context. Most text has four, and a template may leave old turns out; what is
over this bound cannot have been meant, and to look for control tokens in it would cost more than it is worth."""

SMALL = 8_192
"""Characters of a conversation that is made ready on the event loop: less than a turn of the pool costs."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as an engine takes it."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()

    @property
    def contents(self) -> tuple[tuple[int, str], ...]:
        return tuple((media.start, media.digest) for media in self.media)


async def prepare(
    pool: Executor, files: RequestMedia, model: GenerationModel, request: GenerationRequest
) -> list[PreparedPrompt]:
    """The tokens and images of each prompt. Raises `BadRequest` for what the model cannot take."""
    prompts = await asyncio.gather(*(_prepare(pool, files, model, prompt, request) for prompt in request.prompts))
    for place, prompt in enumerate(prompts):
        _check_length(model, prompt, place if len(prompts) > 1 else None)
    outside = [token for token, _ in request.sampling.logit_bias if not 0 <= token < model.facts.vocab_size]
    if outside:
        raise BadRequest(
            f"logit_bias names token {outside[0]}; this model's tokens are 0 to {model.facts.vocab_size - 1}",
            param="logit_bias",
        )
    return list(prompts)


async def prepare_grammar(checks: GrammarChecks, model: GenerationModel, request: GenerationRequest) -> Grammar | None:
    """What the answers must match, as an engine takes it. Raises `BadRequest` for what cannot be served."""
    if request.grammar is None:
        return None
    if not model.tokenizer.eos_ids:
        raise BadRequest("this model names no token that ends an answer, so its answers cannot follow a grammar")
    return await checks.check(request.grammar)


async def _prepare(
    pool: Executor, files: RequestMedia, model: GenerationModel, prompt: Prompt, request: GenerationRequest
) -> PreparedPrompt:
    loop = asyncio.get_running_loop()
    if not isinstance(prompt, ChatPrompt):
        return PreparedPrompt(await loop.run_in_executor(pool, _encode, model, prompt))
    if prompt.media and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs is not served for prompts with media", param="prompt_logprobs")
    images = await files.prepare(prompt.media, model.kinds, model.preprocessor) if prompt.media else ()
    small = not request.tools and not _exceeds(SMALL, prompt.messages, prompt.template_kwargs)
    work = partial(_job, model, prompt, request)
    job, escaped = work() if small else await loop.run_in_executor(pool, work)
    assert model.template is not None
    text = await model.template.render(job)
    return await loop.run_in_executor(pool, _encode_chat, model, text, images, escaped)


def _job(model: GenerationModel, prompt: ChatPrompt, request: GenerationRequest) -> tuple[bytes, bool]:
    """What the template's process is sent, and whether names of control tokens were escaped."""
    limit = max(LEAST_CHARACTERS, CHARACTERS_A_TOKEN * model.facts.context_length)
    if _exceeds(limit, prompt.messages, prompt.template_kwargs):
        raise ContextOverflow(
            f"the conversation is too long: this model's context is {model.facts.context_length} tokens, and at most "
            f"{limit} characters are looked at. Shorten it."
        )
    rendered = template_input(model.chat_format, prompt, request.tools, request.thinking, model.control)
    markers = None
    if prompt.media and model.preprocessor:
        markers = {kind: each.text for kind, each in model.preprocessor.placeholders.items()}
    return job_of(rendered, markers), rendered.escaped


def _exceeds(most: int, *values: object) -> bool:
    """Whether plain values hold more than so many characters, an item counted as one. Looks no further than that."""
    left = most
    stack: list[object] = list(values)
    while stack and left >= 0:
        value = stack.pop()
        left -= len(value) if isinstance(value, str) else 1
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
    return left < 0


def _encode_chat(model: GenerationModel, text: str, images: Sequence[PreparedMedia], escaped: bool) -> PreparedPrompt:
    """A template writes all special tokens itself; none are added."""
    placeholders = model.preprocessor.placeholders if images and model.preprocessor else {}
    if images:
        text = expand_placeholders(text, placeholders, images)
    limit = model.facts.context_length
    if escaped and model.control is not None:
        tokens = tuple(model.control.encode(text, limit=limit))
    else:
        tokens = tuple(model.tokenizer.encode(text, special=False, limit=limit))
    return PreparedPrompt(tokens, locate_media(tokens, placeholders, images) if images else ())


def _encode(model: GenerationModel, prompt: TextPrompt | TokenPrompt) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        return tuple(model.tokenizer.encode(prompt.text, limit=model.facts.context_length))
    return _checked(prompt.tokens, model.facts.vocab_size)


def _checked(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"token {token} is not in the vocabulary: 0 to {vocab_size - 1}", param="prompt")
    return tokens


def _check_length(model: GenerationModel, prompt: PreparedPrompt, place: int | None) -> None:
    which = "the prompt" if place is None else f"prompt {place}"
    if not prompt.tokens:
        raise BadRequest(f"{which} is empty: this model needs at least one token", param="prompt")
    limit = model.facts.context_length
    if len(prompt.tokens) >= limit:
        images = f", {sum(media.length for media in prompt.media)} of them media" if prompt.media else ""
        raise ContextOverflow(
            f"{which} has {len(prompt.tokens)} tokens{images}; this model's context is {limit} tokens, and at least "
            "one must be left for the answer. Shorten it."
        )
    _check_embedded(model, prompt, which)


def _check_embedded(model: GenerationModel, prompt: PreparedPrompt, which: str) -> None:
    """A tokenizer may have tokens that its model has no embedding for, and MLX reads whatever lies behind the last one:
    far enough behind, that ends the process. Places of media are filled with something else."""
    most = model.facts.vocab_size
    if max(prompt.tokens) < most:
        return
    filled: set[int] = set()
    if prompt.media and model.preprocessor:
        filled = {each.token_id for each in model.preprocessor.placeholders.values()}
    outside = next((token for token in prompt.tokens if token >= most and token not in filled), None)
    if outside is not None:
        name = model.tokenizer.token_bytes(outside).decode(errors="replace")
        raise BadRequest(
            f"{which} holds {name!r:.60}, token {outside}, and this model has {most} tokens", param="prompt"
        )
