"""Memory of the host that kernels write to: how tokens reach Python without MLX moving an array.

When the host reads an array of MLX's CUDA build, MLX moves it to managed memory, with an allocation and a copy that
wait for the device (H200: 0.4 ms); and where such memory is used again, its pages go back and forth between host and
device in every step. A kernel that writes some numbers to pinned memory besides spares both. It can be read once the
kernel has ended.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from typing import Any

import mlx.core as mx

log = logging.getLogger(__name__)

PLACES, NUMBERS = 8, 1024
"""Places of an outbox, and the numbers that each has room for."""
PORTABLE_AND_MAPPED = 3
"""CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP."""


class Letter:
    """A place that belongs to one launch, until nobody holds it."""

    def __init__(self, outbox: Outbox, place: int) -> None:
        self._outbox, self._place = outbox, place

    @property
    def address(self) -> mx.array:
        """For the kernel: an array in the memory of the device whose first number is where to write."""
        return self._outbox.addresses[self._place]

    def read(self, count: int) -> list[int]:
        """What the kernel has written. It must have ended."""
        start = self._outbox.start + self._place * NUMBERS * 4
        return list((ctypes.c_int32 * count).from_address(start))

    def __del__(self) -> None:
        self._outbox.free.append(self._place)


class Outbox:
    """Owner only. Pinned memory for the numbers of a few launches."""

    def __init__(self, start: int) -> None:
        """`start`: the address of the memory, which stays for as long as the process lives."""
        self.start = start
        # Each of several numbers: MLX keeps smaller arrays in the host's memory.
        self.addresses = [mx.array([start + place * NUMBERS * 4] * 4, dtype=mx.int64) + 0 for place in range(PLACES)]
        mx.eval(self.addresses)
        self.free = list(range(PLACES))

    def take(self, count: int) -> Letter | None:
        """A place for `count` numbers; None if there is none."""
        return Letter(self, self.free.pop(0)) if self.free and count <= NUMBERS else None


_of_thread = threading.local()


def outbox() -> Outbox | None:
    """That of this thread; None where there is no pinned memory. A GPU must have been used before."""
    if not hasattr(_of_thread, "outbox"):
        start = _pinned(PLACES * NUMBERS * 4)
        _of_thread.outbox = None if start is None else Outbox(start)
    found: Outbox | None = _of_thread.outbox
    return found


def close_outbox() -> None:
    """This thread has none from now on."""
    _of_thread.outbox = None


def _pinned(size: int) -> int | None:
    driver = _driver()
    address = ctypes.c_void_p()
    if driver is None:
        return None
    result = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(PORTABLE_AND_MAPPED))
    if result != 0 or not address.value:
        log.info("Tokens are read through MLX: there is no pinned memory (CUDA error %d)", result)
        return None
    return address.value


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        log.info("Tokens are read through MLX: %s", error)
        return None
