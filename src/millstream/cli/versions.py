"""Which Millstream and which MLX are installed, by their metadata: MLX itself takes a second to import."""

from __future__ import annotations

import importlib.metadata
import sys

from millstream import __version__

MLX_BUILDS = {"mlx-metal": "Metal", "mlx-cuda-13": "CUDA 13", "mlx-cuda-12": "CUDA 12", "mlx-cpu": "CPU"}
"""The distributions that hold MLX's library, and what each is built for."""


def installed(distribution: str) -> str | None:
    """Its version; None if it is not installed, or its metadata is damaged."""
    try:
        found: str | None = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found


def mlx_builds() -> dict[str, str]:
    """The installed builds of MLX's library by distribution, with their versions. One is right; two collide."""
    found = {name: installed(name) for name in MLX_BUILDS}
    return {name: version for name, version in found.items() if version is not None}


def version_line() -> str:
    mlx = installed("mlx")
    builds = " and ".join(MLX_BUILDS[name] for name in mlx_builds())
    told = "no MLX: run 'millstream doctor'" if mlx is None else f"MLX {mlx}{f' for {builds}' if builds else ''}"
    return f"millstream {__version__} ({told}, Python {sys.version.split()[0]})"
