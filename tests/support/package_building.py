"""Builds the wheel and the sdist, and makes environments to install the wheel into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EPOCH = "1700000000"
LIMIT = 300.0


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment. `command` is its `millstream`."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        return self.folder / "bin" / "millstream"

    @property
    def packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def variables(self) -> dict[str, str]:
        """This process's, without what would let Python find the sources."""
        return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(
    *command: str | Path, cwd: Path, env: dict[str, str] | None = None, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build(source: Path, out: Path) -> Built:
    """The wheel is built from the sdist, as by everyone who installs from that."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", out, source, cwd=source, env=env)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


def copy_of_the_repository(folder: Path) -> Path:
    """What git would know of: tracked files, and new ones that it does not ignore."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=REPOSITORY).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


def install_alone(wheel: Path, folder: Path, dependencies: Iterable[Path]) -> Environment:
    """Installs the wheel into an empty environment, whose dependencies are in the folders that are given."""
    environment = Environment(folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=REPOSITORY)
    run(
        *(sys.executable, "-m", "pip", "--python", environment.python, "install", "--quiet", "--no-deps"),
        *("--no-index", "--disable-pip-version-check", wheel),
        cwd=folder,
    )
    (environment.packages / "dependencies.pth").write_text("\n".join(map(str, dependencies)))
    return environment
