"""The environment of an engine process: what Python, MLX and the device's libraries read, and no secrets.

API keys, hub tokens and the server's own settings stay in the server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

NAMES = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TEMP", "TMP", "LANG", "LANGUAGE", "TZ", "TERM",
        "VIRTUAL_ENV", "CONDA_PREFIX", "SDKROOT", "DEVELOPER_DIR", "CC", "CXX", "CPATH", "NO_COLOR",
    }
)  # fmt: skip
"""MLX compiles kernels at run time: it needs the compilers and their paths."""

PREFIXES = (
    "LC_", "XDG_", "LD_", "DYLD_", "PYTHON", "MLX_", "METAL_", "MTL_", "CUDA", "NVIDIA_", "NCCL_", "NVRTC_", "CUDNN_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NVPL_", "BLIS_", "VECLIB_", "TOKENIZERS_", "MALLOC_", "GLIBC_",
)  # fmt: skip


def engine_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of `environment` (default: this process's) that an engine gets."""
    everything = os.environ if environment is None else environment
    return {name: value for name, value in everything.items() if name in NAMES or name.startswith(PREFIXES)}
