"""Escapes control tokens in client text, so that only the chat template can write them.

If a client's string contains the name of a control token, a sentinel character is inserted into the name before the
template runs. Then only the template's own markers are intact in the rendered prompt. The prompt is encoded by a second
tokenizer whose normalizer removes the sentinel: after control tokens are found, and before text is split into words.
That tokenizer shares the vocabulary of the original. Conversations without such names take neither step.
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
"""A noncharacter, which Unicode reserves for internal use. If a client sends it, it becomes U+FFFD."""
_SENTINEL_ESCAPE = "\\ufdd0"
"""The sentinel as JSON and Python's repr write it, for templates that print objects."""
_BRACKETS = {"<": ">", "[": "]", "◁": "▷"}
_WINDOW = 65_536
"""Characters per call of `search`, which holds the GIL."""

Message = Mapping[str, object]


class ControlTokens:
    """The control tokens of one model.

    All special tokens are control tokens. Other added tokens are if `markers` or the template contain them, or if their
    names have bars (`<|x|>`). The rest is text: Gemma, for example, has added tokens for HTML tags.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str, markers: Iterable[str]) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        known = template + "\n".join(markers)
        special = {token.content for token in added.values() if token.special}
        others = {token.content for token in added.values() if _is_marker(token.content, known)} - special
        # If the normalizer runs before control tokens are found, it can create a name that the client did not type.
        self._always = any(token.normalized for token in added.values() if token.content in special | others)
        self._all = NameEscaper(special | others)
        self._special = NameEscaper(special)

    def escape(self, messages: Sequence[Message], *others: object) -> tuple[bool, list[Any]]:
        """Escapes the messages and other values. Returns whether `encode` is needed for the prompt, and the copies.

        In assistant messages only special tokens are escaped: templates look for markers such as `</think>` there.
        """
        escaped = [self._all.escape(other) for other in others]
        copies = [(self._special if each.get("role") == "assistant" else self._all).escape(each) for each in messages]
        found = copies != list(messages) or escaped != list(others)
        return found or self._always, [copies, *escaped]

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """Encodes a prompt that a template rendered from escaped messages."""
        return encode(self._unescaping_tokenizer, text.replace(_SENTINEL_ESCAPE, SENTINEL), special=False, limit=limit)

    @cached_property
    def _unescaping_tokenizer(self) -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer(self._backend.model)
        added = sorted(self._backend.get_added_tokens_decoder().items())
        for special, run in itertools.groupby(added, key=lambda each: each[1].special):
            tokens = [_not_normalized(token) for _, token in run]
            (made.add_special_tokens if special else made.add_tokens)(tokens)
        assert all(made.token_to_id(token.content) == number for number, token in added)
        _remove_sentinel(made, self._backend)
        return made


class NameEscaper:
    """Inserts a sentinel into every occurrence of some names.

    A prefix of a name at the end of a string is escaped, too: the template may append the rest.
    """

    def __init__(self, names: Iterable[str]) -> None:
        names = {name for name in names if len(name) > 1}
        self._first_chars = {name[0] for name in names}
        self._longest = max(map(len, names), default=0)
        self._pattern = re.compile(_any_of(names)) if names else None
        self._prefixes = {name[:size] for name in names for size in range(1, len(name))}

    def escape(self, value: Any) -> Any:
        """Returns a copy of plain data with all strings escaped. Strings without a name are not copied."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.escape(each) for each in value])
        return value

    def _escape_text(self, text: str) -> str:
        if SENTINEL in text:
            text = text.replace(SENTINEL, "\ufffd")
        if self._pattern is None or not any(char in text for char in self._first_chars):
            return text
        pieces: list[str] = []
        done = 0
        for start in self._positions(text):
            pieces += [text[done : start + 1], SENTINEL]
            done = start + 1
        return "".join([*pieces, text[done:]]) if pieces else text

    def _positions(self, text: str) -> Iterator[int]:
        """Yields the positions at which names begin, in order."""
        assert self._pattern is not None
        position = after = 0
        while position < len(text):
            end = min(position + _WINDOW, len(text))
            found = self._pattern.search(text, position, min(end + self._longest, len(text)))
            if found is not None:
                yield found.start()
                position = after = found.start() + 1
            else:
                position = end
        for size in range(min(self._longest - 1, len(text) - after), 0, -1):
            if text[-size:] in self._prefixes:
                yield len(text) - size
                return


def _is_marker(content: str, known: str) -> bool:
    bracketed = len(content) > 2 and _BRACKETS.get(content[0]) == content[-1]
    return bracketed and (content in known or content[1] in "|｜" or content[-2] in "|｜")


def _not_normalized(token: AddedToken) -> AddedToken:
    """Returns a copy that is found in the text before the normalizer removes the sentinel."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _remove_sentinel(made: tokenizers.Tokenizer, original: tokenizers.Tokenizer) -> None:
    pre_tokenizer = original.pre_tokenizer
    remove: Any = normalizers.Replace(SENTINEL, "")
    if isinstance(original.model, models.Unigram):
        # A unigram vocabulary contains control tokens as ordinary pieces: only a split keeps text from becoming one.
        split = pre_tokenizers.Split(SENTINEL, "removed")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizer]) if pre_tokenizer else split
        made.normalizer = original.normalizer
        return
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.normalizer = normalizers.Sequence([remove, original.normalizer]) if original.normalizer else remove


def _any_of(names: Iterable[str]) -> str:
    """Returns a regular expression that matches any of the names.

    It is built from a trie: models have thousands of names, and an alternation would try them one by one.
    """
    trie: dict[str, Any] = {}
    for name in names:
        node = trie
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(trie)


def _branches(node: dict[str, Any]) -> str:
    if "" in node:
        return ""  # a name that is a prefix of others is enough to match
    options = [re.escape(char) + _branches(child) for char, child in node.items()]
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
