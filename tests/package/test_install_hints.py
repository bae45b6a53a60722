"""The command that a message names for what is missing, in each kind of environment."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream import installed


def test_this_environment_has_mlx() -> None:
    assert installed.has_mlx()
    installed.require_mlx()


@pytest.mark.parametrize(
    ("system", "cuda", "extra"),
    [("linux", 0, "cpu"), ("linux", 12080, "cuda12"), ("linux", 13000, "cuda"), ("darwin", 0, "")],
)
def test_the_extra_follows_from_the_machine(
    monkeypatch: pytest.MonkeyPatch, system: str, cuda: int, extra: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(installed, "_cuda_of_driver", lambda: cuda)
    monkeypatch.setattr(installed, "has_mlx", lambda: False)
    assert installed.mlx_extra() == extra
    with pytest.raises(installed.MlxMissing) as refusal:
        installed.require_mlx()
    assert refusal.value.message.endswith(f"'millstream[{extra}]'" if extra else " mlx")
    assert "\n" not in refusal.value.message


@pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's driver is a library of Linux")
@pytest.mark.parametrize(("version", "extra"), [(12080, "cuda12"), (13000, "cuda")])
def test_the_driver_is_asked_for_its_version(tmp_path: Path, version: int, extra: str) -> None:
    """A library with the driver's name stands in for it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}")
    build = [compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=60)
    told = subprocess.run(
        [sys.executable, "-c", "from millstream.installed import mlx_extra; print(mlx_extra())"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout.strip() == extra


def test_the_command_is_of_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    assert shlex.split(installed.vision_command()) == [
        str(python), "-m", "pip", "install", "--no-deps", "mlx-vlm", "pillow",
    ]  # fmt: skip
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / "bin" / name))
    assert installed.vision_command() == "pip install --no-deps mlx-vlm pillow"
    assert installed.audio_command() == "pip install --no-deps mlx-audio"


def test_the_command_of_an_environment_that_uv_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    find = importlib.util.find_spec

    def find_all_but_pip(name: str) -> importlib.machinery.ModuleSpec | None:
        return None if name == "pip" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_pip)
    assert installed.install_command("x[y]") == f"uv pip install --python {tmp_path}/python 'x[y]'"
    (tmp_path / "uv-receipt.toml").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert installed.install_command("x[y]") == "uv tool install --force 'x[y]'"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "archive-v0" / "abc"))
    assert installed.install_command("millstream[cpu]") == "uvx --from 'millstream[cpu]' millstream"
