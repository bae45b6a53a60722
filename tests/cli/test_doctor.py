"""`millstream doctor` finds set-ups that were really broken: each runs in a child with an environment of its own."""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from millstream.cli.doctor.mlx_checks import check_builds, check_driver
from millstream.cli.doctor.network_checks import check_port
from millstream.cli.doctor.python_checks import base_exists, check_platform
from millstream.cli.doctor.system_checks import check_memory
from support.agent_stage import Player, playing

PATIENCE = 300
SOURCE = Path(__file__).parents[2] / "src"
PACKAGES = Path(site.getsitepackages()[0])

Report = dict[str, Any]
Doctor = Callable[..., tuple[int, list[Report]]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Runs the command. `first` is a folder whose modules come before all others; `python` is another interpreter."""

    def run(
        *arguments: str, first: Path | None = None, python: str = sys.executable, **variables: str
    ) -> tuple[int, list[Report]]:
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        path = os.pathsep.join(str(folder) for folder in (first, SOURCE) if folder is not None)
        done = subprocess.run(
            [python, "-P", "-m", "millstream", "doctor", "--json", "--port", "0", *arguments],
            capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path,
            env=kept | {"PYTHONPATH": path} | variables,
        )  # fmt: skip
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)["findings"]

    return run


def broken(findings: list[Report], check: str, status: str = "problem") -> Report:
    """The one finding of a check that is not ok."""
    found = [finding for finding in findings if finding["check"] == check and finding["status"] != "ok"]
    assert len(found) == 1, findings
    assert found[0]["status"] == status
    assert found[0]["fix"], "what is to be done?"
    return found[0]


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def fake_mlx(folder: Path, code: str) -> Path:
    """A package `mlx` whose library does something else."""
    write(folder / "mlx" / "__init__.py", "")
    write(folder / "mlx" / "core.py", code)
    return folder


def without(folder: Path, *names: str) -> str:
    """The Python of a real virtual environment that has all packages of this one but some."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PATIENCE)
    packages = next(folder.glob("lib/python*/site-packages"))
    for entry in PACKAGES.iterdir():
        if not entry.name.lower().replace("-", "_").startswith(names) and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


def test_this_installation_works(doctor: Doctor) -> None:
    code, findings = doctor()
    assert [finding for finding in findings if finding["status"] == "problem"] == []
    assert code == 0
    assert {finding["check"] for finding in findings} >= {"python", "packages", "mlx", "memory", "model cache", "port"}


def test_mlx_that_cannot_be_imported(doctor: Doctor, tmp_path: Path) -> None:
    fake = fake_mlx(tmp_path / "fake", "raise ImportError('libmlx.so: cannot open shared object file')")
    code, findings = doctor("--only", "mlx", first=fake)
    assert code == 1
    found = broken(findings, "mlx")
    assert "while it was imported: ImportError: libmlx.so" in found["detail"]
    assert "--force-reinstall" in found["fix"]


def test_mlx_that_crashes(doctor: Doctor, tmp_path: Path) -> None:
    code, findings = doctor("--only", "mlx", first=fake_mlx(tmp_path / "fake", "import os; os.abort()"))
    assert code == 1
    assert "MLX crashed (SIGABRT) while it was imported" in broken(findings, "mlx")["detail"]


def test_mlx_that_hangs(doctor: Doctor, tmp_path: Path) -> None:
    fake = fake_mlx(tmp_path / "fake", "import time; time.sleep(1000)")
    code, findings = doctor("--only", "mlx", "--timeout", "2", first=fake)
    assert code == 1
    assert "did not answer in time" in broken(findings, "mlx")["detail"]


def test_no_mlx_and_no_numpy(doctor: Doctor, tmp_path: Path) -> None:
    code, findings = doctor(python=without(tmp_path / "venv", "mlx", "numpy"))
    assert code == 1
    assert broken(findings, "mlx")["detail"] == "MLX is not installed."
    assert "millstream[" in broken(findings, "mlx")["fix"]
    missing = next(finding for finding in findings if finding["detail"].startswith("missing:"))
    assert "numpy" in missing["detail"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has a BLAS of its own")
def test_no_blas_library(doctor: Doctor, tmp_path: Path) -> None:
    import ctypes.util

    if ctypes.util.find_library("openblas"):
        pytest.skip("the system has OpenBLAS")
    code, findings = doctor("--only", "mlx", python=without(tmp_path / "venv", "mkl", "nvpl"))
    assert code == 0, "slow, but it works"
    assert "No fast BLAS library" in broken(findings, "blas", "warning")["detail"]


def test_an_empty_environment(doctor: Doctor, tmp_path: Path) -> None:
    """Not even what the command line itself uses."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    code, findings = doctor(python=str(tmp_path / "venv" / "bin" / "python"))
    assert code == 1
    assert any("rich" in finding["detail"] for finding in findings if finding["status"] == "problem")


def test_packages_that_are_too_old_or_collide(doctor: Doctor, tmp_path: Path) -> None:
    for name, version in (("mlx-lm", "0.20.0"), ("mlx-cuda-12", "0.32.4"), ("mlx-metal", "0.32.4")):
        folder = tmp_path / "fake" / f"{name.replace('-', '_')}-{version}.dist-info"
        write(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    code, findings = doctor(first=tmp_path / "fake")
    assert code == 1
    assert "mlx-lm 0.20.0 does not fit" in broken(findings, "packages")["detail"]
    assert "overwrite each other's files" in broken(findings, "mlx")["detail"]
    assert "uninstall" in broken(findings, "mlx")["fix"]


def test_settings_that_get_in_the_way(doctor: Doctor, tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    other = write(tmp_path / "bin" / "millstream", "#!/bin/sh\n")
    other.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, findings = doctor(
            "--port", str(port), "--only", "python", "--only", "system", "--only", "network",
            HF_HUB_CACHE=str(tmp_path / "file" / "hub"),
            http_proxy="http://proxy.example:3128",
            HF_HUB_OFFLINE="1",
            PYTHONIOENCODING="latin-1",
            PATH=f"{other.parent}{os.pathsep}{os.environ['PATH']}",
        )  # fmt: skip
    assert code == 1
    assert "cannot be written: Not a directory" in broken(findings, "model cache")["detail"]
    assert f"Port {port} is taken by another program" in broken(findings, "port", "warning")["detail"]
    assert broken(findings, "proxy", "warning")["fix"].startswith("export NO_PROXY=localhost,127.0.0.1")
    assert broken(findings, "hub", "warning")["fix"] == "unset HF_HUB_OFFLINE"
    assert "another installation" in broken(findings, "environment", "warning")["detail"]
    assert "output is" in broken(findings, "encoding", "warning")["detail"]


def test_a_port_that_is_our_own() -> None:
    with playing(Player()) as url:
        found = check_port(int(url.rsplit(":", 1)[1]))
    assert found.status == "ok"
    assert "is running at" in found.detail


@pytest.mark.parametrize(
    ("system", "machine", "macos", "status", "words"),
    [
        ("Darwin", "x86_64", "15.1", "problem", "Rosetta"),
        ("Darwin", "arm64", "13.6", "problem", "macOS 13.6 is too old"),
        ("Darwin", "arm64", "15.1", "ok", "arm64"),
        ("Windows", "AMD64", "", "problem", "no MLX for Windows"),
    ],
)
def test_other_machines(system: str, machine: str, macos: str, status: str, words: str) -> None:
    [found] = check_platform(system, machine, macos)
    assert found.status == status
    assert words in found.detail


@pytest.mark.parametrize(
    ("builds", "driver", "status", "words"),
    [
        ({"mlx-cpu": "1"}, 590, "warning", "There is an NVIDIA GPU"),
        ({"mlx-cuda-13": "1"}, None, "problem", "no NVIDIA driver"),
        ({"mlx-cuda-13": "1"}, 550, "problem", "The driver 550 is too old"),
        ({"mlx-cuda-12": "1"}, 550, "ok", "fits"),
    ],
)
def test_builds_and_drivers(builds: Mapping[str, str], driver: int | None, status: str, words: str) -> None:
    [found] = check_driver(builds, driver)
    assert found.status == status
    assert words in found.detail


def test_a_virtual_environment_whose_python_is_gone(tmp_path: Path) -> None:
    config = write(tmp_path / "pyvenv.cfg", f"home = {tmp_path}\nversion = 3.12.1\n")
    assert base_exists(tmp_path)
    config.write_text(f"home = {tmp_path / 'gone'}\nversion = 3.12.1\n")
    assert not base_exists(tmp_path)


def test_a_build_of_another_version() -> None:
    [found] = check_builds("0.32.4", {"mlx-cpu": "0.31.0"}, "millstream[cpu]")
    assert found.status == "problem"
    assert "mlx-cpu==0.32.4" in found.fix


def test_a_container_with_less_memory_than_the_machine() -> None:
    [found] = check_memory(64_000_000_000, None, 8_000_000_000)
    assert (found.status, found.fix) == ("warning", "millstream serve --memory 7GB")
    [found] = check_memory(64_000_000_000, 50_000_000_000, None)
    assert found.status == "ok"


def test_the_report_for_people_has_no_colours_without_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "millstream", "doctor", "--only", "network", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)
    assert "\x1b" not in done.stdout
    assert "warning  hub: HF_HUB_OFFLINE is set: no model can be downloaded.\n" in done.stdout
    assert "         fix: unset HF_HUB_OFFLINE\n" in done.stdout
