"""What every MLX backend does when it is made and when it is closed, on its owner thread."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx

from millstream.backend.device import available_bytes, current_device, limit_reuse
from millstream.backend.kernels.compiled import keep_kernels
from millstream.engine.ownership import OwnerGuard, at_thread_end
from millstream.errors import DeviceLost, MillstreamError, ModelError
from millstream.models.demo import user_cache_dir

Load = TypeVar("Load", bound=Callable[..., Any])

OUT_OF_MEMORY = re.compile(r"out of memory|unable to allocate|attempting to allocate|bad_alloc|MemoryError", re.I)
"""In what MLX says on CUDA, on the CPU and on Metal."""


class MlxBackend:
    """Base class of the backends: the owner's guard, its stream and its device."""

    def __init__(self, *, cache_limit: int | None = None, blas: str | None = None) -> None:
        """`cache_limit`: bytes of freed memory that MLX may hold for reuse. `blas`: the name of the one that was
        loaded."""
        self._guard = OwnerGuard()
        # The thread's own stream, not a new one: each CPU stream costs an OS thread for good, and owner threads are
        # reused. It is a plain stream: on a foreign thread it raises instead of silently making a second one.
        self._stream = mx.default_stream(mx.default_device())
        at_thread_end(mx.clear_streams)  # a thread that ends with streams can abort the process when that exits
        self._device = current_device()
        limit_reuse(self._device, cache_limit)
        if self._device.kind == "cuda":
            keep_kernels(user_cache_dir() / "kernels")  # unless `use_device` has chosen another folder
        self._blas = blas

    def close(self) -> None:
        """Owner only, and its last call: arrays must be freed on the thread whose stream they were made on."""
        self._guard.check("close")
        self._drop_arrays()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        try:
            mx.synchronize(self._stream)
        finally:
            mx.clear_cache()  # not the streams: the next engine on this thread needs them

    def device_works(self) -> bool:
        """Owner only. False if a kernel has failed: CUDA then refuses whatever this process asks for."""
        try:
            mx.eval(mx.zeros((1,)) + 1)
        except RuntimeError:
            return False
        return True

    def _drop_arrays(self) -> None:
        """Drop every reference to an array."""
        raise NotImplementedError

    def _describe_device(self) -> str:
        blas = f", {self._blas}" if self._blas and self._device.is_cpu else ""
        return f"{self._device.kind} ({self._device.name}){blas}"


def explains_failed_loads(load: Load) -> Load:
    """A backend's `load` that raises `DeviceLost` if it fails and has left the device useless, and says so if memory
    was short."""

    @functools.wraps(load)
    def run(self: MlxBackend, *arguments: Any, **options: Any) -> Any:
        try:
            return load(self, *arguments, **options)
        except MillstreamError:
            raise
        except Exception as error:
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            if not self.device_works():
                raise DeviceLost(
                    f"the device failed while the model was loaded, most likely in one of our kernels ({cause}); "
                    "--disable fused-matmul or --disable kernel leaves them out"
                ) from error
            if not OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
                raise
            free, total = (size / 2**30 for size in (available_bytes(self._device), self._device.memory_bytes))
            raise ModelError(
                f"the memory of this device is too small, or other programs use it: {free:.1f} GiB of {total:.1f} GiB "
                f"were left when the load failed ({cause}). End what else runs there, or take a smaller model, or one "
                "of fewer bits."
            ) from error

    return run  # type: ignore[return-value]
