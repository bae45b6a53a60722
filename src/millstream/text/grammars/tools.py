"""Builds grammars of answers that call tools, in llguidance's Lark dialect, from the syntax of a tool format.

`tool_grammar` forces a call. `free_grammar` allows any text, but once the model begins a call of a tool that takes free
text, it enforces that tool's grammar.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from millstream.errors import BadRequest
from millstream.exact_json import loads
from millstream.text.grammars.json_escaped import CannotRewrite
from millstream.text.grammars.limits import MAX_TOOL_BYTES, check_schema
from millstream.text.grammars.rule_writer import FREE, RuleWriter
from millstream.text.tool_formats.format import CallSyntax, ReasoningMarkers, ToolFormat
from millstream.types import Grammar, ToolUse

MAX_CALLS = 8
"""Most calls in one answer that is forced to call. A weak model would otherwise never end its list."""

_SPACE = "[ \\n]{0,2}"
"""White space that may precede the end of an answer: many models write a line break and then end."""


def tool_grammar(
    tool_format: ToolFormat,
    use: ToolUse,
    tokens: Mapping[str, int],
    *,
    reasoning: ReasoningMarkers | None = None,
    in_reasoning: bool = False,
    ends: Collection[int] = (),
) -> Grammar:
    """Returns a grammar of answers that call at least one tool.

    `tokens` maps the tokenizer's added tokens to their ids. With `reasoning`, reasoning may precede the calls;
    `in_reasoning`: it has begun already. `ends`: tokens that end an answer, besides the tokenizer's own. Raises
    `BadRequest` if a schema is too large, the grammar of a tool cannot be enforced, or no tool may be called.
    """
    for tool in use.tools:
        check_schema(tool["function"].get("parameters") or {}, "tools", max_bytes=MAX_TOOL_BYTES)
    functions = _callable(use)
    if not functions:
        wanted = f"the function {use.name!r} is not" if use.name else "no tool is"
        raise BadRequest(f"a call is required, but {wanted} among the allowed tools", param="tool_choice")
    writer = RuleWriter(tokens)
    syntax = tool_format.syntax
    calls = []
    for function in functions:
        before = writer.named(syntax.before, "{name}", function["name"])
        arguments = _input(writer, syntax, use, function["name"])
        if arguments is None:
            arguments = writer.arguments(syntax.arguments, function.get("parameters") or {})
        calls.append(writer.sequence(before, arguments, writer.text(syntax.after)))
    call = writer.rule("call", " | ".join(calls))
    more = ""
    if syntax.many and use.parallel and use.name is None:
        more = f"({writer.sequence(writer.text(syntax.between), call)}){{0,{MAX_CALLS - 1}}}"
    answer = writer.sequence(writer.text(syntax.opening), call, more, _end(writer, syntax, ends))
    return _grammar(writer, answer, reasoning, in_reasoning)


def free_grammar(
    tool_format: ToolFormat,
    use: ToolUse,
    tokens: Mapping[str, int],
    *,
    reasoning: ReasoningMarkers | None = None,
    in_reasoning: bool = False,
    ends: Collection[int] = (),
    answer: Grammar | None = None,
) -> Grammar | None:
    """Returns a grammar of any text and calls, in which calls of tools with an input grammar match it. With `answer`,
    which must be `embeddable`: of calls alone, or of text that matches it.

    Other calls are free but for their names. Returns None if the format does not begin a call with a marker: then
    calls cannot be told from text while the model writes them. Raises `BadRequest` as `tool_grammar` does.
    """
    writer = RuleWriter(tokens)
    syntax = tool_format.syntax
    written = syntax.opening + syntax.before
    marker = next((block.start for block in tool_format.blocks if block.start and written.startswith(block.start)), "")
    functions = _callable(use)
    if not functions or not marker or not writer.is_simple(marker):
        return None
    opening = syntax.opening[len(marker) :]
    skipped = 0 if syntax.opening else len(marker)
    calls = []
    for function in functions:
        before = writer.named(syntax.before[skipped:], "{name}", function["name"])
        arguments = _input(writer, syntax, use, function["name"])
        if arguments is None:
            free = writer.free_arguments(syntax.arguments, syntax.after, tool_format.inner_markers)
            calls.append(writer.sequence(before, free))
        else:
            calls.append(writer.sequence(before, arguments, writer.text(syntax.after)))
    call = writer.rule("call", " | ".join(calls))
    block = call
    if syntax.opening:
        more = f"({writer.sequence(writer.text(syntax.between), call)})*" if syntax.many else ""
        block = writer.sequence(writer.text(opening), call, more, f"/{_SPACE}/", writer.text(syntax.closing))
    stops = _stops(ends)
    if answer is not None:
        calls_alone = f"(/{_SPACE}/ {writer.text(marker)} {block})+ /{_SPACE}/"
        body = f"({calls_alone} | {writer.json(loads(answer.source))}) {stops}"
    elif marker in tokens:
        body = writer.sequence(f"({FREE} {writer.text(marker)} {block})*", FREE, stops)
    else:
        body = writer.sequence(f"({writer.until(marker)} {block})*", writer.without(marker), stops)
    return _grammar(writer, body, reasoning, in_reasoning)


def embeddable(grammar: Grammar) -> bool:
    """True if a grammar can be a part of another. Rules of a client's own grammar could clash with ours."""
    return grammar.kind == "json_schema"


def _callable(use: ToolUse) -> list[dict[str, Any]]:
    """Returns the functions that may be called."""
    functions = [tool["function"] for tool in use.tools]
    allowed = [each for each in functions if use.allowed is None or each["name"] in use.allowed]
    return [each for each in allowed if use.name in (None, each["name"])]


def _input(writer: RuleWriter, syntax: CallSyntax, use: ToolUse, name: str) -> str | None:
    """Returns the arguments of a tool with an input grammar; None for other tools."""
    grammar = dict(use.input_grammars).get(name)
    if grammar is None:
        return None
    try:
        return writer.input(syntax.arguments, grammar)
    except CannotRewrite as error:
        raise BadRequest(
            f"the grammar of the tool {name!r} cannot be enforced: it uses {error}", param="tools"
        ) from error


def _grammar(writer: RuleWriter, answer: str, reasoning: ReasoningMarkers | None, in_reasoning: bool) -> Grammar:
    if reasoning is not None:
        answer = writer.sequence(writer.reasoning(reasoning, opened=in_reasoning), answer)
    return Grammar("lark", "\n".join([f"start: {answer}", *writer.rules]))


def _end(writer: RuleWriter, syntax: CallSyntax, tokens: Collection[int]) -> str:
    """Matches what may follow the last call.

    A model that ends there often writes the start of what stands between two calls first. If it then had to call again,
    it would repeat the call until `MAX_CALLS`.
    """
    if syntax.closing:
        return writer.sequence(f"/{_SPACE}/", writer.text(syntax.closing), f"/{_SPACE}/", _stops(tokens))
    # One terminal: the lexer prefers the longer one, which would be what stands between two calls.
    separator = re.escape(syntax.between.strip())
    return writer.sequence(f"/({separator})?{_SPACE}/", _stops(tokens))


def _stops(tokens: Collection[int]) -> str:
    stops = " | ".join(f"<[{token}]>" for token in sorted(tokens))
    return f"({stops})?" if stops else ""
