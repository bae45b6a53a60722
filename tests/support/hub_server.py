"""A stand-in for the Hugging Face hub on this machine: the endpoints that its client and our downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "mill/stream"
HALF_GATED = "mill/asks-first"
"""As most gated models: the repository and its file list are public, the files are not."""
GGUF_REPO = "mill/quants"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 100,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"---\nlicense: apache-2.0\n---\nwords",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "model.pt": b"a pickle",
    "vocab.pkl": b"a pickle",
    "consolidated.safetensors": b"the same weights",
    "notes.md": b"words",
}
GGUF_FILES = {
    "README.md": b"words",
    "model-Q4_K_M.gguf": b"GGUF" + b"4" * 500,
    "model-Q8_0.gguf": b"GGUF" + b"8" * 900,
    "mmproj-model-F16.gguf": b"GGUF" + b"p" * 100,
    "model-BF16-00001-of-00002.gguf": b"GGUF" + b"b" * 100,
}


class HubServer:
    """`url` is its address. `sent` counts the bytes of each file that were sent."""

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]] | None = None) -> None:
        self.repos: dict[str, dict[str, bytes]] = {REPO: dict(FILES), HALF_GATED: dict(FILES), GGUF_REPO: GGUF_FILES}
        self.repos |= {name: dict(files) for name, files in (repos or {}).items()}
        self.sent: dict[str, int] = {}
        self.ranges = True
        """False: as a server that ignores range requests."""
        self.hold_after: int | None = None
        """Send so many bytes of a file, then wait for `release`."""
        self.held = threading.Event()
        """A file is being held."""
        self.silent = False
        """Answer nothing until `release`."""
        self.asked = threading.Semaphore(0)
        """Released by each request that gets no answer."""
        self._release = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def release(self) -> None:
        self.hold_after = None
        self.silent = False
        self._release.set()

    def stop(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def wait(self) -> None:
        self.asked.release()
        self._release.wait(120)

    def send(self, handler: BaseHTTPRequestHandler, name: str, data: bytes) -> None:
        first = data if self.hold_after is None else data[: self.hold_after]
        handler.wfile.write(first)
        handler.wfile.flush()
        self.sent[name] = self.sent.get(name, 0) + len(first)
        if len(first) < len(data):
            self.held.set()
            self._release.wait(120)
            handler.wfile.write(data[len(first) :])
            self.sent[name] += len(data) - len(first)


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def _blob(name: str, data: bytes) -> str:
    return (hashlib.sha256 if _is_large(name) else hashlib.sha1)(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if _is_large(name):
        entry["lfs"] = {"oid": _blob(name, data), "size": len(data), "pointerSize": 130}
    return entry


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            if hub.silent:
                hub.wait()
            path = self.path.split("?")[0]
            repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            if path.startswith(f"/{HALF_GATED}/resolve/"):
                self._reply(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            elif repo in hub.repos and "/resolve/" in path:
                self._send_file(hub.repos[repo], path, with_body)
            else:
                self._reply(*_facts(hub, repo, path), with_body)

        def _reply(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            with suppress(OSError):  # the client left
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        def _send_file(self, files: Mapping[str, bytes], path: str, with_body: bool) -> None:
            name = path.split("/resolve/")[1].split("/", 1)[1]
            data = files[name]
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            partial = hub.ranges and "Range" in self.headers
            part = data[start:] if partial else data
            self.send_response(206 if partial else 200)
            self.send_header("ETag", f'"{_blob(name, data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            try:
                if with_body:
                    hub.send(self, name, part)
            except OSError:  # the client left
                self.close_connection = True

    return Handler


def _facts(hub: HubServer, repo: str, path: str) -> tuple[int, bytes, dict[str, str]]:
    refusals = {
        "mill/gated": (403, b"{}", {"X-Error-Code": "GatedRepo"}),
        "mill/locked": (401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "mill/private": (401, b"{}", {}),
        "mill/broken": (501, b"{}", {}),
    }
    if repo in refusals:
        return refusals[repo]
    if repo not in hub.repos:
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
    rest = path.removeprefix(f"/api/models/{repo}")
    files = hub.repos[repo]
    if rest.startswith("/tree/"):
        tree = [_entry(name, data) for name, data in files.items()]
        return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
    if rest in ("", "/revision/main", "/revision/v1"):
        siblings = [{"rfilename": name} for name in files]
        facts = {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        return 200, json.dumps(facts).encode(), {"Content-Type": "application/json"}
    return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
