"""Keeps text from becoming control tokens: what a user writes is text, and only the chat template writes control.

A control token's name in a client's string is broken by a sentinel before the template runs, so the template's own
markers are the only whole ones in the rendered prompt. The prompt is then encoded by a twin of the tokenizer whose
normalizer drops the sentinel: after control tokens were found, and before text is cut into pieces. The twin shares
the vocabulary of the original. A conversation without such names takes neither step.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from millstream.text.encoding import encode

SENTINEL = "\ufdd0"
"""A noncharacter: Unicode keeps it for use inside programs. Sent by a client, it becomes U+FFFD."""
_ESCAPED = "\\ufdd0"
"""The sentinel as JSON and Python's repr write it, for templates that print objects."""
_BRACKETS = {"<": ">", "[": "]", "◁": "▷"}
_WINDOW = 65_536
"""Characters searched in one call: a search keeps the interpreter's lock."""

Message = Mapping[str, object]


class ControlTokens:
    """The control tokens of one model.

    All special tokens are control. Of the other added tokens those are that `markers` or the template name, or that
    are written with bars: Gemma has tokens for HTML tags, and those are text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str, markers: Iterable[str]) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        named = template + "\n".join(markers)
        special = {token.content for token in added.values() if token.special}
        marks = {token.content for token in added.values() if _is_mark(token.content, named)} - special
        # Where the normalizer works before control tokens are found, a name may come about that nobody has typed.
        self._always = any(token.normalized for token in added.values() if token.content in special | marks)
        self._all = Names(special | marks)
        self._special = Names(special)

    def guard(self, messages: Sequence[Message], *others: object) -> tuple[bool, list[Any]]:
        """The messages and other values with all names of control tokens broken, and whether there were any.

        An assistant's own words may hold marks that are not special: templates look for `</think>` there.
        """
        guarded = [self._all.broken(other) for other in others]
        said = [(self._special if each.get("role") == "assistant" else self._all).broken(each) for each in messages]
        found = said != list(messages) or guarded != list(others)
        return found or self._always, [said, *guarded]

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """The tokens of a prompt that a template made of guarded messages."""
        return encode(self._twin, text.replace(_ESCAPED, SENTINEL), special=False, limit=limit)

    @cached_property
    def _twin(self) -> tokenizers.Tokenizer:
        twin = tokenizers.Tokenizer(self._backend.model)
        added = sorted(self._backend.get_added_tokens_decoder().items())
        for special, run in itertools.groupby(added, key=lambda each: each[1].special):
            tokens = [_found_first(token) for _, token in run]
            (twin.add_special_tokens if special else twin.add_tokens)(tokens)
        assert all(twin.token_to_id(token.content) == number for number, token in added)
        _drop_sentinel(twin, self._backend)
        return twin


class Names:
    """Breaks any of some names in strings, also where only the beginning of one ends a string: the template may put
    the rest behind it."""

    def __init__(self, names: Iterable[str]) -> None:
        kept = {name for name in names if len(name) > 1}
        self._firsts = {name[0] for name in kept}
        self._longest = max(map(len, kept), default=0)
        self._pattern = re.compile(_expression(kept)) if kept else None
        self._beginnings = {name[:size] for name in kept for size in range(1, len(name))}

    def broken(self, value: Any) -> Any:
        """A copy of plain data with every string guarded; strings without a name are the same objects."""
        if isinstance(value, str):
            return self._broken_text(value)
        if isinstance(value, dict):
            return {self.broken(key): self.broken(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.broken(each) for each in value])
        return value

    def _broken_text(self, text: str) -> str:
        if SENTINEL in text:
            text = text.replace(SENTINEL, "\ufffd")
        if self._pattern is None or not any(first in text for first in self._firsts):
            return text
        pieces: list[str] = []
        done = 0
        for start in self._places(text):
            pieces += [text[done : start + 1], SENTINEL]
            done = start + 1
        return "".join([*pieces, text[done:]]) if pieces else text

    def _places(self, text: str) -> Iterator[int]:
        """Where names begin, each after the one before."""
        assert self._pattern is not None
        place = after = 0
        while place < len(text):
            end = min(place + _WINDOW, len(text))
            found = self._pattern.search(text, place, min(end + self._longest, len(text)))
            if found is not None:
                yield found.start()
                place = after = found.start() + 1
            else:
                place = end
        for size in range(min(self._longest - 1, len(text) - after), 0, -1):
            if text[-size:] in self._beginnings:
                yield len(text) - size
                return


def _is_mark(content: str, named: str) -> bool:
    bracketed = len(content) > 2 and _BRACKETS.get(content[0]) == content[-1]
    return bracketed and (content in named or content[1] in "|｜" or content[-2] in "|｜")


def _found_first(token: AddedToken) -> AddedToken:
    """Found in the text as it is, before the normalizer drops the sentinel."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _drop_sentinel(twin: tokenizers.Tokenizer, original: tokenizers.Tokenizer) -> None:
    cutter = original.pre_tokenizer
    drop: Any = normalizers.Replace(SENTINEL, "")
    if isinstance(original.model, models.Unigram):
        # Its vocabulary holds the control tokens as pieces: only a cut keeps text from becoming one.
        cut = pre_tokenizers.Split(SENTINEL, "removed")
        twin.pre_tokenizer = pre_tokenizers.Sequence([cut, cutter]) if cutter else cut
        twin.normalizer = original.normalizer
        return
    if cutter is not None:
        twin.pre_tokenizer = cutter
    twin.normalizer = normalizers.Sequence([drop, original.normalizer]) if original.normalizer else drop


def _expression(names: Iterable[str]) -> str:
    """A regular expression for any of the names that never tries them one by one: models have thousands."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    if "" in node:
        return ""  # the shortest name is enough to be broken
    options = [re.escape(letter) + _branches(child) for letter, child in node.items()]
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
