"""Stop strings: nothing of them leaks, nothing else is lost, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.text.output.stop_strings import StopMatcher


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join([matcher.push(chunk) for chunk in chunks])
    return text + matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    ("text", "stops", "expected", "matched"),
    [
        ("hello world", [], "hello world", None),
        ("hello world", ["zzz"], "hello world", None),
        ("hello world", ["o w"], "hell", "o w"),
        ("hello world", ["world", "lo"], "hel", "lo"),
        ("aabaac", ["aac"], "aab", "aac"),
        ("abc", ["abcd", "bc"], "a", "bc"),
        ("abcd", ["abcd", "bc"], "", "abcd"),
        ("xab", ["abc", "ab"], "x", "ab"),
        ("stop", ["stop"], "", "stop"),
        ("ab", ["", "b"], "a", "b"),
        ("多言語。終わり", ["。"], "多言語", "。"),
    ],
)
def test_cuts_at_the_match_that_starts_first(text: str, stops: list[str], expected: str, matched: str | None) -> None:
    assert run([text], stops) == (expected, matched)
    assert run(list(text), stops) == (expected, matched)


def test_holds_back_only_what_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("one <en") == "one "
    assert matcher.push("tity>") == "<entity>"
    assert matcher.push(" <") == " "
    assert matcher.finish() == "<"
    assert matcher.matched is None


def test_a_match_waits_for_an_earlier_one_that_may_still_complete() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == "x"
    assert matcher.matched is None
    assert matcher.push("e") == "a"
    assert matcher.matched == "bc"


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("one. two") == "one"
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


texts = st.text(alphabet="abc", max_size=40)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


@given(texts, stop_lists, st.data())
def test_equals_a_search_of_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matches = sorted((text.find(stop), len(stop), stop) for stop in stops if stop in text)
    expected = (text[: matches[0][0]], matches[0][2]) if matches else (text, None)
    assert run(chunks, stops) == expected


@given(texts, stop_lists)
def test_never_emits_more_than_the_answer_on_the_way(text: str, stops: list[str]) -> None:
    final, _ = run([text], stops)
    matcher = StopMatcher(stops)
    out = ""
    for char in text:
        out += matcher.push(char)
        assert final.startswith(out)
