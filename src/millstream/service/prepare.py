"""From a client's prompt to token ids, on the CPU pool, so that a long one stops neither the loop nor an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from millstream.errors import BadRequest, ContextOverflow
from millstream.media.port import MediaReader, Prepared
from millstream.media.prompt import expand, placed
from millstream.service.entry import ReadyModel
from millstream.service.media_files import RequestMedia
from millstream.text.conversation import render
from millstream.text.grammar import checked
from millstream.text.template import Message
from millstream.types import ChatPrompt, GenerationRequest, Grammar, Media, Prompt, TextPrompt, TokenPrompt


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as an engine takes it."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()

    @property
    def contents(self) -> tuple[tuple[int, str], ...]:
        return tuple((media.start, media.digest) for media in self.media)


async def prepare(
    pool: Executor, files: RequestMedia, model: ReadyModel, request: GenerationRequest
) -> list[ReadPrompt]:
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


async def prepare_grammar(pool: Executor, model: ReadyModel, request: GenerationRequest) -> Grammar | None:
    """What the answers must match, as an engine takes it. Raises `BadRequest` for what cannot be served."""
    if request.grammar is None:
        return None
    if not model.tokenizer.eos_ids:
        raise BadRequest("this model names no token that ends an answer, so its answers cannot follow a grammar")
    return await asyncio.get_running_loop().run_in_executor(pool, checked, request.grammar)


async def _prepare(
    pool: Executor, files: RequestMedia, model: ReadyModel, prompt: Prompt, request: GenerationRequest
) -> ReadPrompt:
    loop = asyncio.get_running_loop()
    if not isinstance(prompt, ChatPrompt) or not prompt.media:
        return ReadPrompt(await loop.run_in_executor(pool, _encode, model, prompt, request))
    if request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs is not served for prompts with media", param="prompt_logprobs")
    images = await files.prepare(prompt.media, model.kinds, model.reader)
    assert model.reader is not None  # otherwise the files would have been refused
    return await loop.run_in_executor(pool, _encode_media, model, model.reader, prompt, request, images)


def _encode_media(
    model: ReadyModel, reader: MediaReader, prompt: ChatPrompt, request: GenerationRequest, images: Sequence[Prepared]
) -> ReadPrompt:
    markers: dict[str, str] = {kind: mark.text for kind, mark in reader.marks.items()}

    def encode(messages: Sequence[Message], **words: object) -> list[int]:
        text = model.tokenizer.render_media(messages, markers, **words)
        return model.tokenizer.encode(expand(text, reader.marks, images), special=False)

    tokens = tuple(render(encode, model.style, prompt, request.tools, request.thinking))
    return ReadPrompt(tokens, placed(tokens, reader.marks, images))


def _encode(model: ReadyModel, prompt: Prompt, request: GenerationRequest) -> tuple[int, ...]:
    match prompt:
        case ChatPrompt():
            return tuple(render(model.tokenizer.encode_chat, model.style, prompt, request.tools, request.thinking))
        case TextPrompt():
            return tuple(model.tokenizer.encode(prompt.text))
        case TokenPrompt():
            return _checked(prompt.tokens, model.facts.vocab_size)


def _checked(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"token {token} is not in the vocabulary: 0 to {vocab_size - 1}", param="prompt")
    return tokens


def _check_length(model: ReadyModel, prompt: ReadPrompt, place: int | None) -> None:
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
