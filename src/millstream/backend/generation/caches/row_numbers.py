"""Where rows stand in a batch: the numbers by which a forward pass computes them."""

from __future__ import annotations

from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.caches.widths import SlotPolicy, powers_of_two


class RowNumbers:
    """Which numbers are taken. `policy`: numbers per batch for some rows. `width`: rows per forward pass for some
    numbers, if that is more."""

    def __init__(self, policy: SlotPolicy, width: SlotPolicy | None = None) -> None:
        self._policy = policy
        self._width = width
        self._taken: list[bool] = []

    @property
    def count(self) -> int:
        """How many numbers there are, taken or vacant."""
        return len(self._taken)

    @property
    def size(self) -> int:
        """How many rows a forward pass has."""
        return self.count if self._width is None else self._width(self.count)

    @property
    def taken(self) -> set[int]:
        return {number for number, taken in enumerate(self._taken) if taken}

    def shape(self, length: int) -> PassShape:
        """The shape of a pass. One of several tokens per row leaves out the last vacant numbers, and its width is that
        of all tokens together: few rows of several tokens are still few. Numbers that fit that width are not left out:
        every other shape would be traced again."""
        if length == 1:
            return PassShape(self.size, self.size)
        taken = max(self.taken, default=-1) + 1
        width = taken * length if self._width is None else self._width(taken * length)
        return PassShape(min(self.size, width // length), width, length)

    def take(self, rows: int) -> list[int]:
        """Numbers for rows that join."""
        used = sum(self._taken)
        if used + rows > self.count:
            self._taken += [False] * (self._policy(used + rows) - self.count)
        numbers = [number for number, taken in enumerate(self._taken) if not taken][:rows]
        for number in numbers:
            self._taken[number] = True
        return numbers

    def keep(self, numbers: list[int]) -> list[int]:
        """Free all others, and have no vacant numbers between those that are kept: a pass of several tokens per row
        is as wide as its numbers. Returns the new order of a pass: the previous number of each row, -1 for a fresh
        one."""
        wanted = self._policy(len(numbers)) if numbers else 0
        if self._policy is powers_of_two and wanted * 4 > self.count:
            wanted = self.count
            if numbers == list(range(len(numbers))):
                self._taken = [number < len(numbers) for number in range(wanted)]
                return list(range(self.size))
        self._taken = [True] * len(numbers) + [False] * (wanted - len(numbers))
        return [*numbers, *[-1] * (self.size - len(numbers))]
