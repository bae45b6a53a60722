"""Where the time of a load goes, for the log."""

from __future__ import annotations

import time
from collections.abc import Callable

from millstream.backend.kernels.compiled import compile_costs


class LoadPhases:
    """Call `done` at the end of each phase. Kernels compile when they are first used, so a phase also tells how much
    of it that was."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._kernels, self._compiling = compile_costs()
        self._kernels_before = self._kernels
        self.phases: list[tuple[str, float]] = []
        self._lines: list[str] = []

    def done(self, phase: str) -> float:
        """Returns the seconds of the phase that ends."""
        now = self._now()
        seconds = now - self._last
        kernels, compiling = compile_costs()
        line = f"{phase} {seconds:.2f} s"
        if kernels > self._kernels:
            line += f" (compiling {kernels - self._kernels} kernels: {compiling - self._compiling:.2f} s)"
        self.phases.append((phase, seconds))
        self._lines.append(line)
        self._last, self._kernels, self._compiling = now, kernels, compiling
        return seconds

    @property
    def has_compiled(self) -> bool:
        """True if kernels were compiled since the first phase began: not all of them were on disk."""
        return compile_costs()[0] > self._kernels_before

    def __str__(self) -> str:
        return ", ".join(self._lines)
