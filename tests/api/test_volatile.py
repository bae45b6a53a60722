"""Headers in system messages that differ in each request are left out, so that the prefix stays equal."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.api.openai.messages import parse_messages
from millstream.api.volatile import is_volatile, without_volatile

HEADER = "x-anthropic-billing-header: cc_version=2.1.0; cch={};"
USER = {"role": "user", "content": "Hi"}


def parsed(*messages: dict[str, Any]) -> tuple[dict[str, object], ...]:
    return parse_messages([*messages, USER])


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    ("with_header", "without"),
    [
        ("{}\nBe kind.", "Be kind."),
        ("{0}\n{0}\nBe kind.\n\nAnd brief.", "Be kind.\n\nAnd brief."),
        ([{"type": "text", "text": "{}"}, {"type": "text", "text": "Be kind."}], "Be kind."),
        ([{"type": "text", "text": "{}\nBe"}, {"type": "text", "text": " kind."}], "Be kind."),
    ],
)
def test_two_requests_that_differ_in_the_header_have_equal_messages(
    role: str, with_header: Any, without: object
) -> None:
    def content(number: int) -> object:
        if isinstance(with_header, str):
            return with_header.format(HEADER.format(number))
        return [{**part, "text": part["text"].format(HEADER.format(number))} for part in with_header]

    first, second = (parsed({"role": role, "content": content(number)}) for number in (1, 2))
    assert first == second == ({"role": "system", "content": without}, USER)


def test_a_message_of_nothing_else_is_left_out() -> None:
    assert parsed({"role": "system", "content": HEADER}) == (USER,)
    assert parsed({"role": "system", "content": [{"type": "text", "text": HEADER}]}) == (USER,)
    assert parse_messages([{"role": "system", "content": HEADER}]) == ({"role": "system", "content": ""},)


@pytest.mark.parametrize("text", ["", f"Never write\n{HEADER}", "x-anthropic-billing: yes", f" {HEADER}"])
def test_other_text_stays(text: str) -> None:
    assert without_volatile(text) == text and not is_volatile(text)
    assert parsed({"role": "system", "content": text})[0]["content"] == text
    assert parsed({"role": "user", "content": HEADER})[0]["content"] == HEADER


def test_a_block_of_only_headers_is_volatile() -> None:
    assert is_volatile(HEADER) and is_volatile(f"{HEADER}\n\n") and not is_volatile(f"{HEADER}\nBe kind.")


SYSTEM = f"{HEADER}\nBe kind."
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": SYSTEM}, USER]}),
    ("/v1/responses", {"instructions": SYSTEM, "input": [USER]}),
    ("/v1/responses", {"input": [{"role": "developer", "content": SYSTEM}, USER]}),
    ("/v1/messages", {"max_tokens": 9, "system": [{"type": "text", "text": SYSTEM}], "messages": [USER]}),
    ("/api/chat", {"model": "org/tiny", "messages": [{"role": "system", "content": SYSTEM}, USER]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_every_dialect_leaves_them_out(http: Any, service: Any, path: str, body: dict[str, Any]) -> None:
    assert http.post(path, json=body).status_code == 200
    assert service.requests[-1].prompts[0].messages == ({"role": "system", "content": "Be kind."}, USER)
