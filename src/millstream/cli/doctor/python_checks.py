"""Is this Python able to run Millstream? Version, processor, virtual environment, text encoding."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from millstream.cli.doctor.finding import Finding, ok, problem, warning

OLDEST = (3, 11)
OLDEST_MACOS = 14


def check_python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < OLDEST:
        yield problem("python", f"Python {version} is too old: 3.11 or newer is needed.", "uv python install 3.12")
    elif sys.maxsize < 2**32:
        yield problem("python", f"Python {version} is a 32-bit build.", "install a 64-bit Python")
    else:
        yield ok("python", f"Python {version} at {sys.executable}")
    yield from check_platform(platform.system(), platform.machine(), platform.mac_ver()[0])
    yield from _environment()
    yield from _encoding()


def check_platform(system: str, machine: str, macos: str) -> Iterator[Finding]:
    if system == "Darwin" and machine != "arm64":
        yield problem(
            "platform",
            "This is a Python for Intel processors, so MLX cannot use the GPU of Apple silicon (Rosetta).",
            "install a Python for arm64: uv python install cpython-3.12-macos-aarch64",
        )
    elif system == "Darwin" and int(macos.split(".")[0] or 0) < OLDEST_MACOS:
        yield problem("platform", f"macOS {macos} is too old for MLX: {OLDEST_MACOS} or newer.", "update macOS")
    elif system not in ("Darwin", "Linux"):
        yield problem("platform", f"There is no MLX for {system}.", "use macOS or Linux; on Windows, WSL 2")
    else:
        yield ok("platform", f"{system} {macos or platform.release()}, {machine}")


def _environment() -> Iterator[Finding]:
    if sys.prefix != sys.base_prefix:
        again = f"rm -r {sys.prefix} && python3 -m venv {sys.prefix}, then install Millstream again"
        if not Path(sys.base_prefix).is_dir() or not base_exists(Path(sys.prefix)):
            yield problem("environment", f"{sys.prefix} was made with a Python that is gone.", again)
        else:
            yield ok("environment", f"virtual environment {sys.prefix}")
    if os.environ.get("PYTHONHOME"):
        yield warning("environment", "PYTHONHOME is set: Python may load the wrong library.", "unset PYTHONHOME")
    command = shutil.which("millstream")
    if command and Path(command).resolve().parent not in _bin_folders():
        yield warning(
            "environment",
            f"'millstream' on PATH is {command}, which is another installation than this one ({sys.prefix}).",
            f"export PATH={Path(sys.executable).parent}:$PATH",
        )


def base_exists(environment: Path) -> bool:
    """Whether the Python that a virtual environment was made with is still there."""
    try:
        lines = (environment / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    homes = [value.strip() for key, _, value in (line.partition("=") for line in lines) if key.strip() == "home"]
    return all(Path(home).is_dir() for home in homes)


def _bin_folders() -> set[Path]:
    """Tools of `uv` and `pipx` are links to the bin folder of their environment."""
    return {Path(sys.prefix, "bin").resolve(), Path(sys.executable).parent, Path(sys.executable).resolve().parent}


def _encoding() -> Iterator[Finding]:
    found = {"locale": locale.getpreferredencoding(False), "output": getattr(sys.stdout, "encoding", None) or "utf-8"}
    wrong = [f"{kind} is {name}" for kind, name in found.items() if name.lower().replace("-", "") not in _UTF8]
    if wrong:
        yield warning(
            "encoding",
            f"Text is not UTF-8 here ({', '.join(wrong)}): answers may show wrong characters.",
            "export LANG=C.UTF-8; unset LC_ALL PYTHONIOENCODING",
        )
    else:
        yield ok("encoding", "UTF-8")


_UTF8 = ("utf8", "utf8sig")
