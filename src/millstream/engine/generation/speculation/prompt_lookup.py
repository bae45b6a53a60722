"""Drafts from text that a row may repeat: its own context, or a prediction that came with the request.

Edits of a file, quotes, tool calls and lists repeat what the prompt or the answer has said already. Where the latest
tokens stood before, what followed them there is the draft. A place that proved right is followed for as long as it
agrees; where the answer leaves it, the same place is looked at first to find the way back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

LONGEST = 16
"""Matches of more tokens are not told apart: a place that agrees for so long is followed without a search."""
SHORTEST = 2
"""How many of the latest tokens must have stood together before, anywhere in the text."""
NEAR = 8
"""So many tokens after the place where the answer left the text, one equal token is enough to go on there."""
CANDIDATES = 32
"""Places that a search compares, the latest first."""
INDEXED_AT_ONCE = 16384
"""Tokens of a text that one draft adds to the index, about 5 ms: a long prompt is indexed over several steps."""


class TextLookup:
    """Finds where an answer is in a text. `start`: where the answer is expected to begin."""

    def __init__(self, text: array[int], answer: array[int], *, start: int | None = None) -> None:
        """`text` and `answer` may be the same array: then the answer is looked up in its own context."""
        self._text = text
        self._answer = answer
        self._own = text is answer
        self._latest: dict[int, int] = {}
        """For two adjacent tokens, where the second one stood last."""
        self._earlier = array("i", (-1,))
        """For each token, where it stood before with the same token in front of it: a chain, like those of LZ77."""
        self._next = start
        """Where in the text the next token is expected."""
        self._agreed = LONGEST if start is not None else 0
        """How many tokens before that place are those of the answer."""
        self._left = -1
        """Where the answer left the text."""

    def append(self, tokens: Iterable[int]) -> None:
        """The answer goes on."""
        size = len(self._text)
        for token in tokens:
            at = self._next
            if at is not None:
                if at < size and self._text[at] == token:
                    self._next, self._agreed = at + 1, self._agreed + 1
                else:
                    self._left, self._next, self._agreed = at, None, 0
            self._answer.append(token)

    def draft(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may come next; none if the latest tokens are new."""
        if count < 1:
            return ()
        self._index()
        if self._next is None or self._agreed < LONGEST:
            self._search()
        return () if self._next is None else self._from(self._next, count)

    @property
    def agreed(self) -> int:
        """How many tokens before the last draft agreed with the text."""
        return self._agreed

    def _from(self, begin: int, count: int) -> tuple[int, ...]:
        found = list(self._text[begin : begin + count])
        if self._own and found:
            # What repeats itself up to the end of the context goes on to repeat itself.
            period = len(self._text) - begin
            while len(found) < count:
                found.append(found[len(found) - period])
        return tuple(found)

    def _index(self) -> None:
        text, latest, earlier = self._text, self._latest, self._earlier
        begin = len(earlier)
        # The last token of an own context is what is looked up, so it is never found.
        for at in range(begin, min(len(text) - self._own, begin + INDEXED_AT_ONCE)):
            pair = text[at - 1] << 32 | text[at]
            earlier.append(latest.get(pair, -1))
            latest[pair] = at

    def _search(self) -> None:
        """Find the place with the longest match; of equal ones the followed one, then the next one after the place
        that the answer left, then the latest."""
        answer = self._answer
        best = (self._agreed, 1, 0) if self._next is not None else (SHORTEST - 1, 0, 0)
        found = self._next
        if len(answer) >= SHORTEST:
            at = self._latest.get(answer[-2] << 32 | answer[-1], -1)
            for _ in range(CANDIDATES):
                if at < 0:
                    break
                rank = (self._match(at), 0, -self._distance(at))
                if rank > best:
                    best, found = rank, at + 1
                at = self._earlier[at]
        if found is None:
            found = self._near()
            best = (1, 0, 0)
        self._next = found
        self._agreed = 0 if found is None else best[0]

    def _match(self, at: int) -> int:
        """How many tokens up to `at` are the latest of the answer: two are."""
        text, answer = self._text, self._answer
        length, size = SHORTEST, len(answer)
        most = min(LONGEST, at + 1, size)
        while length < most and text[at - length] == answer[size - 1 - length]:
            length += 1
        return length

    def _distance(self, at: int) -> int:
        """How far it is from the place that the answer left; what stands before that, or too far away, is all the
        same."""
        ahead = at - self._left
        return ahead if self._left >= 0 and 0 <= ahead < 8 * NEAR else 8 * NEAR

    def _near(self) -> int | None:
        """A word was replaced: the text may go on right behind it."""
        if self._left < 0 or not self._answer:
            return None
        last = self._answer[-1]
        size = len(self._text) - self._own
        for at in range(self._left, min(self._left + NEAR, size)):
            if self._text[at] == last:
                return at + 1
        return None


class PromptLookup(TextLookup):
    """The context of one row, prompt and answer."""

    def __init__(self, tokens: Iterable[int]) -> None:
        context = array("i", tokens)
        super().__init__(context, context)

    def __len__(self) -> int:
        return len(self._text)


class PredictionLookup(TextLookup):
    """A text that the answer of one row is expected to be, but for some changes."""

    def __init__(self, prediction: Sequence[int], answer: Iterable[int] = ()) -> None:
        super().__init__(array("i", prediction), array("i"), start=0)
        self.append(answer)
