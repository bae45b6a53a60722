"""Raw requests that a stranger may send, each with the statuses that are right for it."""

from __future__ import annotations

from typing import NamedTuple

HOST = b"host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
SMALL = b'{"prompt":"x","max_tokens":1}'


class Hostile(NamedTuple):
    name: str
    raw: bytes
    status: tuple[int, ...]
    """One for each answer, in order."""


def get(path: bytes, *headers: bytes, version: bytes = b"1.1", method: bytes = b"GET") -> bytes:
    lines = [method + b" " + path + b" HTTP/" + version, *(headers or (b"host: localhost",)), b"", b""]
    return b"\r\n".join(lines)


def post(body: bytes, *headers: bytes) -> bytes:
    length = b"content-length: %d" % len(body)
    return get(b"/v1/completions", b"host: localhost", length, *headers, method=b"POST") + body


REQUESTS = [
    # Sizes
    Hostile("one header of 100 KB", get(b"/health", b"host: localhost", b"a: " + b"x" * 100_000), (431,)),
    Hostile("one header of 5 MB", get(b"/health", b"host: localhost", b"a: " + b"x" * 5_000_000), (431,)),
    Hostile("a header name of 5 MB", get(b"/health", b"host: localhost", b"x" * 5_000_000 + b": a"), (431,)),
    Hostile("a header that never ends", b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 300_000, (431,)),
    Hostile("1,000 headers", get(b"/health", b"host: localhost", *[b"a: b"] * 1000), (431,)),
    Hostile("100 headers", get(b"/health", b"host: localhost", *[b"a: b"] * 99), (200,)),
    Hostile("50 KB of headers", get(b"/health", b"host: localhost", *[b"a: " + b"b" * 1000] * 50), (200,)),
    Hostile("a path of 100 KB", get(b"/" + b"x" * 100_000), (414,)),
    Hostile("a query of 5 MB", get(b"/health?" + b"x" * 5_000_000), (414,)),
    Hostile("a query of 10 KB", get(b"/health?" + b"x" * 10_000), (200,)),
    Hostile("a method of 1 MB", b"A" * 1_000_000, (400,)),
    Hostile("blank lines without end", b"\r\n" * 200_000, (431,)),
    Hostile("blank lines first", b"\r\n\r\n" + HEALTH, (200,)),
    Hostile("trailers without end", CHUNKED + b"0\r\n" + b"a: b\r\n" * 50_000, (400,)),
    Hostile("a trailer of 5 MB", CHUNKED + b"0\r\na: " + b"x" * 5_000_000, (400,)),
    Hostile("a chunk extension of 1 MB", CHUNKED + b"1;" + b"x" * 1_000_000, (400,)),
    Hostile("a chunk size of 70 digits", CHUNKED + b"1" * 70 + b"\r\nx", (400,)),
    Hostile("a negative chunk size", CHUNKED + b"-1\r\nx", (400,)),
    # Smuggling
    Hostile("length and chunks", post(SMALL, b"transfer-encoding: chunked"), (400,)),
    Hostile("two lengths", post(SMALL, b"content-length: 3"), (400,)),
    Hostile("a negative length", get(b"/health", b"host: localhost", b"content-length: -1"), (400,)),
    Hostile("a length of 30 digits", get(b"/health", b"host: localhost", b"content-length: " + b"9" * 30), (400,)),
    Hostile(
        "a coding we do not know", post(b"", b"transfer-encoding: gzip").replace(b"content-length: 0\r\n", b""), (400,)
    ),
    Hostile("a folded header", get(b"/health", b"host: localhost\r\n folded: x"), (400,)),
    Hostile("a blank before the colon", get(b"/health", b"host : localhost"), (400,)),
    Hostile("a bare newline", b"GET /health HTTP/1.1\nhost: localhost\n\n", (400,)),
    Hostile("a trailer that names a host", CHUNKED + b"1d\r\n" + SMALL + b"\r\n0\r\nhost: evil\r\n\r\n", (200,)),
    # Names of the host
    Hostile("no host", get(b"/health", b"a: b"), (400,)),
    Hostile("no host in HTTP/1.0", get(b"/health", b"a: b", version=b"1.0"), (200,)),
    Hostile("two hosts", get(b"/health", b"host: localhost", b"host: localhost"), (400,)),
    Hostile("another host", get(b"/health", b"host: evil.example"), (403,)),
    Hostile("an empty host", get(b"/health", b"host:"), (403,)),
    # Odd targets
    Hostile("an absolute URL", get(b"http://localhost/health"), (200,)),
    Hostile("an absolute URL without a path", get(b"http://localhost"), (400,)),
    Hostile("an asterisk", get(b"*", method=b"OPTIONS"), (404,)),
    Hostile("a NUL in the path", get(b"/\x00"), (400,)),
    Hostile("a control byte in the path", get(b"/\x07"), (400,)),
    Hostile("an encoded NUL", get(b"/%00"), (404,)),
    Hostile("an encoded newline", get(b"/v1/models/%0a%0d%1b[31m"), (404,)),
    Hostile("broken percent signs", get(b"/%zz%"), (404,)),
    Hostile("broken UTF-8", get(b"/%ff%fe"), (404,)),
    Hostile("dots", get(b"/v1/../../etc/passwd"), (404,)),
    Hostile("bytes above 127", get(b"/\xff\xfe"), (400,)),
    Hostile("a NUL in a header", get(b"/health", b"host: localhost", b"a: \x00"), (400,)),
    # Other protocols
    Hostile("HTTP/0.9", b"GET /health\r\n\r\n", (400,)),
    Hostile("HTTP/2 by its preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    Hostile("HTTP/2 by its number", get(b"/health", version=b"2.0"), (400,)),
    Hostile("HTTP/1.9", get(b"/health", version=b"1.9"), (400,)),
    Hostile("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500, (400,)),
    Hostile("CONNECT", get(b"evil.example:443", method=b"CONNECT"), (400,)),
    Hostile("TRACE", get(b"/health", method=b"TRACE"), (405,)),
    Hostile("a method of WebDAV", get(b"/health", method=b"PROPFIND"), (405,)),
    Hostile("a method that is none", get(b"/health", method=b"BREW"), (400,)),
    Hostile("binary", bytes(range(256)) * 10, (400,)),
    Hostile(
        "a websocket",
        get(
            b"/health",
            b"host: localhost",
            b"connection: upgrade",
            b"upgrade: websocket",
            b"sec-websocket-version: 13",
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        ),
        (200,),
    ),
    Hostile(
        "HTTP/2 by upgrade, with a body, and one more request",
        post(SMALL, b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABk") + HEALTH,
        (200, 200),
    ),
    Hostile("an expectation", post(SMALL, b"expect: 100-continue"), (100, 200)),
    Hostile("an unknown expectation", post(SMALL, b"expect: tea"), (200,)),
    Hostile("more requests than may wait", post(SMALL) + HEALTH * 12, (*[200] * 9, 400)),
]
