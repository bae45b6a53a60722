"""What a saved state is, whatever happens to the rows that go on from it."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from millstream.backend.generation.prefix_store.cache_state import SavedState, restore, save

WINDOW = 8


def tokens(count: int, value: float) -> mx.array:
    return mx.full((1, 2, count, 4), value)


def values(saved: SavedState) -> list[list[float]]:
    return [array.flatten().tolist() for array in saved.arrays if array is not None]


@pytest.mark.parametrize("make", [lambda: RotatingKVCache(WINDOW), lambda: ChunkedKVCache(WINDOW)])
@pytest.mark.parametrize("read", [1, WINDOW - 1, WINDOW, WINDOW + 5])
def test_rows_that_go_on_leave_a_saved_window_alone(make, read: int) -> None:  # type: ignore[no-untyped-def]
    """One token at a time is written into the window itself: not into the one that is kept."""
    first = make()
    first.update_and_fetch(tokens(read, 1.0), tokens(read, 2.0))
    saved = save(first)
    before = values(saved)
    seen = []
    for number in (3.0, 3.0):
        row = make()
        restore(row, saved)
        for _ in range(WINDOW + 1):
            seen.append([part.flatten().tolist() for part in row.update_and_fetch(tokens(1, number), tokens(1, 4.0))])
    assert values(saved) == before
    assert seen[: WINDOW + 1] == seen[WINDOW + 1 :], "the second row saw what the first had written"


def test_rows_that_go_on_leave_a_recurrent_state_alone() -> None:
    first = ArraysCache(2)
    first[0], first[1] = tokens(3, 1.0), None
    saved = save(first)
    before = values(saved)
    row = ArraysCache(2)
    restore(row, saved)
    row[0][..., :1, :] = tokens(1, 5.0)
    row[1] = tokens(1, 6.0)
    assert values(saved) == before
    assert saved.arrays[1] is None
