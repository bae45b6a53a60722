"""From a client's prompt to token ids, on the CPU pool, so that a long one stops neither the loop nor an engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from millstream.errors import BadRequest, ContextOverflow
from millstream.service.entry import ReadyModel
from millstream.text.conversation import render
from millstream.text.grammar import checked
from millstream.types import ChatPrompt, GenerationRequest, Grammar, Prompt, TextPrompt, TokenPrompt


async def prepare(pool: Executor, model: ReadyModel, request: GenerationRequest) -> list[tuple[int, ...]]:
    """The token ids of each prompt. Raises `BadRequest` for what the model cannot take."""
    loop = asyncio.get_running_loop()
    prompts = await asyncio.gather(
        *(loop.run_in_executor(pool, _encode, model, prompt, request) for prompt in request.prompts)
    )
    for place, tokens in enumerate(prompts):
        _check_length(model, tokens, place if len(prompts) > 1 else None)
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


def _encode(model: ReadyModel, prompt: Prompt, request: GenerationRequest) -> tuple[int, ...]:
    match prompt:
        case ChatPrompt():
            return tuple(render(model.tokenizer, model.style, prompt, request.tools, request.thinking))
        case TextPrompt():
            return tuple(model.tokenizer.encode(prompt.text))
        case TokenPrompt():
            return _checked(prompt.tokens, model.facts.vocab_size)


def _checked(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"token {token} is not in the vocabulary: 0 to {vocab_size - 1}", param="prompt")
    return tokens


def _check_length(model: ReadyModel, tokens: tuple[int, ...], place: int | None) -> None:
    which = "the prompt" if place is None else f"prompt {place}"
    if not tokens:
        raise BadRequest(f"{which} is empty: this model needs at least one token", param="prompt")
    limit = model.facts.context_length
    if len(tokens) >= limit:
        raise ContextOverflow(
            f"{which} has {len(tokens)} tokens; this model's context is {limit} tokens, and at least one must be "
            "left for the answer. Shorten it."
        )
