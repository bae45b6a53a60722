"""`millstream list`, `show` and `rm` on a cache that a stand-in of the hub has filled, and `pull` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.cli import main
from millstream.cli.show import as_text
from millstream.config import Settings
from millstream.errors import ModelError
from millstream.loading.files import FileSearch
from millstream.model_facts import ModelCard
from millstream.models.hub import ALLOWED
from millstream.models.hub_fetch import Repository, fetch
from millstream.models.last_used import mark_used
from millstream.models.nearby import did_you_mean
from support.agent_stage import Player, playing
from support.hub_server import COMMIT, HubServer
from support.server import running
from support.tiny_gguf import write_gguf

TINY, QUANTS = "mill/tiny", "mill/tiny-gguf"
CARD = b"---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n"
NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def hub(servable: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    files = {path.name: path.read_bytes() for path in servable.iterdir()}
    gguf = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()
    quants = {"tiny-Q8_0.gguf": gguf, "tiny-F16.gguf": gguf + b"\0" * 100, "README.md": b"words"}
    with HubServer({TINY: {**files, "README.md": CARD}, QUANTS: quants}) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def filled(hub: HubServer, cache: Path) -> Path:
    """A cache with a folder of safetensors and two GGUF files of one repository."""
    for repo, allowed in ((TINY, (*ALLOWED, "README.md")), (QUANTS, ("*.gguf", "README.md"))):
        fetch(
            Repository(repo, None, COMMIT, allowed),
            progress=lambda done, total: None,
            cache_dir=cache / "hub",
            endpoint=hub.url,
        )
    return cache


def listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["list", "--json", "--cache-dir", str(cache)]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def run_rm(cache: Path, *arguments: str) -> int:
    return main(["rm", *arguments, "--cache-dir", str(cache), "--url", NO_SERVER])


def test_list_tells_what_is_on_disk(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = listed(filled, capsys)
    assert set(models) == {TINY, f"{QUANTS}:Q8_0", f"{QUANTS}:F16"}
    tiny = models[TINY]
    assert (tiny["kind"], tiny["family"], tiny["quantization"]) == ("text", "llama", "F32")
    assert tiny["complete"] and tiny["context_length"] and tiny["last_used"] is None
    assert tiny["size_bytes"] == sum(path.stat().st_size for path in Path(tiny["path"]).iterdir())
    mark_used(Path(tiny["path"]), filled)
    assert main(["ls", "--cache-dir", str(filled)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "KIND", "QUANTISATION", "CONTEXT", "LAST", "USED"]
    [line] = [line for line in lines if line.startswith(f"{TINY} ")]
    assert "text" in line and "F32" in line and line.rstrip().endswith("seconds ago")
    assert "\x1b" not in header, "no colours without a terminal"


def test_an_empty_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--cache-dir", str(cache)]) == 0
    assert "millstream pull" in capsys.readouterr().out


def test_show_a_folder_of_the_cache(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", TINY, "--cache-dir", str(filled), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["name"], fields["architecture"], fields["licence"]) == (TINY, "llama", "apache-2.0")
    assert fields["memory"]["fits"] is True
    assert fields["memory"]["minimum_bytes"] >= fields["memory"]["weight_bytes"] > 0
    assert "completion" in fields["capabilities"]
    assert not fields["notes"] and fields["sampling"] == {}
    assert main(["show", TINY, "--cache-dir", str(filled)]) == 0
    text = capsys.readouterr().out
    assert "Licence" in text and "apache-2.0" in text and "It fits" in text
    assert main(["show", TINY, "--cache-dir", str(filled), "--template"]) == 0
    assert "messages" in capsys.readouterr().out


def test_show_a_gguf_file_by_tag_by_file_and_by_path(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = listed(filled, capsys)[f"{QUANTS}:Q8_0"]["path"]
    for name in (f"{QUANTS}:Q8_0", f"{QUANTS}/tiny-Q8_0.gguf", path):
        assert main(["show", name, "--cache-dir", str(filled), "--json"]) == 0
        fields = json.loads(capsys.readouterr().out)
        assert (fields["format"], fields["context_length"]) == ("gguf", 256)


def test_show_says_what_is_missing(filled: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "mill/tinny", "--cache-dir", str(filled)]) == 1
    assert "mill/tinny is not on this machine. Did you mean mill/tiny" in capsys.readouterr().err
    assert main(["show", "./nothing"]) == 1
    assert "no such folder or file: ./nothing" in capsys.readouterr().err


def test_show_says_who_drafts_and_how_well() -> None:
    drafts = [{"drafter": "grammar", "proposed": 0, "accepted": 0}, {"drafter": "mtp", "proposed": 40, "accepted": 30}]
    card = {"drafters": ["grammar", "mtp"], "passes": 9, "gain": 1.4, "drafts": drafts}
    line = as_text({"id": "mill", "speculation": card}).splitlines()[1]
    assert line.split(maxsplit=1) == [
        "Drafts",
        "by grammar, mtp; mtp 30 of 40 right; steps that verify them give 1.4 times as many tokens per second",
    ]
    assert as_text({"id": "mill", "speculation": {**card, "drafts": []}}).endswith("by grammar, mtp")


def test_show_a_served_model(capsys: pytest.CaptureFixture[str]) -> None:
    player = Player()
    with playing(player) as url:
        name = player.models()[0].name
        assert main(["show", name, "--url", url]) == 0
        text = capsys.readouterr().out
        assert name in text and "ready" in text
        assert main(["show", f"{name}x", "--url", url]) == 1
        assert f"Did you mean {name}?" in capsys.readouterr().err
    assert main(["show", name, "--url", NO_SERVER]) == 1
    assert "No server answers" in capsys.readouterr().err


def test_rm_asks_and_removes_all_of_it(
    filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert run_rm(filled, TINY) == 1
    assert "Nothing was removed" in capsys.readouterr().out
    assert TINY in listed(filled, capsys)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "yes")
    assert run_rm(filled, TINY) == 0
    assert "free" in asked[0]
    assert "freed" in capsys.readouterr().out
    assert set(listed(filled, capsys)) == {f"{QUANTS}:Q8_0", f"{QUANTS}:F16"}
    assert not (filled / "hub" / "models--mill--tiny").exists()


def test_rm_removes_one_gguf_file_and_then_the_last(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(listed(filled, capsys)[f"{QUANTS}:F16"]["path"])
    blob = path.resolve()
    assert run_rm(filled, f"{QUANTS}:F16", "--yes") == 0
    assert not blob.exists() and not path.is_symlink()
    assert f"{QUANTS}:Q8_0" in listed(filled, capsys)
    assert run_rm(filled, f"{QUANTS}/tiny-Q8_0.gguf", "--yes") == 0
    assert set(listed(filled, capsys)) == {TINY}
    assert not (filled / "hub" / "models--mill--tiny-gguf").exists()


def test_rm_removes_a_whole_repository_and_partial_files(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = filled / "hub" / "models--mill--half" / "blobs" / ("0" * 64 + ".incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half")
    half = listed(filled, capsys)["mill/half"]
    assert (half["complete"], half["size_bytes"]) == (False, 4)
    assert main(["show", "mill/half", "--cache-dir", str(filled)]) == 1
    assert "millstream pull mill/half" in capsys.readouterr().err
    assert run_rm(filled, "mill/half", QUANTS, "-y") == 0
    assert set(listed(filled, capsys)) == {TINY}
    assert not partial.exists()


def test_rm_refuses_what_a_server_uses_and_what_it_does_not_know(
    filled: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_rm(filled, "mill/tony") == 1
    assert "Did you mean mill/tiny" in capsys.readouterr().err
    assert run_rm(filled, str(tmp_path)) == 1
    assert "not a downloaded model" in capsys.readouterr().err
    cards = [ModelCard("a-name", created=1, state="ready", aliases=(TINY,))]
    with playing(Player(cards=cards)) as url:
        assert main(["rm", TINY, "--yes", "--cache-dir", str(filled), "--url", url]) == 1
        assert f"uses {TINY}. Stop it first" in capsys.readouterr().err
        cards[0] = ModelCard(TINY, created=1, state="failed")
        assert main(["rm", TINY, "--yes", "--cache-dir", str(filled), "--url", url]) == 0
    assert TINY not in listed(filled, capsys)


def test_serve_suggests_a_model_on_disk(filled: Path) -> None:
    class Loading:
        def report_progress(self, progress: object) -> None:
            raise AssertionError("nothing is downloaded")

    async def find(spec: str) -> None:
        FileSearch(Loading(), print).find(spec, filled)  # type: ignore[arg-type]

    with pytest.raises(ModelError, match=r"a hub id would look like org/name\. Did you mean mill/tiny"):
        asyncio.run(find("tiny"))


def test_a_gguf_file_of_the_hub_is_served_by_its_tag(
    filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = f"{QUANTS}:Q8_0"
    with running(Settings(models=(name,), cache_dir=filled, port=0, isolation="thread")) as server:
        body = {"model": name, "prompt": "hello", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        card = httpx.get(f"{server.url}/v1/models/{name}").json()
        assert (card["state"], card["phase"], card["progress"]) == ("ready", None, None)
        assert main(["rm", name, "--yes", "--cache-dir", str(filled), "--url", server.url]) == 1
    models = listed(filled, capsys)
    assert models[name]["last_used"] is not None
    assert models[f"{QUANTS}:F16"]["last_used"] is None


def test_similar_names() -> None:
    known = ["mlx-community/Qwen3-4B-4bit", "org/llama"]
    assert did_you_mean("mlx-community/qwen3-4b-4bti", known) == " Did you mean mlx-community/Qwen3-4B-4bit?"
    assert did_you_mean("qwen3", known) == " Did you mean mlx-community/Qwen3-4B-4bit?"
    assert did_you_mean("zzz", known) == ""


def pull(hub: HubServer, cache: Path, model: str) -> list[str]:
    return [sys.executable, "-m", "millstream", "pull", model, "--cache-dir", str(cache)]


def test_pull_without_a_terminal(hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url}
    done = subprocess.run(pull(hub, cache, TINY), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"downloading {TINY} from the hub..." in done.stderr
    assert "100 %" in done.stderr and "\x1b" not in done.stderr + done.stdout
    assert f"{TINY} is complete" in done.stdout and f"millstream serve {TINY}" in done.stdout
    assert set(listed(cache, capsys)) == {TINY}
    wrong = subprocess.run(pull(hub, cache, "mill/none"), env=environment, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "millstream: the hub has no model 'mill/none'" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_pull_shows_a_bar_in_a_terminal(hub: HubServer, cache: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "TERM": "xterm", "COLUMNS": "120"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        pull(hub, cache, f"{QUANTS}:Q8_0"), env=environment, stdout=theirs, stderr=theirs, stdin=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # Linux: the other side is closed
                break
            if not data:
                break
            shown += data
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    assert "100 %" in shown.decode() and "━" in shown.decode()


def test_pull_of_a_folder_says_that_it_is_here(servable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(servable)]) == 1
    assert "on this machine already" in capsys.readouterr().err
