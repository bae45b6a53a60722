"""The folder in which compiled kernels outlive a process: MLX's own ones and ours, in the form in which MLX reads them.

A kernel is two files: NAME.ptx holds the machine code, NAME.txt the functions in it, one per line. Several processes
may write at once, and one may be killed while it does.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from millstream.backend.kernels.nvrtc import Binary

MAX_BYTES = 512 * 2**20
"""Of all folders below the root: one for each version of MLX, of the compiler, and kind of GPU."""
KEPT_SHARE = 0.75
"""What is left of `MAX_BYTES` once the least recently used files are removed."""

_CHECKSUM = "sha256 "
"""A line of NAME.txt without a tab, which MLX skips."""

log = logging.getLogger(__name__)


class BinaryFolder:
    def __init__(self, folder: Path) -> None:
        """Raises OSError if it cannot be made."""
        self.path = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def ensure(self, module: str, function: str, compile_binary: Callable[[], Binary]) -> None:
        """Make sure that MLX finds the kernel `function` of this module. Raises what `compile_binary` raises, and
        OSError."""
        code, names = self.path / f"{module}.ptx", self.path / f"{module}.txt"
        if _intact(code, names):
            with contextlib.suppress(OSError):  # a folder that is only read
                os.utime(code)
            return
        binary = compile_binary()
        checksum = hashlib.sha256(binary.code).hexdigest()
        # MLX looks for the code: what belongs to it must be there before.
        _write(names, f"{function}\t{binary.symbol}\n{_CHECKSUM}{checksum}\n".encode())
        _write(code, binary.code)

    def remove_damaged(self) -> int:
        """Remove code that was cut off while it was written, or whose names were: MLX would try to load it at every
        start. Returns how many files there were."""
        damaged = [path for path in self.path.rglob("*.ptx") if is_cut_off(path) or not _has_names(path)]
        for path in damaged:
            log.debug("Removed a damaged kernel: %s", path.name)
            path.unlink(missing_ok=True)
        return len(damaged)


def limit_size(root: Path, max_bytes: int = MAX_BYTES) -> None:
    """Remove the least recently used files below `root` if all together are larger than `max_bytes`."""
    files = []
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it
            status = path.stat()
            if path.is_file():
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= max_bytes:
        return
    for _, size, path in sorted(files):
        if total <= max_bytes * KEPT_SHARE:
            break
        path.unlink(missing_ok=True)
        total -= size


def _intact(code: Path, names: Path) -> bool:
    try:
        lines = names.read_text().splitlines()
        return f"{_CHECKSUM}{hashlib.sha256(code.read_bytes()).hexdigest()}" in lines
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _write(path: Path, data: bytes) -> None:
    """At once, or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _has_names(path: Path) -> bool:
    try:
        return path.with_suffix(".txt").read_bytes().endswith(b"\n")
    except FileNotFoundError:
        return False


def is_cut_off(path: Path) -> bool:
    """True for machine code (an ELF file) that is shorter than its own tables say. Other files are not judged."""
    header = struct.Struct("<32xQQ6xHHHH")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(header.size)
    except FileNotFoundError:
        return False
    if len(head) < header.size:
        return True
    if not head.startswith(b"\x7fELF"):
        return False
    program, section, program_size, programs, section_size, sections = map(int, header.unpack(head))
    return size < max(program + program_size * programs, section + section_size * sections)
