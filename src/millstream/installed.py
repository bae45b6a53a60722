"""Tells whether MLX is installed, and which command adds what is missing. Imports no MLX.

MLX has one package per device. On Linux they all bring the same file, `mlx/lib/libmlx.so`, so only one of them can be
installed, and Millstream cannot depend on one of them without ruling the others out. The user chooses by an extra.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shlex
import shutil
import sys
from pathlib import Path

from millstream.errors import MillstreamError, ModelError

CUDA_13 = 13000
"""How the driver reports that it runs programs of CUDA 13."""


class MlxMissing(MillstreamError):
    """MLX is not installed, or its part for this device is not."""

    code = "mlx_missing"


def require_mlx() -> None:
    """Raises `MlxMissing`, with the command for this machine, if MLX cannot be imported here."""
    if not has_mlx():
        command = install_command(f"millstream[{extra}]" if (extra := mlx_extra()) else "mlx")
        device = {"cpu": "for CPUs", "": "for Macs"}.get(extra, "for NVIDIA GPUs")
        raise MlxMissing(f"Millstream needs MLX {device}, which is not installed. Run: {command}")


def has_mlx() -> bool:
    """True if MLX and its library are installed. The package `mlx` alone is a shell without the library on Linux."""
    spec = importlib.util.find_spec("mlx")
    folders = spec.submodule_search_locations if spec else None
    return any(list(Path(folder, "lib").glob("*mlx.*")) for folder in folders or ())


def mlx_extra() -> str:
    """The extra of Millstream that has MLX for this machine; empty on macOS, where it needs none."""
    if sys.platform != "linux":
        return ""
    cuda = _cuda_of_driver()
    if not cuda:
        return "cpu"
    return "cuda" if cuda >= CUDA_13 else "cuda12"


def install_command(*requirements: str, alone: bool = False) -> str:
    """What to type to install these beside Millstream. `alone`: without what they depend on."""
    flags = ["--no-deps"] if alone else []
    if _is_uv_tool() and not alone:
        return shlex.join(["uv", "tool", "install", "--force", *requirements])
    if _is_uvx() and not alone:
        return shlex.join(["uvx", "--from", *requirements, "millstream"])
    if importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *flags, *requirements])
    return shlex.join([*_pip(), "install", *flags, *requirements])


def vision_command() -> str:
    """What adds images. mlx-vlm declares packages for video, speech and training that serving images does not need, so
    it is installed without them, and no extra can say that."""
    return install_command("mlx-vlm", "pillow", alone=True)


def audio_command() -> str:
    """What adds the families of speech models that run on mlx-audio. It declares an exact version of MLX, and packages
    for microphones and training, so it is installed without them, and no extra can say that."""
    return install_command("mlx-audio", alone=True)


def require_mlx_audio(what: str) -> None:
    """Raises `ModelError` that says what needs mlx-audio, with the command for this machine, if it is not there."""
    if importlib.util.find_spec("mlx_audio") is None:
        raise ModelError(f"{what} need mlx-audio, which is not installed. Run: {audio_command()}")


def missing_package(what: str, error: ModuleNotFoundError) -> ModelError:
    """The error for a package that a library imports and that is not there."""
    name = (error.name or "").split(".")[0]
    command = audio_command() if name == "mlx_audio" else install_command(name)
    return ModelError(f"{what} need the package {name!r}, which is not installed. Run: {command}")


def _pip() -> list[str]:
    """`pip` alone if that is this environment's."""
    found = shutil.which("pip")
    return ["pip"] if found and Path(found).parent == Path(sys.executable).parent else [sys.executable, "-m", "pip"]


def _is_uv_tool() -> bool:
    return Path(sys.prefix, "uv-receipt.toml").exists()


def _is_uvx() -> bool:
    """An environment that uvx made for one run, in uv's cache."""
    return Path(sys.prefix).parent.name.startswith("archive-v")


def _cuda_of_driver() -> int:
    """The newest CUDA that the installed NVIDIA driver runs, such as 13000; 0 without a driver."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return 0
    version = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
