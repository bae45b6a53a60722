"""Parses a model's output as it streams: content, reasoning, tool calls, and the end at a stop string.

Stop strings apply to the content only: a brace in arguments or a word in the reasoning does not end an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from millstream.text.chat_format import ChatFormat, detect_chat_format
from millstream.text.detokenizer import Detokenizer
from millstream.text.output.parts import Part, PartKind
from millstream.text.output.splitter import Splitter
from millstream.text.output.stop_strings import StopMatcher
from millstream.text.tool_formats.format import Schemas
from millstream.types import ReasoningLimit


class OutputParser:
    """Push text in pieces of any size. `ended` is True once the answer is complete and no more text is needed."""

    __slots__ = ("_splitter", "_stops", "ended", "endless", "look_for_stops", "plain")

    def __init__(
        self,
        chat_format: ChatFormat | None = None,
        schemas: Schemas | None = None,
        *,
        in_reasoning: bool = False,
        stops: Sequence[str] = (),
        single: bool = False,
        allowed: frozenset[str] | None = None,
        unmarked: bool = False,
    ) -> None:
        """Without a chat format, all text is content. `in_reasoning`: the prompt has opened the reasoning already.
        `single`: the answer ends after one call. `allowed`, `unmarked`: see `Splitter`."""
        self._splitter = (
            None
            if chat_format is None
            else Splitter(
                chat_format, schemas, in_reasoning=in_reasoning, single=single, allowed=allowed, unmarked=unmarked
            )
        )
        self._stops = StopMatcher(stops) if stops else None
        self.ended = False
        self.look_for_stops = True
        """False: the content passes by the stop strings for now."""
        self.endless = not stops and not single
        """True if no text can end the answer."""
        self.plain = chat_format is None and not stops
        """True if every text is content and none is held back: nothing needs to be pushed."""

    @property
    def in_reasoning(self) -> bool:
        """True while the text is reasoning."""
        return self._splitter is not None and self._splitter.in_reasoning

    @property
    def calls(self) -> int:
        """How many tool calls are complete."""
        return 0 if self._splitter is None else self._splitter.calls

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text. None while none has matched."""
        return None if self._stops is None else self._stops.matched

    def push(self, text: str) -> list[Part]:
        """Returns the parts that `text` completes."""
        if self.ended:
            return []
        parts = [Part(PartKind.CONTENT, text, text)] if self._splitter is None else self._splitter.push(text)
        return self._until_stop(parts)

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Returns the parts that were held back. Call it when the model has ended. `cut`: a limit has ended it."""
        if self.ended:
            return []
        parts = self._until_stop([] if self._splitter is None else self._splitter.finish(cut=cut))
        if self._stops is not None and self._stops.matched is None and not self.ended:
            rest = self._stops.finish()
            parts.append(Part(PartKind.CONTENT, rest, rest))
            self.ended = self._stops.matched is not None
        return parts

    def _until_stop(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found.append(part if part.kind is not PartKind.CONTENT else self._content(part))
            if self.ended:
                break
        self.ended = self.ended or (self._splitter is not None and self._splitter.ended)
        return found

    def _content(self, part: Part) -> Part:
        if self._stops is None or not self.look_for_stops:
            return part
        text = self._stops.push(part.text)
        self.ended = self._stops.matched is not None
        return Part(PartKind.CONTENT, text, text)


class ReasoningWatch:
    """Follows the tokens of one output in its engine, and says which tokens must close its reasoning, and when.

    All that it says depends on the tokens alone, not on how they are pushed: a row that starts again is told its tokens
    again. The parser takes several times as long as the detokenizer, so it sees text only once a marker may have ended.
    """

    __slots__ = ("_count", "_detokenizer", "_ends", "_limit", "_new", "_splitter", "_text", "_unseen", "forced")

    def __init__(self, limit: ReasoningLimit, detokenizer: Callable[[], Detokenizer]) -> None:
        """`detokenizer` makes one that shows the markers."""
        chat_format = detect_chat_format(None, lambda name: False, *limit.formats)
        markers = chat_format.reasoning
        self._limit = limit
        self._new, self._detokenizer = detokenizer, detokenizer()
        self._splitter = Splitter(chat_format, {} if limit.tools else None, in_reasoning=limit.opened)
        self._ends = frozenset(marker[-1] for marker in (*markers.opens, *markers.closes)) if markers else frozenset()
        self._count = 0
        """Reasoning tokens that the parser has seen."""
        self._text = ""
        """What it has not seen yet, and of how many tokens that is."""
        self._unseen = 0
        self.forced: tuple[int, ...] = ()
        """What must come next; empty: what the model chooses."""

    @property
    def over(self) -> bool:
        """True if no reasoning can come any more."""
        return self._splitter.past_reasoning

    @property
    def due(self) -> bool:
        """True if the next token must be known before the one after it is chosen, since that one may be forced."""
        if self.forced:
            return True
        if self._count + self._unseen + 1 < self._limit.tokens:
            return False
        self._parse()
        return self._count + 1 >= self._limit.tokens and (self._splitter.in_reasoning or self._splitter.may_open)

    def push(self, tokens: Sequence[int]) -> None:
        """These are the next tokens. If they are not what was forced, something stronger forbade that."""
        splitter, most = self._splitter, self._limit.tokens
        for token in tokens:
            if self.forced:
                self.forced = self.forced[1:] if token == self.forced[0] else ()
            piece = self._detokenizer.push((token,))
            self._text += piece
            self._unseen += 1
            reached = splitter.in_reasoning and self._count + self._unseen >= most
            if reached or splitter.may_open or not self._ends.isdisjoint(piece):
                self._parse()
                if splitter.in_reasoning and self._count >= most and not self.forced:
                    self.forced = self._limit.closing

    def room(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft may be verified at once, such that none that must be forced comes after them."""
        if self.forced:
            return 0
        self._parse()
        if not self._splitter.in_reasoning and self._ends.isdisjoint(self._new().push(draft)):
            return len(draft)
        return max(0, min(len(draft), self._limit.tokens - self._count - 1))

    def _parse(self) -> None:
        """Only the last unseen token may have changed the state."""
        was_in_reasoning = self._splitter.in_reasoning
        self._splitter.push(self._text)
        if was_in_reasoning:
            self._count += self._unseen
        elif self._splitter.in_reasoning:
            self._count += 1
        self._text, self._unseen = "", 0


@dataclass(slots=True)
class Message:
    """A complete answer, assembled as a streaming client would."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part.kind:
                case PartKind.CONTENT:
                    self.content += part.text
                case PartKind.REASONING:
                    self.reasoning += part.text
                case PartKind.CALL:
                    self.calls.append((part.text, ""))
                case PartKind.ARGUMENTS:
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + part.text)
                case PartKind.VOID:
                    self.calls.pop()
