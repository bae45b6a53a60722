"""Plans how the output for each prompt is parsed: reasoning, tool calls, stop strings and grammars."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from millstream.errors import BadRequest
from millstream.service.generation.grammar_checks import GrammarChecks
from millstream.service.generation.model import GenerationModel
from millstream.text.chat_format import ChatFormat
from millstream.text.grammars.json_escaped import CannotRewrite
from millstream.text.grammars.lark import names_tokens
from millstream.text.grammars.tool_input import check_input_size
from millstream.text.grammars.tools import embeddable, free_grammar, tool_grammar
from millstream.text.output.parser import OutputParser
from millstream.text.templates.conversation import has_native_tools, reasoning_budget, tool_format_of
from millstream.text.tokenizer import Tokenizer
from millstream.text.tool_formats.format import Schemas
from millstream.types import ChatPrompt, GenerationRequest, Grammar, ReasoningLimit, ToolUse, quickly_made

_LAST_TOKENS = 16
"""Enough tokens from the end of a prompt to tell whether it opens a reasoning block."""


@quickly_made
@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How output is parsed. By default all text is content."""

    stop: tuple[str, ...] = ()
    chat_format: ChatFormat | None = None
    schemas: Schemas | None = None
    single: bool = False
    """True if the first tool call ends the output."""
    allowed: frozenset[str] | None = None
    """Names that may be called; None for all. Other calls are text."""
    unmarked: bool = False
    """True if an answer that is nothing but calls in JSON, without markers, is calls."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are markers of the chat format: they are detokenized, not skipped."""
    stop_tokens: frozenset[int] = frozenset()
    reasoning_budget: int | None = None
    """Maximum number of reasoning tokens."""
    reasoning_end: tuple[int, ...] = ()
    """Tokens that close the reasoning when its budget is used up."""
    in_reasoning: bool = False
    """True if the prompt has opened the reasoning already."""
    grammar: Grammar | None = None

    @property
    def reasoning_limit(self) -> ReasoningLimit | None:
        """What the engine is told of the budget. None if there is none, or if nothing can close the reasoning."""
        if self.chat_format is None or self.reasoning_budget is None or not self.reasoning_end:
            return None
        return ReasoningLimit(
            self.reasoning_budget,
            self.reasoning_end,
            self.chat_format.names,
            self.in_reasoning,
            self.schemas is not None,
            self.shown,
        )

    def parser(self) -> OutputParser:
        return OutputParser(
            self.chat_format,
            self.schemas,
            in_reasoning=self.in_reasoning,
            stops=self.stop,
            single=self.single,
            allowed=self.allowed,
            unmarked=self.unmarked,
        )

    def call_id(self, name: str, index: int) -> str:
        id_format = self.chat_format.tools.id_format if self.chat_format and self.chat_format.tools else "call"
        if id_format == "kimi":
            return f"functions.{name}:{index}"
        return secrets.token_hex(5)[:9] if id_format == "mistral" else f"call_{secrets.token_hex(12)}"


PlannedPrompt = tuple[OutputParsing, tuple[int, ...]]
"""How the output is parsed, and the tokens of the prompt to run."""


def plan_parsings(
    model: GenerationModel, request: GenerationRequest, prompts: Sequence[tuple[int, ...]]
) -> list[PlannedPrompt]:
    """Plans the parsing for each prompt. With tools, call it on the pool: it builds a grammar from their schemas, which
    `check_parsings` has checked."""
    common = common_parsing(model, request)
    return [parsing_for_prompt(common, model, request, prompt) for prompt in prompts]


async def check_input_grammars(checks: GrammarChecks, tools: ToolUse) -> ToolUse:
    """Returns the tools with their input grammars in the form that engines accept. Raises `BadRequest`."""
    checked = []
    for name, grammar in tools.input_grammars:
        try:
            check_input_size(grammar)
            checked.append((name, await checks.check(grammar)))
        except CannotRewrite as error:
            raise BadRequest(f"the grammar of the tool {name!r} has {error}", param="tools") from error
        except BadRequest as error:
            raise BadRequest(f"the tool {name!r}: {error.message}", param="tools") from error
    return replace(tools, input_grammars=tuple(checked))


async def check_parsings(checks: GrammarChecks, planned: Sequence[PlannedPrompt]) -> None:
    """Checks the grammars of tool calls, because the client wrote their schemas. Raises `BadRequest` if one cannot be
    served."""
    for parsing, _ in planned:
        if parsing.grammar is not None:
            await checks.check(parsing.grammar)


def common_parsing(model: GenerationModel, request: GenerationRequest) -> OutputParsing:
    """Returns the part of the parsing that is the same for all prompts of a request."""
    plain = OutputParsing(stop=request.stop, grammar=request.grammar)
    if not isinstance(request.prompts[0], ChatPrompt):
        return plain
    tools = request.tools if request.tools is not None and request.tools.choice != "none" else None
    chat_format = model.chat_format
    if tools is not None and not has_native_tools(chat_format):
        chat_format = replace(chat_format, tools=tool_format_of(chat_format))
    if tools is None and chat_format.reasoning is None:
        return plain
    stops = (model.tokenizer.token_id(name) for name in (chat_format.tools.stop_tokens if chat_format.tools else ()))
    return replace(
        plain,
        chat_format=chat_format,
        schemas=None if tools is None else tools.schemas,
        single=tools is not None and not tools.parallel,
        allowed=None if tools is None else tools.allowed,
        unmarked=tools is not None and tools.choice == "auto" and request.grammar is None,
        shown=model.tokenizer.special_tokens_in(chat_format.markers),
        stop_tokens=frozenset(token for token in stops if token is not None),
        reasoning_budget=reasoning_budget(chat_format, request.thinking),
        reasoning_end=_reasoning_end(chat_format, model),
    )


def parsing_for_prompt(
    parsing: OutputParsing, model: GenerationModel, request: GenerationRequest, prompt: tuple[int, ...]
) -> PlannedPrompt:
    """Adds the state of reasoning at the prompt's end, and the grammar of tool calls.

    If the prompt opens the reasoning, it is closed there when the reasoning budget is 0, or when structured output must
    match from its first token.
    """
    chat_format = parsing.chat_format
    if chat_format is None:
        return parsing, prompt
    in_reasoning = _opens_reasoning(parsing, model.tokenizer, prompt)
    if in_reasoning and (parsing.reasoning_budget == 0 or request.grammar is not None):
        in_reasoning, prompt = False, (*prompt, *parsing.reasoning_end)
    parsing = replace(parsing, in_reasoning=in_reasoning)
    grammar = _grammar_with_calls(parsing, model, request)
    if grammar is not None:
        parsing = replace(parsing, grammar=grammar)
    elif request.grammar is not None and not names_tokens(request.grammar):
        # All that the client's grammar matches is the answer, even if it spells a marker: no token of it is one.
        parsing = replace(parsing, chat_format=None)
    return parsing, prompt


def _grammar_with_calls(parsing: OutputParsing, model: GenerationModel, request: GenerationRequest) -> Grammar | None:
    """Returns the grammar of an answer with tool calls. None if calls need none, or none beside the client's own."""
    tools, chat_format = request.tools, parsing.chat_format
    if tools is None or chat_format is None or chat_format.tools is None:
        return None
    if tools.choice == "required":
        build: Callable[..., Grammar | None] = tool_grammar
    elif tools.choice == "auto" and tools.input_grammars and request.grammar is None:
        build = free_grammar
    elif tools.choice == "auto" and request.grammar is not None and embeddable(request.grammar):
        build = partial(free_grammar, answer=request.grammar)
    else:
        return None
    ends = parsing.stop_tokens - model.tokenizer.eos_ids
    # Structured output matches from its first token on: see above.
    closed = parsing.reasoning_budget == 0 or request.grammar is not None
    return build(
        chat_format.tools,
        tools,
        model.tokenizer.added_tokens,
        reasoning=None if closed else chat_format.reasoning,
        in_reasoning=parsing.in_reasoning,
        ends=ends,
    )


def _opens_reasoning(parsing: OutputParsing, tokenizer: Tokenizer, prompt: tuple[int, ...]) -> bool:
    markers = parsing.chat_format.reasoning if parsing.chat_format else None
    if markers is None:
        return False
    end = tokenizer.detokenizer(continues=True, shown=parsing.shown).push(prompt[-_LAST_TOKENS:])
    return end.rstrip().endswith(markers.opens)


def _reasoning_end(chat_format: ChatFormat, model: GenerationModel) -> tuple[int, ...]:
    """Returns the tokens that close the reasoning; none if the model has no embedding for one of them."""
    markers = chat_format.reasoning
    if markers is None:
        return ()
    tokens = tuple(model.tokenizer.encode(markers.closing, special=False))
    return tokens if max(tokens) < model.facts.vocab_size else ()
