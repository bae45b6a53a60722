"""What is sent to the device between two steps, in one evaluation.

Every evaluation is a CUDA graph of its own: 0.1 to 0.3 ms of the host (H200). And none of this may become part of the
step that follows: MLX makes graphs of so many operations each, in their order. A few more at the beginning of a step
would make every graph of it a new one, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Integers = Sequence[int] | NDArray[np.int32]

ALIGNED = 4
"""Integers. A list begins at a multiple of 16 bytes, and is no shorter: MLX keeps arrays of up to 8 bytes, and those
made by the host, in the host's memory. Over the bus a read takes longer than all the rest of a short row's attention.
"""


class Due:
    """Owner only. MLX may run at once what does not read each other's results: of all that is added until it is sent,
    nothing may write where another part of it reads or writes."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []
        self._with_step: list[mx.array] = []
        self._held: list[object] = []
        self.rounds = 0
        """How often something was sent."""

    def add(self, *arrays: mx.array) -> None:
        self._arrays += arrays

    def with_step(self, *arrays: mx.array) -> None:
        """What a step computes besides its tokens, and the next one may not read: it is evaluated with the tokens."""
        self._with_step = list(arrays)

    def take_with_step(self) -> list[mx.array]:
        found, self._with_step = self._with_step, []
        return found

    def hold(self, *things: object) -> None:
        """Keep what kernels read behind MLX's back until they are launched: their memory is not given to others."""
        self._held += things

    def integers(self, *lists: Integers) -> list[mx.array]:
        """Lists of 32-bit integers as arrays in the device's memory, once they are sent: all of them travel together.
        Each has zeros behind it up to a multiple of `ALIGNED`."""
        lengths = [max(ALIGNED, -(-len(each) // ALIGNED) * ALIGNED) for each in lists]
        numbers = np.zeros(sum(lengths), dtype=np.int32)
        ends = np.cumsum(lengths).tolist()
        places = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        for each, (first, _) in zip(lists, places, strict=True):
            numbers[first : first + len(each)] = each
        made = mx.array(numbers)
        far = made + 0
        self.hold(made)  # until then, so that the other does not get its memory
        found = [far] if len(lists) == 1 else [far[first:beyond] for first, beyond in places]
        self._arrays += found
        return found

    def send(self) -> None:
        """Before the next step; does nothing if nothing was added."""
        if self._arrays:
            mx.async_eval(self._arrays)  # type: ignore[no-untyped-call]
            self._arrays = []
        if self._held:
            self._held = []
        self.rounds += 1
