"""OPTIONS, HEAD, and how much of a request an error quotes."""

from __future__ import annotations

import logging

import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "path, allow",
    [
        ("/health", "GET, HEAD, OPTIONS"),
        ("/", "GET, HEAD, OPTIONS"),
        ("/docs", "GET, HEAD, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/org/tiny", "GET, HEAD, OPTIONS"),
        ("/v1/models/org/tiny/unload", "OPTIONS, POST"),
        ("/v1/chat/completions", "OPTIONS, POST"),
    ],
)
def test_options_lists_the_methods(http, path, allow):
    response = http.options(path)
    assert (response.status_code, response.headers["allow"], response.content) == (204, allow, b"")


def test_options_of_an_unknown_path_is_404(http):
    assert http.options("/nowhere").status_code == 404


@pytest.mark.parametrize(
    "path", ["/health", "/", "/v1/models", "/v1/models/org/tiny", "/metrics", "/docs", "/openapi.json"]
)
def test_head_is_get_without_a_body(http, path):
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert http.get("/health").status_code == 200, "the connection is still usable"


def test_head_of_a_post_route(http):
    response = http.head("/v1/completions")
    assert response.status_code == 405 and response.headers["allow"] == "OPTIONS, POST"


LONG = "x" * 20_000


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"reasoning_effort": LONG},
        CHAT | {"thinking": {"type": LONG}},
        CHAT | {"tools": [{"type": LONG}]},
        CHAT | {"model": LONG, "temperature": LONG},
        {"messages": [{"role": LONG, "content": "hi"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": LONG}]}]},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": f"data:{LONG},"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        CHAT | {"response_format": {"type": LONG}},
        CHAT | {"tool_choice": LONG},
    ],
)
def test_an_error_does_not_quote_a_long_text(http, body):
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and len(response.content) < 5000


def test_a_long_model_name_or_path_is_not_quoted(http, service):
    for path in (f"/v1/models/{'x' * 9000}", f"/{'x' * 9000}"):
        response = http.get(path)
        assert response.status_code == 404 and len(response.content) < 5000
        assert "/v1/models lists its models" in response.text or "/docs" in response.text


def test_the_log_has_one_short_line(http, service, caplog):
    from millstream.errors import EngineGone

    service.start_error = EngineGone("gone\nforged line" + LONG)
    assert len(http.post("/v1/completions?%0a", json={"prompt": "x"}).content) < 5000
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "\n" not in record.getMessage() and len(record.getMessage()) < 1000
