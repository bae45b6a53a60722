"""A real BLAS for MLX's Linux CPU build, which links the reference one (50 to 80 times slower in matrix products).

MLX looks its BLAS symbols up in the process at load time, so a library opened with RTLD_GLOBAL before the first
`import mlx.core` takes their place. This module therefore imports no MLX.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

REFERENCE = "reference BLAS (slow: install the extra millstream[cpu], or Debian's libopenblas0-pthread)"


def load_blas(enabled: bool = True) -> str | None:
    """Open the best BLAS there is and name it. None where MLX brings its own (macOS) or it is too late."""
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
    """The installed files of a distribution whose name starts with `prefix`, wherever its wheel puts them."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(Path(str(file.locate())).resolve()) for file in files if file.name.startswith(prefix)]
