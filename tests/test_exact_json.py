"""JSON in and out: every number is written as it was read."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.exact_json import Written, dumps, dumps_text, loads, loads_values, may_change, number

NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@given(NUMBERS)
@example("1" * 5000)
@example("1e99999999999999999999")
@example("-0")
def test_a_number_keeps_its_text(text: str) -> None:
    value = loads(f'{{"a": [{text}, "{text}"]}}')
    assert dumps(value) == f'{{"a":[{text},"{text}"]}}'.encode()
    assert dumps_text(value) == f'{{"a": [{text}, "{text}"]}}'
    assert str(loads(text)) == repr(number(text)) == text
    assert pickle.loads(pickle.dumps(loads(text))) == loads(text)


@given(NUMBERS)
@example("1" * 5000)
@example("1e99999999999999999999")
@example("9007199254740993")
def test_a_body_keeps_the_values_of_its_numbers(text: str) -> None:
    raw = f'{{"a": [{text}, 1]}}'.encode()
    value = loads_values(raw)
    assert value["a"][1] == 1
    written = dumps(value["a"][0]).decode()
    assert written == text or Decimal(written) == Decimal(text)
    assert may_change(raw) or orjson.loads(raw) == value


def test_strings_that_look_like_numbers_stay_strings() -> None:
    value = {"1E5": ["1E5", Written("1E5"), "\x1a5\x1a", "é"]}
    assert loads(dumps(value).decode()) == loads(dumps_text(value)) == value
    assert dumps_text(value, ensure_ascii=True, indent=1, sort_keys=True) == json.dumps(value, indent=1).replace(
        "100000.0", "1E5"
    )


@pytest.mark.parametrize(
    "raw", [b'{"a": 1e400, "b": "\\ud800"}', b'{"a": 1e400, "b": NaN}', b'[1e400, "\xff"]', b"1e400]"]
)
def test_what_is_no_json_is_refused_beside_unusual_numbers(raw: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads_values(raw)


def test_what_is_nested_too_deep_is_refused() -> None:
    assert dumps(loads("[" * 200 + "1e400" + "]" * 200)) == b"[" * 200 + b"1e400" + b"]" * 200
    for depth in (201, 100_000):
        with pytest.raises(ValueError, match="nested deeper"):
            loads("[" * depth + "]" * depth)


def test_unpaired_surrogates_cannot_be_written() -> None:
    for value in ("\ud800", ["\ud800", 2**64]):
        with pytest.raises(ValueError, match="surrogates"):
            dumps(value)
