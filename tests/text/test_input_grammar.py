"""Grammars of free-text inputs as parts of other grammars: in JSON strings and between markers."""

from __future__ import annotations

import functools
import json
import random
import re

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.text.grammars.json_escaped import CannotRewrite, escaped_regex
from millstream.text.grammars.lark import COMMON
from millstream.text.grammars.tool_input import MAX_BYTES, input_rules, symbol
from millstream.types import Grammar
from support.tiers import examples

EOS = 261
END = "\n</parameter>\n"
CHANGES = Grammar(
    "lark",
    r"""
start: head section+ tail
head: "*** Begin Changes" LF
tail: "*** End Changes" LF?

section: create | remove | change
create: "*** Create: " path LF added+
remove: "*** Remove: " path LF
change: "*** Change: " path LF (place | line)+ -> change_section

path: /(.+)/
added: "+" /(.*)/ LF
place: "@@" (" " /(.+)/)? LF
line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
""",
)
SUM = Grammar(
    "lark",
    """
start: sum
sum: product (SP PLUS SP product)* -> add
   | product
product: INT | "(" sum ")"
SP: " "
PLUS: "+"
%import common.INT
""",
)


@functools.cache
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte", eos_token=EOS)


@functools.cache
def matcher(grammar: Grammar, escaped: bool) -> llguidance.LLMatcher:
    rules = input_rules(grammar, "input_0", end='"' if escaped else END, escaped=escaped)
    source = "\n".join([f"start: {symbol(rules)}", *rules])
    made = llguidance.LLMatcher(vocabulary(), llguidance.LLMatcher.grammar_from_lark(source), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(grammar: Grammar, escaped: bool, text: str) -> bool:
    written = json.dumps(text, ensure_ascii=False)[1:] if escaped else text + END
    subject = matcher(grammar, escaped).deep_copy()
    data = list(written.encode())
    return subject.try_consume_tokens(data) == len(data) and subject.is_accepting()


lines = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12)
paths = lines.filter(bool)
sections = st.one_of(
    st.builds(
        lambda path, rows: f"*** Create: {path}\n" + "".join(f"+{row}\n" for row in rows),
        paths,
        st.lists(lines, min_size=1),
    ),
    st.builds("*** Remove: {}\n".format, paths),
    st.builds(
        lambda path, rows: f"*** Change: {path}\n" + "".join(f"{mark}{row}\n" for mark, row in rows),
        paths,
        st.lists(st.tuples(st.sampled_from(["+", "-", " ", "@@ x"]), lines), min_size=1),
    ),
)
changes = st.builds(
    lambda parts, end: "*** Begin Changes\n" + "".join(parts) + "*** End Changes" + end,
    st.lists(sections, min_size=1, max_size=3),
    st.sampled_from(["", "\n"]),
)


@pytest.mark.parametrize("escaped", [True, False])
@settings(max_examples=examples(80), deadline=None)
@given(text=changes)
def test_what_the_grammar_allows_is_accepted_as_it_is_written(escaped: bool, text: str) -> None:
    assert accepts(CHANGES, escaped, text)
    assert not accepts(CHANGES, escaped, text.replace("*** Begin", "** Begin"))
    assert not accepts(CHANGES, escaped, text.replace("*** End", "*** The end"))
    assert not accepts(CHANGES, escaped, text + "more")


def test_text_that_json_must_escape_is_refused_raw() -> None:
    text = "*** Begin Changes\n*** Remove: a\n*** End Changes"
    subject = matcher(CHANGES, True).deep_copy()
    assert subject.try_consume_tokens(list(text.encode())) == text.index("\n")


def test_a_recursive_grammar() -> None:
    for escaped in (True, False):
        assert accepts(SUM, escaped, "1 + (2 + (30 + 4))")
        assert not accepts(SUM, escaped, "1 + (2 + (30 + 4)")
    greedy = Grammar("lark", 'start: item\nitem: "(" item ")" | /[^x]+/')
    assert accepts(greedy, True, '"a"\n')
    with pytest.raises(CannotRewrite, match="recursion and"):
        input_rules(greedy, "input_0", end=END, escaped=False)


def test_text_that_could_swallow_the_end_of_the_input() -> None:
    anything = Grammar("regex", r"(.|\n)*")
    assert accepts(anything, False, "a\n\n</b>\n/\\")
    assert not accepts(anything, False, "a</parameter>b"), "the parser would end the input there"
    assert accepts(anything, True, 'a\n"}</parameter>\n\\"')


SEPARATORS = frozenset("\x1c\x1d\x1e\x1f")
"""White space to Python, but not to llguidance."""
ALPHABET = st.sampled_from(sorted({*map(chr, range(0x80)), *"éß中🙂\u2028"} - SEPARATORS))
"""Python counts a few more characters as letters and digits than llguidance does, such as `²`."""
PATTERNS = [
    r".*",
    r"[^a]+",
    r"\s*\S+",
    r'"[^"\\]*"',
    r"(?i)ab\n[x-z]?",
    r"(a|b\\)+",
    r"\w+(-\d{2,3})?",
    r"[\x00-\x40]{2}",
    r"\W\D",
    r"(?s).",
    r"[\n\"]{1,3}",
    *COMMON.values(),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_escaped_expression_matches_what_the_expression_matches(pattern: str) -> None:
    """Follows the escaped expression at random: what it allows, read as JSON, matches the expression itself."""
    subject = llguidance.LLMatcher(vocabulary(), llguidance.LLMatcher.grammar_from_regex(escaped_regex(pattern)))
    assert not subject.is_error(), subject.get_error()
    alphabet = [*range(0x20, 0x7F)]
    for seed in range(20):
        draw = random.Random(seed)
        walk = subject.deep_copy()
        text = ""
        while len(text) < 40 and not (walk.is_accepting() and draw.random() < 0.2):
            mask = int.from_bytes(walk.compute_bitmask(), "little")
            allowed = [byte for byte in alphabet if mask >> byte & 1]
            if not allowed:
                break
            text += chr(draw.choice([92] if 92 in allowed and draw.random() < 0.3 else allowed))
            assert walk.consume_token(ord(text[-1]))
        if walk.is_accepting() and not set(json.loads(f'"{text}"')) & SEPARATORS:
            assert re.fullmatch(pattern, json.loads(f'"{text}"')), (pattern, text)


@settings(max_examples=examples(40), deadline=None)
@given(pattern=st.sampled_from(PATTERNS), data=st.data())
def test_an_expression_accepts_its_strings_escaped(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(pattern, fullmatch=True, alphabet=ALPHABET))
    assert accepts(Grammar("regex", pattern), True, text)


@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('start: "a".."c" | ("x"i "\\n")~2..3', ["b", "x\nX\n"], ["d", "x\n"]),
        ('start: [B] "!"\nB: /[\\/"]+/', ["!", '/"!'], ["/"]),
        ('start: | "a"', ["", "a"], ["b"]),
        ('start: ("a" | ) "b"', ["b", "ab"], ["a"]),
        ('?start: x\n!x.2: "q"{2}\n  | "r" // "s"\n# "t"\n', ["qq", "r"], ["q", "s"]),
        ("%import common (INT, CNAME)\nstart: INT CNAME", ["1a"], ["a1"]),
        ("%import common.INT -> COUNT\nstart: COUNT", ["1"], ["a"]),
        ('start: A & B\nA: /a+/\nB: "a"{1,2}', ["a", "aa"], ["aaa"]),
    ],
)
def test_syntax_of_lark(source: str, good: list[str], bad: list[str], escaped: bool) -> None:
    grammar = Grammar("lark", source.replace("start: A & B", "start: C\nC: A & B"))
    assert [accepts(grammar, escaped, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("start: a\na[lazy]: /x/", "attributes"),
        ('%ignore /x/\nstart: "a"', "%ignore"),
        ("start: %json {}", "%json"),
        ("start: <|x|>", "<|x|>"),
        ('start: A\nA: ~"x"', "'~'"),
        (r"start: /\p{L}/", "regular expression"),
        ("start: /^a$/", "anchors"),
        (r"start: /(a)\1/", "anchors"),
        ("start: /[a[b]]/", "character class"),
        ("start: /a/q", "flag"),
        ("start: b", "does not define"),
        ('a: "b"', "start"),
        ("%import python.NAME\nstart: NAME", "another grammar"),
        ("start: " + "/./ " * 3000, "too many"),
        ('start: "' + "a" * MAX_BYTES + '"', "bytes"),
        ("start: /" + "(" * 5000 + "a" + ")" * 5000 + "/", "nested|regular expression"),
    ],
)
def test_what_cannot_be_rewritten_is_named(source: str, reason: str) -> None:
    with pytest.raises(CannotRewrite, match=reason):
        input_rules(Grammar("lark", source), "input_0", end='"', escaped=True)
