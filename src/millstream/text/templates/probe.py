"""Finds out what a chat template can render: small conversations are rendered, and their words looked for.

A template refuses what it does not support, or drops it without a word; both tell the same here. This runs in the
template's own process, once per model. `template_fit` changes conversations accordingly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.errors import BadRequest
from millstream.text.templates.abilities import Arguments, SystemRole, TemplateAbilities, TextWithCalls
from millstream.text.templates.template import Message

Render = Callable[..., str]

BLANKS = ("", " ", "…")
_TOOL = "probe_tool"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}},
        },
    }
]
_IDS = ("probecall", "probecal2")  # Mistral's templates refuse ids that are not nine letters and digits


def probe(render: Render) -> TemplateAbilities:
    """Returns the abilities of a template. `render` is `ChatTemplate.render`."""
    return _Prober(render).abilities()


def _system(word: str) -> Message:
    return {"role": "system", "content": word}


def _user(word: str) -> Message:
    return {"role": "user", "content": word}


def _assistant(word: str, **more: object) -> Message:
    return {"role": "assistant", "content": word, **more}


def _result(word: str, number: int = 0) -> Message:
    return {"role": "tool", "content": word, "tool_call_id": _IDS[number], "name": _TOOL}


class _Prober:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._arguments = Arguments.EITHER

    def abilities(self) -> TemplateAbilities:
        system = self._system_role()
        tools = self._shows([_user("word-a")], _TOOL, tools=True, ordered=False)
        blank = next((each for each in BLANKS if self._shows([_user("word-a"), _assistant(each), _user("word-b")])), "")
        return TemplateAbilities(
            system=system,
            alternates=not self._repeats(),
            user_first=not self._begins_freely(system, tools),
            blank_assistant=blank,
            tools=tools,
            **self._with_calls(tools),
            **self._stability(system, tools),
        )

    def _system_role(self) -> SystemRole:
        system, user, answer, note = _system("word-s"), _user("word-u"), _assistant("word-v"), _system("word-w")
        if not self._shows([system, user]):
            return SystemRole.NONE
        later = ([system, user, note], [system, user, answer, note], [user, answer, note, _user("word-x")])
        return SystemRole.ANYWHERE if all(self._shows(each) for each in later) else SystemRole.FIRST

    def _repeats(self) -> bool:
        """True if messages of one role may follow each other."""
        first, last = _user("word-a"), _user("word-d")
        answers = _assistant("word-b"), _assistant("word-c")
        return self._shows([first, last]) and self._shows([first, *answers, last])

    def _begins_freely(self, system: SystemRole, tools: bool) -> bool:
        """True if a conversation may begin with an assistant message, or have no user message at all."""
        answer, user = _assistant("word-b"), _user("word-c")
        tried: list[list[Message]] = [[answer, user], [answer]]
        if system is not SystemRole.NONE:
            lead = _system("word-a")
            tried += [[lead], [lead, answer], [lead, answer, user]]
        return all(self._shows(each, tools=with_tools) for each in tried for with_tools in {False, tools})

    def _with_calls(self, tools: bool) -> dict[str, Any]:
        self._arguments = self._argument_form(tools)
        user, result, after = _user("word-a"), _result("word-c"), [_assistant("word-d"), _user("word-e")]
        calls = self._shows([user, self._call("word-b"), result], tools=tools)
        orphaned = ([user, result], [user, _assistant("word-b"), result, *after])
        orphans = all(self._shows(each, tools=tools) for each in orphaned)
        if not calls:
            return {"calls": False, "results": orphans, "orphan_results": orphans, "user_after_result": orphans}
        two = [self._call("word-b", "word-x"), result, _result("word-d", 1)]
        freely = ([self._call("word-b"), result, after[1]], [self._call("word-b"), after[1]])
        return {
            "arguments": self._arguments,
            "orphan_results": orphans,
            "parallel_calls": self._shows([user, *two], tools=tools, ordered=False),
            "user_after_result": all(self._shows([user, *each], tools=tools) for each in freely),
            "text_with_calls": self._text_with_calls(user, [result, *after], tools),
        }

    def _argument_form(self, tools: bool) -> Arguments:
        user, result = _user("word-a"), _result("word-c")
        objects, strings = (
            self._shows([user, self._call("word-b", form=form), result], tools=tools)
            for form in (Arguments.OBJECT, Arguments.STRING)
        )
        if objects:
            return Arguments.EITHER if strings else Arguments.OBJECT
        return Arguments.STRING

    def _text_with_calls(self, user: Message, after: list[Message], tools: bool) -> TextWithCalls:
        call = self._call("word-b")
        if self._shows([user, {**call, "content": "word-t"}, *after], tools=tools, ordered=False):
            return TextWithCalls.TOGETHER
        if self._shows([user, _assistant("word-t"), call, *after], tools=tools, ordered=False):
            return TextWithCalls.APART
        return TextWithCalls.LOST

    def _call(self, *words: str, form: Arguments | None = None) -> Message:
        form = self._arguments if form is None else form
        calls = [
            {
                "id": _IDS[number],
                "type": "function",
                "function": {
                    "name": _TOOL,
                    "arguments": f'{{"at": "{word}"}}' if form is Arguments.STRING else {"at": word},
                },
            }
            for number, word in enumerate(words)
        ]
        return _assistant("", tool_calls=calls)

    def _stability(self, system: SystemRole, tools: bool) -> dict[str, Any]:
        first, answer, second = _user("word-a"), _assistant("word-b"), _user("word-c")
        lead = [] if system is SystemRole.NONE else [_system("word-s")]
        turns = [[*lead, first], [*lead, first, answer, second]]
        turns.append([*turns[-1], _assistant("word-d"), _user("word-e")])
        reasoned = [first, {**answer, "reasoning_content": "word-r"}, second]
        return {
            "keeps_turns": self._keeps(turns, tools=False),
            "keeps_turns_with_tools": not tools or self._keeps(turns, tools=True),
            "keeps_reasoning": self._shows(reasoned, "word-r", ordered=False),
        }

    def _keeps(self, turns: list[list[Message]], *, tools: bool) -> bool:
        """True if each turn's prompt begins with all messages of the turn before, rendered the same."""
        texts = [self._text(turn, tools) for turn in turns]
        for turn, before, after in zip(turns, texts, texts[1:], strict=False):
            if before is None or after is None:
                continue  # refused, which says nothing about stability
            last = str(turn[-1]["content"])
            end = before.find(last) + len(last)
            if before[:end] != after[:end]:
                return False
        return True

    def _shows(self, messages: list[Message], *extra: str, tools: bool = False, ordered: bool = True) -> bool:
        """True if all words of the messages are rendered, in their order."""
        text = self._text(messages, tools)
        if text is None:
            return False
        found = [text.find(word) for word in (*_words(messages), *extra)]
        return min(found, default=0) >= 0 and (not ordered or found == sorted(found))

    def _text(self, messages: list[Message], tools: bool) -> str | None:
        try:
            return self._render(messages, **({"tools": _TOOLS} if tools else {}))
        except BadRequest:
            return None


def _words(messages: list[Message]) -> list[str]:
    words: list[str] = []
    for message in messages:
        words += [str(message["content"]).strip(" …")]
        for call in message.get("tool_calls", ()):  # type: ignore[attr-defined]
            arguments = call["function"]["arguments"]
            words.append(arguments["at"] if isinstance(arguments, dict) else arguments.split('"')[3])
    return [word for word in words if word]
