"""How the answers to one request are read: what is content, thought or call, and where it ends."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.model import GenerationModel
from millstream.text.conversation import budget_of, calling_format, knows_tools
from millstream.text.output import Output
from millstream.text.style import Style
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
    style: Style | None = None
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

    def output(self) -> Output:
        return Output(self.style, self.schemas, thinking=self.thinking, stops=self.stop, single=self.single)

    def call_id(self, name: str, index: int) -> str:
        form = self.style.tools.ids if self.style and self.style.tools else "call"
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
    style = model.style
    if use is not None and not knows_tools(style):
        style = replace(style, tools=calling_format(style))
    if use is None and style.reasoning is None:
        return plain
    ends = (model.tokenizer.token_id(name) for name in (style.tools.stops if style.tools else ()))
    return replace(
        plain,
        style=style,
        schemas=None if use is None else use.schemas,
        single=use is not None and not use.parallel,
        shown=model.tokenizer.special_in(style.markers),
        stop_tokens=frozenset(end for end in ends if end is not None),
        budget=budget_of(style, request.thinking),
        closing=_closing(style, model),
    )


def for_prompt(
    reading: OutputParsing, model: GenerationModel, request: GenerationRequest, prompt: tuple[int, ...]
) -> tuple[OutputParsing, tuple[int, ...]]:
    """With what the prompt's end tells, and the grammar of a call that must come. Thoughts that the prompt opens are
    closed in the prompt if they may have no token, and before an answer that must match a form from its first token."""
    style = reading.style
    if style is None:
        return reading, prompt
    thinking = _opens_thoughts(reading, model.tokenizer, prompt)
    if thinking and (reading.budget == 0 or request.grammar is not None):
        thinking, prompt = False, (*prompt, *reading.closing)
    reading = replace(reading, thinking=thinking)
    use = request.tools
    if use is None or use.choice != "required" or style.tools is None:
        return reading, prompt
    added = model.tokenizer.added_tokens
    marks = None if reading.budget == 0 else style.reasoning
    forced = tool_grammar(style.tools, use, added, reasoning=marks, thinking=thinking)
    return replace(reading, grammar=forced, answer_grammar=tool_grammar(style.tools, use, added)), prompt


def _opens_thoughts(reading: OutputParsing, tokenizer: Tokenizer, prompt: tuple[int, ...]) -> bool:
    marks = reading.style.reasoning if reading.style else None
    if marks is None:
        return False
    end = tokenizer.detokenizer(continues=True, shown=reading.shown).push(prompt[-_LAST_TOKENS:])
    return end.rstrip().endswith(marks.opens)


def _closing(style: Style, model: GenerationModel) -> tuple[int, ...]:
    """Nothing where the model has no embedding for one of its tokens."""
    marks = style.reasoning
    if marks is None:
        return ()
    text = f"{marks.closes[0]}{marks.after}" if marks.after else f"\n{marks.closes[0]}\n\n"
    tokens = tuple(model.tokenizer.encode(text, special=False))
    return tokens if max(tokens) < model.facts.vocab_size else ()
