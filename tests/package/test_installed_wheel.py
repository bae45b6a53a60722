"""The wheel in an empty environment: it serves the demo model, or says in one line what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest

import millstream
from support.command import serving
from support.package_building import LIMIT, REPOSITORY, Built, Environment, install_alone, run

DOWNLOADS = 1800.0
"""Seconds for all dependencies, over a slow line."""

SITE = Path(sysconfig.get_paths()["purelib"])
"""Where the dependencies of this environment are. Its `.pth` files do not count there, so the sources are not found."""


@pytest.fixture(scope="module")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install_alone(built.wheel, tmp_path_factory.mktemp("installed") / "venv", [SITE])


@pytest.fixture
def without_mlx(built: Built, tmp_path: Path) -> Environment:
    """An installation without MLX: the dependencies but its packages."""
    others = tmp_path / "dependencies"
    others.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.startswith(("mlx", "millstream", "_editable", "__pycache__")):
            (others / entry.name).symlink_to(entry)
    return install_alone(built.wheel, tmp_path / "venv", [others])


def ask(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


def test_it_serves_the_demo_model(environment: Environment, demo_path: Path, tmp_path: Path) -> None:
    where = run(
        *(environment.python, "-c", "import millstream; print(millstream.__file__)"),
        cwd=tmp_path, env=environment.variables(),
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(environment.folder)
    with serving(environment.command, cwd=tmp_path, env=environment.variables()) as url:
        assert "Paris" in ask(url)


def test_its_version_is_the_package_s(environment: Environment, tmp_path: Path) -> None:
    told = run(environment.command, "--version", cwd=tmp_path, env=environment.variables()).stdout
    assert millstream.__version__ in told


def refusal(environment: Environment, cwd: Path) -> str:
    done = subprocess.run(
        [environment.command, "serve", "--port", "0"],
        cwd=cwd, env=environment.variables(), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_without_mlx_it_says_which_extra_to_install(without_mlx: Environment, tmp_path: Path) -> None:
    line = refusal(without_mlx, tmp_path)
    assert line.startswith("millstream: Millstream needs MLX for ")
    assert "'millstream[c" in line or sys.platform == "darwin"
    # The package `mlx` alone is no better: its library is in another package.
    shell = without_mlx.packages / "mlx"
    shell.mkdir()
    (shell / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    assert refusal(without_mlx, tmp_path) == line


@pytest.mark.whole
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_full_installation_from_the_registry(built: Built, tmp_path: Path, installer: str) -> None:
    """With all its real dependencies and none of ours. The demo model is downloaded, too: by pip, which uv does not put
    into the environments that it makes."""
    environment = Environment(tmp_path / "venv")
    wheel = f"{built.wheel}[cpu]"
    if installer == "pip":
        run(sys.executable, "-m", "venv", environment.folder, cwd=tmp_path)
        run(environment.python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path, limit=DOWNLOADS)
    else:
        pytest.importorskip("uv")
        tools = {"UV_TOOL_DIR": str(tmp_path), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
        run(
            *(sys.executable, "-m", "uv", "tool", "install", "--quiet", "--python", sys.executable, wheel),
            cwd=tmp_path, env={**os.environ, **tools}, limit=DOWNLOADS,
        )  # fmt: skip
        environment = Environment(tmp_path / "millstream")
    variables = {**environment.variables(), "MILLSTREAM_CACHE": str(tmp_path / "cache")}
    with serving(environment.command, cwd=tmp_path, env=variables) as url:
        assert "Paris" in ask(url)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("platform", "extra", "build"),
    [
        ("aarch64-apple-darwin", None, "mlx-metal"),
        ("x86_64-manylinux_2_35", "cpu", "mlx-cpu"),
        ("aarch64-manylinux_2_35", "cpu", "mlx-cpu"),
        ("x86_64-manylinux_2_35", "cuda", "mlx-cuda-13"),
        ("x86_64-manylinux_2_35", "cuda12", "mlx-cuda-12"),
    ],
)
@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_all_dependencies_have_wheels(platform: str, extra: str | None, build: str, python: str) -> None:
    """For machines that are not at hand: what pip would install there, without compiling anything."""
    pytest.importorskip("uv")
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--only-binary", ":all:"]
    options = ["--python-platform", platform, "--python-version", python, *(["--extra", extra] if extra else [])]
    env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    told = run(*resolve, *options, "pyproject.toml", cwd=REPOSITORY, env=env, limit=DOWNLOADS).stdout
    names = {line.split("==")[0] for line in told.splitlines() if "==" in line}
    assert {name for name in names if name.startswith("mlx")} == {"mlx", "mlx-lm", build}
