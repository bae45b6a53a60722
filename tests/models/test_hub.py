"""Downloads from a local stand-in for the hub: the cache, offline use, and every kind of refusal."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from millstream.errors import ModelError
from millstream.models.hub import HubModel, download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "mill/stream"
HALF_GATED = "mill/asks-first"
"""As most gated models: the repository and its file list are public, the files are not."""
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 100,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "model.pt": b"a pickle",
    "vocab.pkl": b"a pickle",
    "consolidated.safetensors": b"the same weights",
    "notes.md": b"words",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


class StandIn(BaseHTTPRequestHandler):
    """The hub's endpoints that the client uses: repository info, file list, and files."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith(f"/{HALF_GATED}/resolve/"):
            status, body, headers = 403, b"", {"X-Error-Code": "GatedRepo"}
        else:
            status, body, headers = self._find(path.replace(HALF_GATED, REPO))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _find(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if path.startswith("/api/models/mill/gated"):
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if path.startswith("/api/models/mill/locked"):
            return 401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"}
        if path.startswith("/api/models/mill/private"):
            return 401, b"{}", {}
        if path.startswith("/api/models/mill/broken"):
            return 501, b"{}", {}
        if path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
        if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main", f"/api/models/{REPO}/revision/v1"):
            facts = {"id": REPO, "sha": COMMIT, "siblings": [], "tags": [], "private": False}
            return 200, json.dumps(facts).encode(), {"Content-Type": "application/json"}
        if path.startswith(f"/api/models/{REPO}/revision/"):
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            data = FILES[path.rsplit("/", 1)[1]]
            return 200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}


class Hub:
    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.stop()


@pytest.fixture
def reports() -> list[str]:
    return []


def test_it_downloads_the_needed_files_only(hub: Hub, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    assert {path.name for path in folder.iterdir()} == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert reports == [f"downloading {REPO} from the hub..."]
    reports.clear()
    assert download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url) == folder
    assert reports == []


def test_without_the_hub_the_cache_is_used_and_reported(hub: Hub, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO, "v1"), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    hub.stop()
    reports.clear()
    assert download(HubModel(REPO, "v1"), report=reports.append, cache_dir=tmp_path, endpoint=hub.url) == folder
    assert len(reports) == 1
    assert "cannot be reached" in reports[0]
    assert "copy in the cache" in reports[0]


def test_without_the_hub_an_incomplete_snapshot_is_not_used(hub: Hub, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    hub.stop()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be reached"):
        download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)


def test_without_the_hub_and_a_snapshot(hub: Hub, tmp_path: Path, reports: list[str]) -> None:
    hub.stop()
    with pytest.raises(ModelError, match="cannot be reached"):
        download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (HubModel("mill/none"), "no model 'mill/none'"),
        (HubModel("mill/gated"), "gated.*HF_TOKEN"),
        (HubModel(HALF_GATED), "gated.*HF_TOKEN"),
        (HubModel("mill/locked"), "401.*HF_TOKEN"),
        (HubModel("mill/private"), "HF_TOKEN"),
        (HubModel("mill/broken"), "501"),
        (HubModel("mill/two--dashes"), "not a valid model name on the hub"),
        (HubModel(REPO, "v9"), "no revision 'v9'"),
    ],
)
def test_refusals(hub: Hub, tmp_path: Path, reports: list[str], model: HubModel, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        download(model, report=reports.append, cache_dir=tmp_path, endpoint=hub.url)


OFFLINE = """
import sys
from pathlib import Path
from millstream.errors import ModelError
from millstream.models.hub import HubModel, download
try:
    print(download(HubModel(sys.argv[1]), report=print, cache_dir=Path(sys.argv[2])))
except ModelError as error:
    print("refused:", error.message)
"""


def test_offline_mode_uses_the_cache_only(hub: Hub, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.url}

    def start(repo: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OFFLINE, repo, str(tmp_path)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    here, missing = start(REPO), start("mill/other")
    assert here.communicate()[0].splitlines() == [f"offline: serving {REPO} from the cache", str(folder)]
    assert "refused: mill/other is not in the cache, and HF_HUB_OFFLINE is set" in missing.communicate()[0]
