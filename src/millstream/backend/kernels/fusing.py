"""Has MLX fuse functions on the CPU only where it can compile their kernels.

On a full disk, or where the compiler does not work, each step that needs a new kernel would fail. There functions run
unfused: slower, and none of them needs a file.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from millstream.backend.kernels.cpu_kernels import try_to_write
from millstream.errors import StepFailed
from millstream.models.disk_space import has_room

Method = TypeVar("Method", bound=Callable[..., Any])

LOOK_SECONDS = 0.25
"""Between two looks at the disk while steps run."""
TRY_SECONDS = 10.0
"""Between two attempts to write to one that was full."""
FAILED = ("[Compile::eval_cpu]", "Could not load C++ shared library")
"""How MLX begins to say that a kernel could not be compiled or loaded."""

log = logging.getLogger(__name__)


class Fusing:
    """Whether MLX fuses functions on the CPU: one for the process, as MLX's own switch is."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        """Where kernels are compiled. None where that does not depend on a folder, or is given up."""
        self._on = True
        self._look_at = 0.0

    def use(self, folder: Path | None) -> None:
        """Before a load: kernels are compiled in this folder, if it can be written. If not, nothing is fused before the
        next load: all kernels at once, when there is room, would hold up a step for as long as a load."""
        if folder is None or "MLX_DISABLE_COMPILE" in os.environ:
            return
        obstacle = _obstacle(folder)
        self._folder = folder if obstacle is None else None
        if obstacle is not None:
            self._turn_off(obstacle)
        elif not self._on:
            self._turn_on()

    def look(self) -> None:
        """Call it before each step: the disk may be full by now, or no longer."""
        if self._folder is None or (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + (LOOK_SECONDS if self._on else TRY_SECONDS)
        if self._on and not has_room(self._folder):
            self._turn_off("the disk is full or cannot be written")
        elif not self._on and has_room(self._folder) and _obstacle(self._folder) is None:
            self._turn_on()

    def failed(self, error: RuntimeError) -> bool:
        """True if the error is that a kernel could not be compiled. From now on none is needed, until there is room; if
        there was, the compiler does not work."""
        if self._folder is None or not str(error).startswith(FAILED):
            return False
        self._turn_off(str(error))
        if has_room(self._folder):
            self._folder = None
        return True

    def _turn_on(self) -> None:
        self._on = True
        mx.enable_compile()
        log.info("Functions are fused again")

    def _turn_off(self, reason: str) -> None:
        self._on = False
        mx.disable_compile()
        log.warning("Functions are not fused, which costs speed: no kernel of the CPU can be compiled: %s", reason)


fusing = Fusing()


def loads_unfused(load: Method) -> Method:
    """A backend's `load`, which is done again if a kernel cannot be compiled: the second time needs none."""

    @functools.wraps(load)
    def run(*arguments: Any, **options: Any) -> Any:
        fusing.look()
        try:
            return load(*arguments, **options)
        except RuntimeError as error:
            if not fusing.failed(error):
                raise
        return load(*arguments, **options)

    return run  # type: ignore[return-value]


def steps_unfused(step: Method) -> Method:
    """A backend's `step`. One that needs a kernel which cannot be compiled, though there was room, fails once."""

    @functools.wraps(step)
    def run(*arguments: Any) -> Any:
        fusing.look()
        try:
            return step(*arguments)
        except RuntimeError as error:
            if not fusing.failed(error):
                raise
            raise StepFailed(
                "a kernel could not be compiled. Send the request again: no kernel is needed now."
            ) from error

    return run  # type: ignore[return-value]


def _obstacle(folder: Path) -> str | None:
    try:
        try_to_write(folder)
    except OSError as error:
        return str(error)
    return None
