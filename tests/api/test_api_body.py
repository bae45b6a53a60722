"""Bodies that are not JSON, not the right JSON, or too large."""

from __future__ import annotations

import socket

import httpx
import pytest

GOOD = b'{"messages":[{"role":"user","content":"hi"}]}'
URL = "/v1/chat/completions"


def refused(response, status=400):
    error = response.json()["error"]
    assert response.status_code == status, error
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code", "request_id"}
    return error["message"]


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "empty"),
        (b"{", "line 1, column"),
        (b'{"a": 1,\n  "b": tru}', "line 2, column 8"),
        (b'{"a":1} x', "line 1, column 9"),
        (b'{"temperature": NaN}', "column 17"),
        (b'{"temperature": Infinity}', "column 17"),
        (b'{"temperature": 1e999}', "temperature must be at most 2.0, but 1e999 was sent"),
        (b'{"a":"\xff"}', "not valid UTF-8: invalid start byte at byte 6"),
        (b'{"a":"\\ud800"}', "not valid JSON"),
        (b"[1]", "must be a JSON object, not [1]"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object, not null"),
        (b"[" * 50_000, "not valid JSON"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "not valid JSON"),
        (b'{"metadata":' + b"[" * 500 + b"]" * 500 + b"}", "nested deeper than 100"),
        (b'{"messages":' + b'{"a":' * 200 + b"1" + b"}" * 201, "nested deeper than 100"),
    ],
)
def test_bad_bodies(http, service, body, words):
    assert words in refused(http.post(URL, content=body))
    assert http.post(URL, content=GOOD).status_code == 200
    assert len(service.requests) == 1


def test_a_wide_body_is_not_deep(http):
    body = {"prompt": [[token] for token in range(500)], "metadata": {"a": [[[1]]]}}
    assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "nonsense"])
def test_content_type_does_not_matter(http, kind):
    assert http.post(URL, content=GOOD, headers={"content-type": kind}).status_code == 200


def padded(size: int) -> bytes:
    return GOOD + b" " * (size - len(GOOD))


def pieces(size: int, piece: int = 4096):
    body = padded(size)
    for start in range(0, size, piece):
        yield body[start : start + piece]


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(http, service, chunked):
    def post(size):
        return http.post(URL, content=pieces(size) if chunked else padded(size))

    limit = 64 * 1024
    assert post(limit).status_code == 200
    response = post(limit + 1)
    assert "65536 bytes" in refused(response, 413)
    assert response.json()["error"]["code"] == "request_too_large"
    assert post(1000).status_code == 200
    assert len(service.requests) == 2


@pytest.mark.parametrize("framing", [b"content-length: 3000000", b"transfer-encoding: chunked"])
def test_connection_survives_a_body_over_the_limit(port, framing):
    """The response arrives while the body is still being sent. The rest is dropped, and the next request is served."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        responses = line.makefile("rb")
        line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n")
        chunked = b"chunked" in framing
        block = b" " * 100_000
        line.sendall(b"186a0\r\n" + block + b"\r\n" if chunked else block)
        assert read_response(responses) == 413
        for _ in range(29):
            line.sendall(b"186a0\r\n" + block + b"\r\n" if chunked else block)
        if chunked:
            line.sendall(b"0\r\n\r\n")
        line.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_response(responses) == 200
        responses.close()


def test_expect_continue_is_refused_before_the_body_is_sent(port):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line, line.makefile("rb") as responses:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert read_response(responses) == 413
        assert responses.read() == b""  # closed: the client may or may not send the body


def read_response(responses) -> int:
    status = int(responses.readline().split()[1])
    length = 0
    while (line := responses.readline()) != b"\r\n":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    assert len(responses.read(length)) == length
    return status


def test_a_client_that_disconnects_within_its_body(port, service):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\nhalf")
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert service.requests == []
