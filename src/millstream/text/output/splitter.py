"""Splits a model's streamed output into content, reasoning and tool calls.

The result does not depend on how the text is cut into pieces. No I/O, clock or threads.
"""

from __future__ import annotations

from millstream.text.chat_format import ChatFormat
from millstream.text.output.call_starts import begins_bare_call, begins_next_call, without_cut_marker
from millstream.text.output.markers import MarkerFinder
from millstream.text.output.parts import Part, PartKind, StreamedCall, complete_calls
from millstream.text.output.whole_answer import WholeAnswer
from millstream.text.tool_formats.format import Block, NotACall, Schemas, ToolCall, first_group
from millstream.text.tool_formats.values import arguments_json


class Splitter:
    """The state machine. `in_reasoning`: the prompt has opened the reasoning already. `schemas`: of the tools, None for
    no tools. `single`: the text after the first call is ignored. `allowed`: names that may be called, None for all.
    `unmarked`: an answer that is nothing but calls in JSON, without markers, is calls."""

    def __init__(
        self,
        chat_format: ChatFormat,
        schemas: Schemas | None,
        *,
        in_reasoning: bool = False,
        single: bool = False,
        allowed: frozenset[str] | None = None,
        unmarked: bool = False,
    ) -> None:
        self._single = single
        self._allowed = allowed
        known = (schemas or {}).items()
        self._schemas: Schemas = {name: schema for name, schema in known if allowed is None or name in allowed}
        tools = chat_format.tools
        self._format = tools if schemas is not None else None
        reasoning = chat_format.reasoning
        opens, closes = (reasoning.opens, reasoning.closes) if reasoning else ((), ())
        hides_markers = tools is not None and (schemas is not None or tools.reasoning is not None)
        self._hidden = frozenset(tools.hidden_markers if tools and hides_markers else ())
        self._blocks = {block.start: block for block in (self._format.blocks if self._format else ())}
        self._opens = frozenset(opens)
        self._start_markers = MarkerFinder([*opens, *closes, *self._hidden, *self._blocks])
        """At the start of an answer or after a marker: only there can reasoning open."""
        self._content_markers = MarkerFinder([*self._hidden, *self._blocks])
        self._reasoning_ends = MarkerFinder(closes)
        self.in_reasoning = in_reasoning and reasoning is not None
        self.calls = 0
        """Calls that are complete."""
        self._step = self._reasoning if self.in_reasoning else self._content
        self._buffer = ""
        self._parts: list[Part] = []
        self._at_start = True
        """True while only white space has come since the start of the answer or the last marker."""
        self._after_marker = False
        """True once there was a marker: white space after one is not content."""
        self._has_reasoned = False
        """True once the reasoning has had any text but white space."""
        self._block = Block("")
        self._block_ends = MarkerFinder(())
        self._searched = 0
        """How much of the buffer holds no end of the block."""
        self._skip_head = False
        """True if this block cannot be streamed and is parsed as a whole."""
        self._call = StreamedCall("", "")
        self._cut = False
        unmarked = unmarked and self._format is not None and self._format.bare is None
        self._whole_answer = WholeAnswer(self._schemas) if unmarked else None
        """Until the answer has begun with anything else."""

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        return self._run(final=False)

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Returns the parts that were held back. Call it when the text has ended.

        `cut`: a limit ended it, not the model. Then an unfinished call is no text: its markup is dropped.
        """
        self._cut = cut
        self._run(final=True)
        self._emit(PartKind.MARKUP, len(self._buffer) if cut else 0)
        return self._parts

    def _run(self, *, final: bool) -> list[Part]:
        self._parts = []
        while not self.ended and self._step(final):
            pass
        return self._parts

    @property
    def ended(self) -> bool:
        return self._single and self.calls > 0

    @property
    def may_open(self) -> bool:
        """True where reasoning may open: at the start of the answer, or after a marker."""
        return self._at_start and self._step == self._content

    @property
    def past_reasoning(self) -> bool:
        """True if no reasoning can follow: content has begun, and no marker ends it."""
        return self._step == self._content and not self._at_start and not self._content_markers

    # Each step consumes text of the buffer. It returns True if the next step can run, False to wait for more text.

    def _content(self, final: bool) -> bool:
        if self._at_start:
            entered = self._start(final)
            if entered is not None:
                return entered
        position, marker = self._content_markers.find(self._buffer, final=final)
        text = self._buffer[:position]
        if not marker and final:
            self._emit(PartKind.CONTENT, without_cut_marker(text, self._content_markers) if self._cut else len(text))
            return False
        # White space before a marker belongs to the marker, so it is held back.
        length = len(text.rstrip()) if self._content_markers else position
        self._emit(PartKind.CONTENT, length)
        return self._enter(marker, position - length) if marker else False

    def _start(self, final: bool) -> bool | None:
        """At the start of an answer or after a marker, where reasoning may open. Returns None if content begins."""
        stripped = self._buffer.lstrip()
        blank = len(self._buffer) - len(stripped)
        if not stripped:
            if final:
                self._emit(PartKind.MARKUP if self._after_marker else PartKind.CONTENT, blank)
            return False
        position, marker = self._start_markers.find(stripped, final=final)
        if position == 0 or (self._cut and without_cut_marker(stripped, self._start_markers) == 0):
            return self._enter(marker, blank) if marker else False
        if self._whole_answer is not None:
            if self._whole_answer.can_be_calls(stripped):
                return self._take_whole_answer() if final else False
            self._whole_answer = None
        if (bare := begins_bare_call(stripped, self._format, self._schemas, final=final, cut=self._cut)) is None:
            return False
        if bare:
            self._enter_block(Block(""), 0)
            return True
        self._at_start = False
        if self._after_marker:
            self._emit(PartKind.MARKUP, blank)
        return None

    def _take_whole_answer(self) -> bool | None:
        """At the end of an answer without markers: calls, or else content."""
        assert self._whole_answer is not None
        try:
            self._emit_calls(self._whole_answer.calls(), self._buffer)
        except NotACall:
            self._whole_answer = None
            return self._start(final=True)
        return False

    def _enter(self, marker: str, blank: int) -> bool:
        if marker in self._blocks:
            self._whole_answer = None
            self._enter_block(self._blocks[marker], blank + len(marker))
            return True
        self._emit(PartKind.MARKUP, blank + len(marker))
        self._at_start = self._after_marker = True
        if marker in self._opens and marker not in self._hidden:
            self.in_reasoning, self._has_reasoned, self._step = True, False, self._reasoning
        return True

    def _reasoning(self, final: bool) -> bool:
        position, marker = self._reasoning_ends.find(self._buffer, final=final)
        text = self._buffer[:position]
        if self._cut and not marker:
            text = text[: without_cut_marker(text, self._reasoning_ends)]
        if not self._has_reasoned:
            blank = len(text) - len(text.lstrip())
            if blank == len(text) and not marker and not final:
                return False
            self._emit(PartKind.MARKUP, blank)
            text = text[blank:]
            self._has_reasoned = bool(text)
        length = len(text) if final and not marker else len(text.rstrip())
        self._emit(PartKind.REASONING, length)
        if not marker:
            return False
        self._emit(PartKind.MARKUP, len(text) - length + len(marker))
        self.in_reasoning, self._at_start, self._after_marker, self._step = False, True, True, self._content
        return True

    def _enter_block(self, block: Block, searched: int) -> None:
        self._block, self._searched, self._skip_head = block, searched, False
        self._block_ends = MarkerFinder([*block.ends, block.start])
        self._step = self._calls

    def _calls(self, final: bool) -> bool:
        """Inside a block, before a call. The buffer holds the block, including its start marker."""
        head = self._format.head if self._format and not self._skip_head else None
        if head is not None and (found := head.match(self._buffer)):
            self._begin_call(found[0], first_group(found.groups()))
            return True
        position, marker = self._block_ends.find(self._buffer, final=final, start=self._searched)
        if marker == self._block.start and marker:
            # The model forgot to end the block and begins a new one.
            self._take_block(self._buffer[:position])
            self._enter_block(self._block, len(marker))
            return True
        if not marker and not final:
            self._searched = position  # blocks can be long: do not search the same text twice
            return False
        self._take_block(self._buffer[: position + len(marker)], cut=self._cut and not marker)
        self._step = self._content
        return bool(self._buffer)

    def _take_block(self, source: str, *, cut: bool = False) -> None:
        """Parses a complete block. If it holds no calls, it is content. `cut`: its end is missing."""
        assert self._format is not None
        try:
            if cut and (self._block.ends or not source.rstrip().endswith(("]", ")", "}"))):
                raise NotACall("the end is missing")
            self._emit_calls(self._format.parse(source, self._schemas), source)
        except NotACall:
            self._emit(PartKind.MARKUP if cut else PartKind.CONTENT, len(source))
            self._at_start = False

    def _emit_calls(self, calls: list[ToolCall], source: str) -> None:
        """Emits complete calls. Raises `NotACall` if they may not be called or are not JSON."""
        if self._allowed is not None and any(call.name not in self._allowed for call in calls):
            raise NotACall("not an allowed function")
        found = [(call.name, arguments_json(call)) for call in calls]
        self._buffer = self._buffer[len(source) :]
        self._parts += complete_calls(found[:1] if self._single else found, source)
        self.calls += len(found)
        self._at_start = self._after_marker = True

    def _begin_call(self, head: str, name: str) -> None:
        self._call = StreamedCall(head, name)
        if self._allowed is not None and self._call.name not in self._allowed:
            self._searched, self._skip_head, self._step = len(head), True, self._calls
            return
        self._buffer = self._buffer[len(head) :]
        self._step = self._arguments

    def _arguments(self, final: bool) -> bool:
        call = self._call
        self._buffer = self._buffer[call.feed(self._buffer) :]
        if call.invalid or (final and not call.done and not self._cut):
            return self._abandon_call()
        self._parts += call.take_parts()
        if not call.done:
            if final and not call.emitted:
                self._parts.append(Part(PartKind.MARKUP, "", call.source))
            return False
        self.calls += 1
        self._step = self._after_call
        return True

    def _abandon_call(self) -> bool:
        """The arguments are not valid JSON.

        If a part of the call may have been emitted, for any way to cut the text, the call is void and its source
        becomes content. Otherwise the whole block can still be parsed leniently.
        """
        call = self._call
        self._buffer = call.source + self._buffer
        if not call.can_emit:
            self._searched, self._skip_head, self._step = len(call.head), True, self._calls
            return True
        if call.emitted:
            self._parts.append(Part(PartKind.VOID, "", ""))
        self._emit(PartKind.CONTENT, len(call.source))
        self._at_start, self._step = False, self._content
        return bool(self._buffer)

    def _after_call(self, final: bool) -> bool:
        """After the arguments of a call: the next call, or the end of the block."""
        assert self._format is not None
        assert self._format.head is not None
        position, marker = self._block_ends.find(self._buffer, final=final)
        found = self._format.head.search(self._buffer)
        if found is not None and (not marker or found.start() <= position):
            self._drop_separators(found.start())
            self._begin_call(found[0], first_group(found.groups()))
            return True
        if not marker:
            if final and not (self._cut and begins_next_call(self._buffer, self._format, self._schemas)):
                self._drop_separators(len(self._buffer))
            return False
        if marker == self._block.start:
            before = len(self._buffer[:position].rstrip())
            self._drop_separators(before)
            self._enter_block(self._block, position - before + len(marker))
            return True
        self._drop_separators(position)
        self._emit(PartKind.MARKUP, len(marker))
        self._at_start, self._after_marker, self._step = True, True, self._content
        return True

    def _drop_separators(self, count: int) -> None:
        """Drops separators between calls, such as commas and brackets. Other text must not be lost: it is content."""
        assert self._format is not None
        separators = self._format.separators.match(self._buffer[:count])
        length = separators.end() if separators else 0
        self._emit(PartKind.MARKUP, length)
        self._emit(PartKind.CONTENT, count - length)

    def _emit(self, kind: PartKind, count: int) -> None:
        if count:
            text = self._buffer[:count]
            self._buffer = self._buffer[count:]
            self._parts.append(Part(kind, "" if kind is PartKind.MARKUP else text, text))
