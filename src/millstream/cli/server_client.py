"""A small HTTP client for commands that talk to a running server: JSON, streams of events, files both ways."""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from millstream.errors import MillstreamError, Unauthorized

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "MILLSTREAM_URL"
KEY_VARIABLE = "MILLSTREAM_API_KEY"
TIMEOUT = 10.0
PIECE = 64 * 1024
_START = "Start one with 'millstream serve MODEL', or name it with --url."


class NoServer(MillstreamError):
    """Nothing answers at the URL."""


class ServerClient:
    """`url` goes as far as the port. Every method raises a `MillstreamError` that says what to do."""

    def __init__(self, url: str, key: str | None = None, *, advice: str = _START) -> None:
        self.url = url
        self.key = key
        self._advice = advice
        self._opener = _opener(url)

    def get(self, path: str, timeout: float = TIMEOUT) -> Any:
        with self._open(path, None, timeout) as response:
            return self._json(path, response.read())

    def post(self, path: str, body: dict[str, object]) -> Any:
        """Waits as long as the server does: a model may have to be loaded first."""
        with self._open(path, _encoded(body), None) as response:
            return self._json(path, response.read())

    def download(self, path: str, body: dict[str, object]) -> Iterator[bytes]:
        """The bytes of a streamed file. Raises if the server ends it in the middle."""
        with self._open(path, _encoded(body), None) as response:
            while piece := response.read1(PIECE):
                yield piece

    def upload(self, path: str, fields: dict[str, str], name: str, content: bytes) -> bytes:
        """Sends a form with a file, and returns the response."""
        boundary = secrets.token_hex(16)
        data = _form(boundary, fields, name, content)
        with self._open(path, data, None, f"multipart/form-data; boundary={boundary}") as response:
            return response.read()

    def stream(self, path: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
        """The events of a streamed response. Close the iterator to hang up, which frees the server's row."""
        with self._open(path, _encoded(body), None) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = self._json(path, line[6:])
                    if "error" in event:
                        raise MillstreamError(_message(event) or "The server failed to answer.")
                    yield event
                elif line.startswith(b"data: [DONE]"):
                    return
        raise MillstreamError("The server closed the connection before the answer was complete.")

    @contextmanager
    def _open(
        self, path: str, data: bytes | None, timeout: float | None, content_type: str = "application/json"
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        try:
            response = self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(path, error.code, error.read(1 << 16)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise NoServer(f"No server answers at {self.url} ({reason}). {self._advice}") from None
        try:
            with response:
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise MillstreamError(f"The connection to {self.url} broke ({error or type(error).__name__}).") from None

    def _json(self, path: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except ValueError:
            raise MillstreamError(f"The server at {self.url} is not Millstream: {path} is not JSON.") from None

    def _refused(self, path: str, status: int, body: bytes) -> MillstreamError:
        if status == 401:
            problem = "does not accept this API key" if self.key else "requires an API key"
            return Unauthorized(f"The server at {self.url} {problem}: give it with --api-key or {KEY_VARIABLE}.")
        try:
            message = _message(json.loads(body))
        except ValueError:
            message = None
        if message is None:
            message = f"The server at {self.url} is not Millstream: it answers {path} with status {status}."
        error = MillstreamError(message)
        error.status = status
        return error


def server_url(text: str) -> str:
    """The URL as far as the port: commands add their own paths."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a server: use {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}"


def add_server_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """`url` is None if neither the option nor the variable names a server."""
    parser.add_argument(
        "--url",
        type=server_url,
        default=os.environ.get(URL_VARIABLE) or None,
        help=f"URL of the server; default: {URL_VARIABLE}, or {DEFAULT_URL}",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE), help=f"default: {KEY_VARIABLE}"
    )


def _encoded(body: dict[str, object]) -> bytes:
    return json.dumps(body).encode()


def _form(boundary: str, fields: dict[str, str], name: str, content: bytes) -> bytes:
    """A form of several parts, the file last. Quotes and line breaks of its name are left out."""
    safe = "".join(character for character in name if character.isprintable() and character != '"')
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{fields[key]}\r\n' for key in fields]
    parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{safe}"\r\n\r\n')
    return "".join(parts).encode() + content + f"\r\n--{boundary}--\r\n".encode()


def _message(body: object) -> str | None:
    """The text of an error, in the server's own form, without control characters: it goes to a terminal."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        return None
    return "".join(character for character in message if character.isprintable() or character == "\n")


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Through the proxy that the environment names, but never to this machine."""
    host = urlsplit(url).hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
