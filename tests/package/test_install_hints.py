"""The command that a message names for what is missing, in each kind of environment."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shlex
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


def test_the_command_is_of_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    assert shlex.split(installed.vision_command()) == [
        str(python), "-m", "pip", "install", "--no-deps", "mlx-vlm", "pillow",
    ]  # fmt: skip
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / "bin" / name))
    assert installed.vision_command() == "pip install --no-deps mlx-vlm pillow"


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
