"""From a model's text to its parts: content, thoughts and calls. Pure, and the same for every cut of the text."""

from __future__ import annotations

import json
from typing import Any

from millstream.text.marks import Marks
from millstream.text.parts import Kind, Part, StreamedCall
from millstream.text.style import Style
from millstream.text.tool_formats.format import Block, NotACall, Schemas, ToolCall

_LONGEST_BARE_HEAD = 256
"""A call without a marker must show itself within so many letters, so that other answers are not kept waiting."""


class Splitter:
    """`thinking`: the prompt has opened a block of thoughts already. `schemas`: of the tools, None for no tools.
    `single`: the text after the first call is not read."""

    def __init__(self, style: Style, schemas: Schemas | None, *, thinking: bool = False, single: bool = False) -> None:
        self._single = single
        self._schemas: Schemas = schemas or {}
        self._format = style.tools if schemas is not None else None
        marks = style.reasoning
        opens, closes = (marks.opens, marks.closes) if marks else ((), ())
        own = style.tools is not None and (schemas is not None or style.tools.reasoning is not None)
        self._silent = frozenset(style.tools.silent if style.tools and own else ())
        self._blocks = {block.start: block for block in (self._format.blocks if self._format else ())}
        self._opens = frozenset(opens)
        self._opening = Marks([*opens, *closes, *self._silent, *self._blocks])
        self._inside = Marks([*self._silent, *self._blocks])
        self._closing = Marks(closes)
        self.thinking = thinking and marks is not None
        self.calls = 0
        """Calls that are complete."""
        self._step = self._reasoning if self.thinking else self._content
        self._buffer = ""
        self._parts: list[Part] = []
        self._fresh = True
        """Nothing but blanks since the answer's beginning or the last marker."""
        self._marked = False
        """Whether there was a marker yet: blanks after one are not content."""
        self._thought = False
        self._block = Block("")
        self._ends = Marks(())
        self._lead = 0
        self._headless = False
        self._call = StreamedCall("", "")

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        """The text is over: what was held back comes out, as whatever it turned out to be."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Part]:
        self._parts = []
        while not self.ended and self._step(final):
            pass
        return self._parts

    @property
    def ended(self) -> bool:
        return self._single and self.calls > 0

    # Each step reads on from the buffer; true if there is more to do, false to wait for more text.

    def _content(self, final: bool) -> bool:
        if self._fresh:
            entered = self._begin(final)
            if entered is not None:
                return entered
        place, marker = self._inside.find(self._buffer, final=final)
        words = self._buffer[:place]
        if not marker and final:
            self._emit(Kind.CONTENT, len(words))
            return False
        # Blanks before a marker belong to it, so they wait.
        spoken = len(words.rstrip()) if self._inside else place
        self._emit(Kind.CONTENT, spoken)
        return self._enter(marker, place - spoken) if marker else False

    def _begin(self, final: bool) -> bool | None:
        """The place where thoughts may open. None: content begins."""
        stripped = self._buffer.lstrip()
        blank = len(self._buffer) - len(stripped)
        if not stripped:
            if final:
                self._emit(Kind.MARKUP if self._marked else Kind.CONTENT, blank)
            return False
        place, marker = self._opening.find(stripped, final=final)
        if place == 0:
            return self._enter(marker, blank) if marker else False
        if (bare := self._is_bare(stripped, final)) is None:
            return False
        if bare:
            self._enter_block(Block(""), 0)
            return True
        self._fresh = False
        if self._marked:
            self._emit(Kind.MARKUP, blank)
        return None

    def _is_bare(self, text: str, final: bool) -> bool | None:
        """Whether a call without a marker begins here; None if that cannot be told yet."""
        pattern = self._format.bare if self._format else None
        if pattern is None or text[0] not in "{[":
            return False
        found = pattern.match(text)
        if found is not None:
            return found.end() <= _LONGEST_BARE_HEAD and _name_in(found.groups()) in self._schemas
        return None if not final and len(text) < _LONGEST_BARE_HEAD else False

    def _enter(self, marker: str, blank: int) -> bool:
        if marker in self._blocks:
            self._enter_block(self._blocks[marker], blank + len(marker))
            return True
        self._emit(Kind.MARKUP, blank + len(marker))
        self._fresh = self._marked = True
        if marker in self._opens and marker not in self._silent:
            self.thinking, self._thought, self._step = True, False, self._reasoning
        return True

    def _reasoning(self, final: bool) -> bool:
        place, marker = self._closing.find(self._buffer, final=final)
        words = self._buffer[:place]
        if not self._thought:
            begin = len(words) - len(words.lstrip())
            if begin == len(words) and not marker and not final:
                return False
            self._emit(Kind.MARKUP, begin)
            words = words[begin:]
            self._thought = bool(words)
        spoken = len(words) if final and not marker else len(words.rstrip())
        self._emit(Kind.REASONING, spoken)
        if not marker:
            return False
        self._emit(Kind.MARKUP, len(words) - spoken + len(marker))
        self.thinking, self._fresh, self._marked, self._step = False, True, True, self._content
        return True

    def _enter_block(self, block: Block, lead: int) -> None:
        self._block, self._lead, self._headless = block, lead, False
        self._ends = Marks([*block.ends, block.start])
        self._step = self._calls

    def _calls(self, final: bool) -> bool:
        """Inside a block, before a call. The buffer holds the block from its marker on."""
        head = self._format.head if self._format and not self._headless else None
        if head is not None and (found := head.match(self._buffer)):
            self._begin_call(found[0], _name_in(found.groups()))
            return True
        place, marker = self._ends.find(self._buffer, final=final, start=self._lead)
        if marker == self._block.start and marker:
            # A new one begins where the last one should have ended.
            self._take(self._buffer[:place])
            self._enter_block(self._block, len(marker))
            return True
        if not marker and not final:
            self._lead = place  # what was searched is not searched again: blocks can be long
            return False
        self._take(self._buffer[: place + len(marker)])
        self._step = self._content
        return bool(self._buffer)

    def _take(self, source: str) -> None:
        """A block that is read as a whole: calls, or text."""
        assert self._format is not None
        try:
            calls = [(call.name, _written(call)) for call in self._format.parse(source, self._schemas)]
        except NotACall:
            self._emit(Kind.CONTENT, len(source))
            self._fresh = False
            return
        self._buffer = self._buffer[len(source) :]
        for name, arguments in calls[:1] if self._single else calls:
            self._parts.append(Part(Kind.CALL, name, source))
            self._parts.append(Part(Kind.ARGUMENTS, arguments, ""))
            source = ""
        self.calls += len(calls)
        self._fresh = self._marked = True

    def _begin_call(self, head: str, name: str) -> None:
        self._call = StreamedCall(head, name)
        self._buffer = self._buffer[len(head) :]
        self._step = self._arguments

    def _arguments(self, final: bool) -> bool:
        call = self._call
        self._buffer = self._buffer[call.feed(self._buffer) :]
        if call.broken or (final and not call.done):
            return self._give_up()
        self._parts += call.tell()
        if not call.done:
            return False
        self.calls += 1
        self._step = self._glue
        return True

    def _give_up(self) -> bool:
        """It is no JSON. What may have been told, by some cut of the text, is void; what cannot have been may still be
        read as a whole."""
        call = self._call
        self._buffer = call.source + self._buffer
        if not call.tellable:
            self._lead, self._headless, self._step = len(call.head), True, self._calls
            return True
        if call.told:
            self._parts.append(Part(Kind.VOID, "", ""))
        self._emit(Kind.CONTENT, len(call.source))
        self._fresh, self._step = False, self._content
        return bool(self._buffer)

    def _glue(self, final: bool) -> bool:
        """After the arguments of a call: the next one, or the end of the block."""
        assert self._format is not None
        assert self._format.head is not None
        place, marker = self._ends.find(self._buffer, final=final)
        found = self._format.head.search(self._buffer)
        if found is not None and (not marker or found.start() <= place):
            self._drop(found.start())
            self._begin_call(found[0], _name_in(found.groups()))
            return True
        if not marker:
            if final:
                self._drop(len(self._buffer))
            return False
        if marker == self._block.start:
            before = len(self._buffer[:place].rstrip())
            self._drop(before)
            self._enter_block(self._block, place - before + len(marker))
            return True
        self._drop(place)
        self._emit(Kind.MARKUP, len(marker))
        self._fresh, self._marked, self._step = True, True, self._content
        return True

    def _drop(self, count: int) -> None:
        """What stands between calls. More than commas and brackets is text, and not to be lost."""
        assert self._format is not None
        glue = self._format.glue.match(self._buffer[:count])
        length = glue.end() if glue else 0
        self._emit(Kind.MARKUP, length)
        self._emit(Kind.CONTENT, count - length)

    def _emit(self, kind: Kind, count: int) -> None:
        if count:
            text = self._buffer[:count]
            self._buffer = self._buffer[count:]
            self._parts.append(Part(kind, "" if kind is Kind.MARKUP else text, text))


def _name_in(groups: tuple[Any, ...]) -> str:
    """Patterns have a group for each way in which a name may stand."""
    return next((str(group) for group in groups if group), "")


def _written(call: ToolCall) -> str:
    """The arguments as JSON that every client can read."""
    try:
        text = json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False)
        text.encode()
        call.name.encode()
    except UnicodeEncodeError:
        raise NotACall("half of a surrogate pair") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise NotACall(str(error)) from error
    return text
