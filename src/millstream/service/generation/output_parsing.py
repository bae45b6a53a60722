"""How the answers to one request are read: what is content, thought or call, and where it ends."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.model import GenerationModel
from millstream.text.chat_format import ChatFormat
from millstream.text.conversation import has_native_tools, reasoning_budget, tool_format_of
from millstream.text.output_parser import OutputParser
from millstream.text.tokenizer import Tokenizer
from millstream.text.tool_formats.format import Schemas
from millstream.text.tool_grammar import tool_grammar
from millstream.types import ChatPrompt, GenerationRequest, Grammar

_LAST_TOKENS = 16
"""Enough of a prompt's end to see whether it opens a block of thoughts."""


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """The plain one reads all text as content."""

    stop: tuple[str, ...] = ()
    chat_format: ChatFormat | None = None
    schemas: Schemas | None = None
    single: bool = False
    """Whether the first call ends the answer."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are markers."""
    stop_tokens: frozenset[int] = frozenset()
    budget: int | None = None
    """Tokens of thought."""
    closing: tuple[int, ...] = ()
    """Tokens that end the thoughts by force."""
    thinking: bool = False
    """Whether the prompt has opened the thoughts."""
    grammar: Grammar | None = None
    answer_grammar: Grammar | None = None
    """The same without thoughts before it."""

    def output(self) -> OutputParser:
        return OutputParser(
            self.chat_format, self.schemas, in_reasoning=self.thinking, stops=self.stop, single=self.single
        )

    def call_id(self, name: str, index: int) -> str:
        form = self.chat_format.tools.id_format if self.chat_format and self.chat_format.tools else "call"
        if form == "kimi":
            return f"functions.{name}:{index}"
        return secrets.token_hex(5)[:9] if form == "mistral" else f"call_{secrets.token_hex(12)}"


Planned = list[tuple[OutputParsing, tuple[int, ...]]]


def plan_parsings(model: GenerationModel, request: GenerationRequest, prompts: Sequence[tuple[int, ...]]) -> Planned:
    """How the answers to each prompt are read, and the prompt that is then run. With tools this is work for the pool:
    their schemas go into a grammar, which `check_parsings` has checked."""
    common = reading_of(model, request)
    return [for_prompt(common, model, request, prompt) for prompt in prompts]


async def check_parsings(checks: GrammarChecks, planned: Planned) -> None:
    """Raises `BadRequest` for a grammar of forced calls that cannot be served: the client wrote their schemas."""
    for reading, _ in planned:
        for grammar in (reading.grammar, reading.answer_grammar):
            if grammar is not None:
                await checks.check(grammar)


def reading_of(model: GenerationModel, request: GenerationRequest) -> OutputParsing:
    """All but what depends on the prompt."""
    plain = OutputParsing(stop=request.stop, grammar=request.grammar, answer_grammar=request.grammar)
    if not isinstance(request.prompts[0], ChatPrompt):
        return plain
    use = request.tools if request.tools is not None and request.tools.choice != "none" else None
    chat_format = model.chat_format
    if use is not None and not has_native_tools(chat_format):
        chat_format = replace(chat_format, tools=tool_format_of(chat_format))
    if use is None and chat_format.reasoning is None:
        return plain
    ends = (model.tokenizer.token_id(name) for name in (chat_format.tools.stop_tokens if chat_format.tools else ()))
    return replace(
        plain,
        chat_format=chat_format,
        schemas=None if use is None else use.schemas,
        single=use is not None and not use.parallel,
        shown=model.tokenizer.special_tokens_in(chat_format.markers),
        stop_tokens=frozenset(end for end in ends if end is not None),
        budget=reasoning_budget(chat_format, request.thinking),
        closing=_closing(chat_format, model),
    )


def for_prompt(
    reading: OutputParsing, model: GenerationModel, request: GenerationRequest, prompt: tuple[int, ...]
) -> tuple[OutputParsing, tuple[int, ...]]:
    """With what the prompt's end tells, and the grammar of a call that must come. Thoughts that the prompt opens are
    closed in the prompt if they may have no token, and before an answer that must match a form from its first token."""
    chat_format = reading.chat_format
    if chat_format is None:
        return reading, prompt
    thinking = _opens_thoughts(reading, model.tokenizer, prompt)
    if thinking and (reading.budget == 0 or request.grammar is not None):
        thinking, prompt = False, (*prompt, *reading.closing)
    reading = replace(reading, thinking=thinking)
    use = request.tools
    if use is None or use.choice != "required" or chat_format.tools is None:
        return reading, prompt
    added = model.tokenizer.added_tokens
    marks = None if reading.budget == 0 else chat_format.reasoning
    forced = tool_grammar(chat_format.tools, use, added, reasoning=marks, in_reasoning=thinking)
    return replace(reading, grammar=forced, answer_grammar=tool_grammar(chat_format.tools, use, added)), prompt


def _opens_thoughts(reading: OutputParsing, tokenizer: Tokenizer, prompt: tuple[int, ...]) -> bool:
    marks = reading.chat_format.reasoning if reading.chat_format else None
    if marks is None:
        return False
    end = tokenizer.detokenizer(continues=True, shown=reading.shown).push(prompt[-_LAST_TOKENS:])
    return end.rstrip().endswith(marks.opens)


def _closing(chat_format: ChatFormat, model: GenerationModel) -> tuple[int, ...]:
    """Nothing where the model has no embedding for one of its tokens."""
    marks = chat_format.reasoning
    if marks is None:
        return ()
    text = f"{marks.closes[0]}{marks.after}" if marks.after else f"\n{marks.closes[0]}\n\n"
    tokens = tuple(model.tokenizer.encode(text, special=False))
    return tokens if max(tokens) < model.facts.vocab_size else ()
