"""Sets up the process before MLX is imported: BLAS and environment variables. Imports no MLX.

MLX's Linux CPU build links the reference BLAS, whose matmuls are 80 times slower than those of an optimised one. MLX
looks its symbols up in the process when it is loaded, so a library opened with RTLD_GLOBAL before replaces it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

REFERENCE = "reference BLAS (slow: install the extra millstream[cpu], or Debian's libopenblas0-pthread)"

YIELDING = 10
"""The nice value of encoders and transcription. Where cores are short, they get a tenth of them, so that heartbeats go
on."""


def avoid_cudnn_attention() -> None:
    """On CUDA, keep attention off cuDNN, which plans for 80 ms at each new length of a prompt (H200): the first token
    of a 130-token prompt came after 85 ms with it and after 22 ms without. The user's own setting has precedence."""
    os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")


def commit_large_graphs() -> None:
    """On CUDA, have MLX end a graph by its operations, not by what these read. It counts numbers, weights included (in
    units of 2**20, whatever the variable's name says): a step of an 8B model became eight graphs. While ten are under
    way MLX waits for one before it takes more, so the host could not go on behind a prefill pass, and rows got their
    tokens when that was nearly done. The user's own setting has precedence. Not on a Mac: Metal's command buffers have
    the same variable."""
    if sys.platform == "linux":
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "4000")


def share_cores() -> None:
    """For several engines: MKL's threads stop spinning a millisecond after a matmul instead of 200 ms after, and leave
    the core to the other engine. On 2 cores two engines at once took 3.3 to 3.8 s with it and 3.6 to 4.7 without; one
    engine alone is a little faster without."""
    os.environ.setdefault("KMP_BLOCKTIME", "1")


def yield_to_others() -> None:
    """For a process of long batches (encoders, transcription) beside others: it gets what they leave of the cores. A
    batch may take longer, while a pause between two tokens of a chat is seen. Applies to this thread and those that it
    starts."""
    os.nice(YIELDING)


@functools.cache
def load_blas(enabled: bool = True) -> str | None:
    """Open the best BLAS there is. Returns its name; None if MLX brings its own (macOS) or is already imported."""
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    if not enabled:
        return "reference BLAS (--no-blas)"
    for name, path in _candidates():
        if _open(path):
            return name
    return REFERENCE


def _open(path: str) -> bool:
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return "cblas_sgemm" in _exported(library)


def _exported(library: ctypes.CDLL) -> tuple[str, ...]:
    try:
        return (library.cblas_sgemm.__name__,)
    except AttributeError:
        return ()


def _candidates() -> list[tuple[str, str]]:
    """(name, path), best first: the PyPI package for this processor, then the system's OpenBLAS."""
    found: list[tuple[str, str]] = []
    if platform.machine() == "x86_64":
        os.environ.setdefault("MKL_THREADING_LAYER", "INTEL")
        found += [("MKL", path) for path in _packaged("mkl", "libmkl_rt.so")]
    else:
        found += [("NVPL BLAS", path) for path in _packaged("nvpl-blas", "libnvpl_blas_lp64_gomp.so")]
    system = ctypes.util.find_library("openblas")
    return [*found, ("OpenBLAS", system)] if system else found


def _packaged(distribution: str, prefix: str) -> list[str]:
    """The installed files of a distribution whose name starts with `prefix`, wherever its wheel has put them."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(Path(str(file.locate())).resolve()) for file in files if file.name.startswith(prefix)]
