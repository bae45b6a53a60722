"""The C++ compiler, for the kernels that MLX compiles at run time on a CPU: a second and more each, mostly for headers.

Put before the real one on the PATH, it compiles each kernel once for all workers, with precompiled headers. What it is
asked to compile besides goes to the real one. Runs as a program of its own: imports the standard library alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "g++"
HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
SCRIPT = """#!/bin/sh
case "$*" in
  *-shared*" -o "*.so) exec "{python}" -I -S "{own}" "{real}" "{folder}" "$@" ;;
  *) exec "{real}" "$@" ;;
esac
"""
"""MLX gives the library last; other callers give their source last."""


def install(folder: Path) -> None:
    """Called by conftest, before MLX is imported. Workers and engine processes inherit the PATH."""
    real = shutil.which(NAME)
    if sys.platform != "linux" or real is None or "MILLSTREAM_KERNELS" in os.environ:
        return
    import importlib.metadata

    folder = folder / importlib.metadata.version("mlx")
    program = folder / "bin" / NAME
    program.parent.mkdir(parents=True, exist_ok=True)
    draft = program.with_name(f"{NAME}-{os.getpid()}")
    draft.write_text(SCRIPT.format(real=real, python=sys.executable, own=__file__, folder=folder))
    draft.chmod(0o755)
    draft.replace(program)
    os.environ["MILLSTREAM_KERNELS"] = str(folder)
    os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"


def compile_kernel(real: str, folder: Path, arguments: list[str]) -> int:
    """`arguments` are options, the source, -o and the library."""
    source, library = Path(arguments[-3]), Path(arguments[-1])
    options = arguments[:-3]
    key = hashlib.sha256(repr(options).encode() + source.read_bytes()).hexdigest()
    made = folder / f"{key}.so"
    with _locked(folder / f"{key}.lock"):
        if not made.exists():
            draft = folder / f"{key}.draft"
            headers = ["-I", str(folder / "headers")] if _precompiled(real, folder, options) else []
            if code := _run([real, *headers, *options, str(source), "-o", str(draft)]):
                return code
            draft.replace(made)
    # Another engine may look for the library at this moment: it must not find half of it.
    copy = library.with_name(f"{key}-{os.getpid()}")
    shutil.copyfile(made, copy)
    copy.replace(library)
    return 0


def _precompiled(real: str, folder: Path, options: list[str]) -> bool:
    """Compile the header that all kernels include, once."""
    found = [place for place in map(Path, options) if (place / HEADER).is_file()]
    if not found:
        return False
    made = (folder / "headers" / HEADER).with_suffix(".h.gch")
    made.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "headers" / "lock"):
        if not made.exists():
            draft = made.with_suffix(".draft")
            command = [real, *(option for option in options if option != "-shared")]
            command += ["-x", "c++-header", str(found[0] / HEADER), "-o", str(draft)]
            if _run(command) != 0:
                return False
            draft.replace(made)
    return True


def _run(command: list[str]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(os.spawnv(os.P_NOWAIT, command[0], command), 0)[1])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(compile_kernel(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
