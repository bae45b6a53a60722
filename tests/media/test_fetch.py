"""Fetching from a real HTTP server: redirects, sizes, timeouts and refused addresses."""

from __future__ import annotations

import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from media.web import Web
from millstream.errors import MediaRefused
from millstream.media import addresses, fetch
from millstream.media.limits import MediaLimits

OPEN = MediaLimits(file_bytes=100_000, timeout=30.0, allow_private=True)


def test_a_file(web: Web) -> None:
    data = bytes(range(256)) * 200
    assert fetch.fetch(web.body("/a.png?size=2&x=%20", data), OPEN) == data
    assert web.asked == ["/a.png?size=2&x=%20"]


def test_a_file_without_a_length(web: Web) -> None:
    assert fetch.fetch(web.body("/a", b"x" * 70_000, length=False), OPEN) == b"x" * 70_000


def test_redirects_are_followed(web: Web) -> None:
    web.body("/c", b"here")
    web.redirect("/b", "/c", 307)
    assert fetch.fetch(web.redirect("/a", f"{web.url}/b"), OPEN) == b"here"


def test_redirects_are_limited(web: Web) -> None:
    with pytest.raises(MediaRefused, match="more than 3 times"):
        fetch.fetch(web.redirect("/a", "/a"), OPEN)
    assert len(web.asked) == 4


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/x", "gopher://x"])
def test_a_redirect_to_another_scheme(web: Web, target: str) -> None:
    with pytest.raises(MediaRefused, match="cannot be fetched"):
        fetch.fetch(web.redirect("/a", target), OPEN)


def test_private_addresses_are_refused_before_a_connection(web: Web) -> None:
    with pytest.raises(MediaRefused, match="not a public address"):
        fetch.fetch(web.body("/a", b"secret"), replace(OPEN, allow_private=False))
    assert web.asked == []


def test_a_redirect_is_checked_like_the_first_url(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host counts as public here; the target of the redirect does not."""
    web.body("/secret", b"secret")
    url = web.redirect("/a", f"http://localhost:{web.port}/secret")

    def checked(host: str, port: int, *, allow_private: bool, **bounds: Any) -> list[str]:
        if host == "127.0.0.1":
            return ["127.0.0.1"]
        return addresses.checked_addresses(host, port, allow_private=allow_private)

    monkeypatch.setattr(fetch, "checked_addresses", checked)
    with pytest.raises(MediaRefused, match="'localhost' of a media URL resolves to"):
        fetch.fetch(url, replace(OPEN, allow_private=False))
    assert web.asked == ["/a"]


def test_the_connection_goes_to_the_address_that_was_checked(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is resolved once: a later DNS answer has no effect."""
    web.body("/a", b"here")
    monkeypatch.setattr(fetch, "checked_addresses", lambda host, port, **bounds: ["127.0.0.1"])
    assert fetch.fetch(f"http://rebinding.invalid:{web.port}/a", replace(OPEN, allow_private=False)) == b"here"


def test_a_content_length_over_the_limit(web: Web) -> None:
    with pytest.raises(MediaRefused, match=r"100001 bytes or more; this server takes at most 100000 \(--media-bytes\)"):
        fetch.fetch(web.body("/a", b"x" * 100_001), OPEN)


def test_a_body_without_a_length_stops_at_the_limit(web: Web) -> None:
    with pytest.raises(MediaRefused, match="this server takes at most 100000"):
        fetch.fetch(web.drip("/a", b"x" * 50_000, 0.001), OPEN)


@pytest.mark.parametrize("kind", ["silent", "drip", "headers"])
def test_a_slow_server_is_left_at_the_timeout(web: Web, kind: str) -> None:
    def headers(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.flush_headers()
        while not web.release.wait(0.05):
            request.wfile.write(b"x")

    web.answers["/headers"] = headers
    url = {"silent": web.silent("/a"), "drip": web.drip("/b", b"x", 0.05), "headers": f"{web.url}/headers"}[kind]
    began = time.monotonic()
    with pytest.raises(MediaRefused, match=r"took longer than 0.3 s \(--media-timeout\)"):
        fetch.fetch(url, replace(OPEN, timeout=0.3))
    assert time.monotonic() - began < 20


def test_a_missing_file(web: Web) -> None:
    with pytest.raises(MediaRefused, match="answered 404 Not Found; expected 200"):
        fetch.fetch(f"{web.url}/none", OPEN)


def test_a_closed_port(web: Web) -> None:
    with pytest.raises(MediaRefused, match=r"cannot be fetched: .*refused"):
        fetch.fetch("http://127.0.0.1:9/x", OPEN)


def test_a_server_that_does_not_speak_http(web: Web) -> None:
    web.answers["/a"] = lambda request: request.wfile.write(b"SSH-2.0-hello\r\n\r\n") and None
    with pytest.raises(MediaRefused, match="cannot be fetched"):
        fetch.fetch(f"{web.url}/a", OPEN)


def test_https_checks_certificates(web: Web) -> None:
    with pytest.raises(MediaRefused, match="cannot be fetched"):
        fetch.fetch(f"https://127.0.0.1:{web.port}/a", OPEN)


@pytest.mark.parametrize(
    "url", ["http://", "http://[::1", "http://x:99999/", "http://host:0/", "http://ho st/", "http://é/"]
)
def test_invalid_urls(url: str) -> None:
    with pytest.raises(MediaRefused):
        fetch.fetch(url, OPEN)
