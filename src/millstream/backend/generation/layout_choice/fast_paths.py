"""Which fast paths a model may use on its device, and why it does not use the others."""

from __future__ import annotations

from millstream.backend.device import Device
from millstream.backend.generation.settings import GenerationSettings
from millstream.config import FAST_PATHS


class FastPaths:
    """Owner only. All are allowed until they are declined."""

    def __init__(self, settings: GenerationSettings, device: Device) -> None:
        self._like_gpu = settings.like_gpu
        self._device = device
        self._declined: dict[str, str] = {name: "--disable" for name in FAST_PATHS if name in settings.disabled}

    def decline_by_device(self) -> None:
        """Those that need CUDA, elsewhere. To be called when the layers have their form."""
        if self._device.kind != "cuda":
            self.decline("kernel", "no CUDA")
        needs = "needs kernel" if self._device.kind == "cuda" else "no CUDA"
        if not self.wide:
            self.decline("fused-matmul", needs)
        if not self.steps_compile:
            self.decline("compiled-step", needs)

    @property
    def on_cuda(self) -> bool:
        """True if our CUDA kernels run."""
        return self._device.kind == "cuda" and self.enabled("kernel")

    @property
    def wide(self) -> bool:
        """True if our kernels run, or their MLX reference where tests want it: the CPU can test what a GPU does."""
        return self.on_cuda or self._like_gpu

    @property
    def as_on_gpu(self) -> bool:
        return self._like_gpu or not self._device.is_cpu

    @property
    def kernels_write(self) -> bool:
        """True if the attention kernel writes a step's tokens and `write_rows` writes rows that join."""
        return self.on_cuda

    @property
    def steps_compile(self) -> bool:
        """True if a compiled step can be used again: what MLX's own attention reads of slabs has another shape for
        every token."""
        return self.on_cuda

    @property
    def reasons(self) -> tuple[tuple[str, str | None], ...]:
        """See `Layout.reasons`."""
        return tuple((name, self._declined.get(name)) for name in FAST_PATHS)

    def enabled(self, fast_path: str) -> bool:
        return fast_path not in self._declined

    def decline(self, fast_path: str, reason: str) -> None:
        """Leave a fast path out. The first reason counts."""
        self._declined.setdefault(fast_path, reason)
