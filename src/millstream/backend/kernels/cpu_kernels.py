"""Kernels that MLX compiles on a CPU outlive the process and the machine's temporary folder.

MLX has g++ write a library for every function that it fuses, 0.7 s each and 21 for a small Llama, into `mlx/` of the
temporary folder, and loads whatever is there. Many machines empty that folder when they start; a compiler that was
killed leaves half a library, with which no later start loads; a process may read what another is writing; and who runs
MLX first on a shared machine owns the folder. So it gets a folder of the user's own, and before the compiler stands a
program of ours (`cpu_compiler`).
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from millstream.backend.kernels import cpu_compiler
from millstream.backend.kernels.binary_folder import is_cut_off, limit_size
from millstream.models.disk_space import SOME_BYTES, has_room

COMPILER = "g++"
"""The name by which MLX calls it."""
PROGRAM = """#!/bin/sh
case "$*" in
  *" "{kernels}/*.cpp" -o "{kernels}/*.so)
    if [ -x {python} ] && [ -f {ours} ]; then exec {python} -I -S {ours} {real} {folder} "$@"; fi ;;
esac
exec {real} "$@"
"""
"""What is not a kernel of MLX goes to the compiler."""
TRIED_BYTES = 2**20
"""Are written once, since free bytes may be denied by a quota or a limit."""

log = logging.getLogger(__name__)


def keep_cpu_kernels(root: Path) -> dict[str, str]:
    """Keep them in a folder below `root`: before the first is needed. Does nothing if whoever started this process has
    done so.

    Returns the variables by which MLX finds them. They are set for the process's native code alone: Python has a copy
    of the environment, for itself and for the programs that get it (tool servers, decoders), and that stays as it was.
    """
    real = shutil.which(COMPILER)
    if sys.platform != "linux" or real is None:  # without a compiler MLX fuses nothing
        return {}
    if Path(real).parent.parent == _temporary():
        return {}
    try:
        limit_size(root)
        folder = _folder(root.absolute())
        program = _stand_before(real, folder)
    except OSError as error:
        log.info("Kernels of the CPU are compiled into the temporary folder: %s", error)
        return {}
    log.debug("Compiled kernels are kept in %s", folder)
    variables = {"TMPDIR": str(folder), "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    for name, value in variables.items():
        os.putenv(name, value)
    return variables


def _folder(root: Path) -> Path:
    """For this version of MLX and this kind of processor. Raises OSError if no library can be loaded from it."""
    wide = "-avx2" if "avx2" in _flags() else ""
    folder = root / f"mlx-{importlib.metadata.version('mlx')}-{platform.machine()}{wide}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try_to_write(folder)
    for library in folder.glob("mlx/*/cpu/*.so"):
        if is_cut_off(library):
            log.debug("Removed a damaged kernel: %s", library.name)
            library.unlink(missing_ok=True)
    return folder


def compiled_in(variables: Mapping[str, str]) -> Path | None:
    """Where MLX compiles with what `keep_cpu_kernels` returned. None if it compiles nothing on the CPU."""
    if sys.platform != "linux" or shutil.which(COMPILER) is None:
        return None
    return Path(variables["TMPDIR"]) if variables else _temporary()


def _temporary() -> Path:
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # where C++ looks, in this order
    return Path(next((os.environ[name] for name in names if name in os.environ), "/tmp"))


def try_to_write(folder: Path) -> None:
    """Raises OSError if kernels cannot be compiled and loaded there."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise OSError(f"{folder} is on a file system that runs no programs")
    if not has_room(folder):
        raise OSError(errno.ENOSPC, f"less than {SOME_BYTES >> 20} MiB are free", str(folder))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(TRIED_BYTES))
        file.flush()


def _flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.split() for line in lines if line.startswith("flags")), [])


def _stand_before(real: str, folder: Path) -> Path:
    """Write the program that is found in place of the compiler."""
    ours, kernels = cpu_compiler.__file__, folder / "mlx"
    names = {"python": sys.executable, "ours": ours, "real": real, "folder": folder, "kernels": kernels}
    text = PROGRAM.format(**{name: shlex.quote(str(value)) for name, value in names.items()})
    program = folder / "bin" / COMPILER
    if not program.exists() or program.read_text() != text:
        program.parent.mkdir(exist_ok=True)
        draft = program.with_name(f"{COMPILER}-{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(program)
    return program
