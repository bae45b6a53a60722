"""The JSON scanner, compared with Python's own parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.text.output.json_scan import JsonScanner
from support.tiers import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans(), st.integers(0, 50))
@settings(max_examples=examples(200), deadline=None)
def test_scanning_stops_at_the_end_of_the_object(
    value: dict[str, object], indent: int | None, ascii: bool, cut: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    scanner = JsonScanner()
    first, used = scanner.feed(text[:cut])
    assert (first, used) == (text[:cut], len(text[:cut]))
    second, used = scanner.feed(text[cut:] + "} rest")
    assert scanner.done and not scanner.invalid
    assert first + second == text and used == len(text[cut:])


@given(st.text(alphabet='{}[]":,\\ue+-.0123atrflsn x\n', max_size=24))
@settings(max_examples=examples(1500), deadline=None)
def test_agrees_with_json_loads(noise: str) -> None:
    text = "{" + noise
    scanner = JsonScanner()
    given_back, used = scanner.feed(text)
    if scanner.done:
        assert isinstance(json.loads(given_back), dict)
        with pytest.raises(ValueError, match="Extra data"):
            json.loads(given_back + "}")
    else:
        for end in range(1, len(text) + 1):
            try:
                value = json.loads(text[:end], strict=False)
            except ValueError:
                continue
            assert not isinstance(value, dict), (text, used)


def test_line_breaks_in_strings_are_escaped() -> None:
    assert JsonScanner().feed('{"a": "b\nc\td\x01"}')[0] == '{"a": "b\\nc\\td\\u0001"}'


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[",
        " {",
        "{a",
        "{'",
        "{,",
        '{"a" 1',
        '{"a": 01}',
        '{"a": 1.}',
        '{"a": tru}',
        '{"a": "\\x"}',
        '{"a": "\\u12g4"}',
        '{"a": 1,}',
        '{"a": ]',
        '{"a": [1}',
    ],
)
def test_scanning_stops_at_the_first_invalid_character(text: str) -> None:
    scanner = JsonScanner()
    _, used = scanner.feed(text)
    assert scanner.invalid and not scanner.done
    assert used < len(text)
