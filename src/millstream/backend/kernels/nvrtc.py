"""NVRTC, CUDA's compiler as a library, through ctypes: from a kernel's source to a binary for one GPU architecture.

It is the library that MLX has loaded. A call releases the GIL, and NVRTC is thread-safe: kernels compile in parallel.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import MillstreamError

PROCESS_MAPS = Path("/proc/self/maps")
CUDA_ROOT = Path("/usr/local/cuda")
HEADER = "cuda_bf16.h"
"""A header that every kernel includes: where it is, the others are."""


class CompileError(MillstreamError):
    """NVRTC refused a source; the message has its log."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel: the machine code, and the name of the function in it."""

    code: bytes
    symbol: str


class Nvrtc:
    def __init__(self, library: str | Path, includes: Sequence[Path] = ()) -> None:
        """`library`: the path of libnvrtc. Raises OSError if it cannot be loaded, AttributeError if it is another
        library."""
        path = Path(library)
        # NVRTC opens its other half by name alone, which finds it once it is loaded.
        self._parts = [ctypes.CDLL(str(part)) for part in path.parent.glob("libnvrtc-builtins.so.*")]
        self._library = ctypes.CDLL(str(path))
        self._options = [
            b"--device-as-default-execution-space",
            *(f"--include-path={path}".encode() for path in includes),
        ]
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, function: str, architecture: str) -> Binary:
        """`function`: its qualified name in the source. `architecture`: sm_90a, for example. Blocks for as long as it
        takes; raises `CompileError`."""
        library, program = self._library, ctypes.c_void_p()
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
        try:
            self._check(library.nvrtcAddNameExpression(program, function.encode()))
            options = [*self._options, f"--gpu-architecture={architecture}".encode()]
            given = (ctypes.c_char_p * len(options))(*options)
            if library.nvrtcCompileProgram(program, len(options), given):
                log = self._read(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
                raise CompileError(log.rstrip(b"\0").decode(errors="replace"))
            symbol = ctypes.c_char_p()
            self._check(library.nvrtcGetLoweredName(program, function.encode(), ctypes.byref(symbol)))
            code = self._read(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN)
            return Binary(code, (symbol.value or b"").decode())
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, ask_size: Callable[..., int], read: Callable[..., int]) -> bytes:
        size = ctypes.c_size_t()
        self._check(ask_size(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._check(read(program, buffer))
        return buffer.raw[: size.value]

    def _check(self, status: int) -> None:
        if status:
            message: Any = self._library.nvrtcGetErrorString(status)
            raise CompileError(f"NVRTC: {message.decode() if message else status}")


def loaded_nvrtc() -> Path | None:
    """The NVRTC library of this process, which MLX's CUDA build has loaded; None if there is none."""
    if not PROCESS_MAPS.exists():
        return None
    for line in PROCESS_MAPS.read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libnvrtc.so"):
            return path
    return None


def cuda_headers(site_packages: Path) -> Path | None:
    """Where CUDA's headers are: in NVIDIA's Python packages, or in a CUDA toolkit."""
    installed = sorted(site_packages.glob("nvidia/*/include"), reverse=True)
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*installed, *(root / "include" for root in (*toolkits, CUDA_ROOT))]
    return next((folder for folder in candidates if (folder / HEADER).exists()), None)
