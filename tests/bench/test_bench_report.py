"""`millstream bench --report`: one file for an issue, from a running server or from one that it starts."""

from __future__ import annotations

import getpass
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.bench import suite
from millstream.bench.report_file import model_facts, report_text
from millstream.cli import main
from millstream.cli.bench_report import machine_facts
from millstream.config import Settings
from support.server import running
from support.tiny import write_servable

QUICK = ["--output-tokens", "6", "--prompt-words", "8", "--requests", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_servable(tmp_path_factory.mktemp("report") / "tiny", head_dim=32)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running(Settings((str(folder),), port=0, max_batch=4)) as server:
        yield server.url


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "PROMPT_TOKENS", (64, 256))
    monkeypatch.setattr(suite, "BESIDE_TOKENS", 60)
    monkeypatch.setattr(suite, "FIRST_ARRIVALS", 3)


def data(path: Path) -> dict[str, Any]:
    text = path.read_text()
    found: dict[str, Any] = json.loads(text[text.index("```json") + 7 : text.rindex("```")])
    return found


def test_report_of_a_running_server(url: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    assert main(["bench", url, "--report", str(path), "--levels", "1,3", *QUICK]) == 0
    report = data(path)
    (run,) = report["runs"]
    levels = run["figures"]["levels"]
    assert [(level["streams"], level["tokens"], level["errors"]) for level in levels] == [(1, 6, 0), (3, 18, 0)]
    assert [50 < prompt["tokens"] < 270 and prompt["seconds"] > 0 for prompt in run["figures"]["prefill"]] == [True] * 2
    cache = run["figures"]["prefix_cache"]
    assert 0 < cache["cached_tokens"] < cache["tokens"] and cache["cold_seconds"] > 0 < cache["warm_seconds"]
    beside = run["figures"]["beside_long_prompt"]
    assert beside["streams"] == suite.BESIDE_STREAMS and beside["gap_p50_before"] > 0 and beside["first_seconds"] > 0
    assert run["model"]["device"].startswith(("cpu", "metal", "cuda")) and run["model"]["weight_bytes"] > 0
    assert any("fast paths:" in note for note in run["model"]["notes"])
    assert {"Millstream", "mlx", "mlx-lm", "Python", "system"} <= report["machine"].keys()


def test_head_of_the_report_is_for_people(url: str, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    assert main(["bench", url, "--report", str(path), "--levels", "1", *QUICK]) == 0
    head = path.read_text().split("## Data")[0]
    for part in (
        "# Millstream benchmark report",
        "| mlx |",
        "| tokens/s |",
        "Prefill of",
        "Prefix cache",
        "beside 4 str",
    ):
        assert part in head


def test_report_names_no_paths_hosts_users_or_keys(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_API_KEY", "sk-secret")
    path = tmp_path / "report.md"
    assert main(["bench", url, "--report", str(path), "--levels", "1", *QUICK]) == 0
    text = path.read_text()
    private = [str(folder.parent), str(Path.home()), str(tmp_path), "sk-secret", url.removeprefix("http://")]
    names = [name for name in (platform.node(), getpass.getuser()) if len(name) > 5]
    assert [each for each in (*private, *names) if each != "/" and each in text] == []


def test_paths_in_notes_are_left_out() -> None:
    notes = [
        "for images, run: /home/ada/.venv/bin/pip install x",
        r"C:\Users\ada\model is odd",
        "org/model is fine, 1/2",
    ]
    facts = model_facts({"id": "org/model", "notes": notes, "pid": 7, "error": "no", "aliases": ["mine"]})
    assert facts == {
        "id": "org/model",
        "notes": ["for images, run: (path) install x", "(path) is odd", "org/model is fine, 1/2"],
    }


def test_level_that_takes_too_long_is_the_last(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LEVEL_SECONDS", 0.0)
    monkeypatch.setattr(suite, "PROMPT_SECONDS", 0.0)
    path = tmp_path / "report.md"
    assert main(["bench", url, "--report", str(path), "--levels", "1,2,3", *QUICK]) == 0
    figures = data(path)["runs"][0]["figures"]
    assert (len(figures["levels"]), len(figures["prefill"])) == (1, 1)


def test_report_of_servers_that_it_starts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    assert (
        main(["bench", "--report", str(path), "--serve", str(folder), "--kv-bits", "0,8", "--levels", "2", *QUICK]) == 0
    )
    plain, packed = data(path)["runs"]
    assert [plain["options"], packed["options"]] == ["", "--kv-bits 8"]
    assert packed["model"]["kv_bytes_per_token"] < plain["model"]["kv_bytes_per_token"]
    assert all(run["figures"]["levels"][0]["errors"] == 0 for run in (plain, packed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "m"], "are for --report"),
        (["--report", "r.md", "--kv-bits", "8"], "needs --serve"),
        (["--report", "r.md", "--serve", "/nonexistent/model"], "no such folder"),
        (["127.0.0.1:9", "--report", "r.md"], "No server answers"),
    ],
)
def test_what_cannot_be_measured_is_said(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) != 0
    assert message in capfd.readouterr().err
    assert not os.listdir(tmp_path)


def test_server_elsewhere_is_not_described_by_this_machine() -> None:
    assert machine_facts(local=False).keys() == {"client"}
    assert "another machine" in report_text(machine_facts(local=False), [])
