"""A saved state never changes, whatever the rows that continue from it do."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from millstream.backend.generation.prefix_store.cache_state import SavedState, restore_state, save_state

WINDOW = 8


def tokens(count: int, value: float) -> mx.array:
    return mx.full((1, 2, count, 4), value)


def values(saved: SavedState) -> list[list[float]]:
    return [array.flatten().tolist() for array in saved.arrays if array is not None]


@pytest.mark.parametrize("make", [lambda: RotatingKVCache(WINDOW), lambda: ChunkedKVCache(WINDOW)])
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 5])
def test_rows_do_not_change_the_window_they_continue_from(make, length: int) -> None:  # type: ignore[no-untyped-def]
    """A decode step writes into the window in place: it must not be the saved one."""
    first = make()
    first.update_and_fetch(tokens(length, 1.0), tokens(length, 2.0))
    saved = save_state(first)
    before = values(saved)
    fetched = []
    for value in (3.0, 3.0):
        row = make()
        restore_state(row, saved)
        for _ in range(WINDOW + 1):
            fetched.append([part.flatten().tolist() for part in row.update_and_fetch(tokens(1, value), tokens(1, 4.0))])
    assert values(saved) == before
    assert fetched[: WINDOW + 1] == fetched[WINDOW + 1 :], "the second row reads what the first one wrote"


def test_rows_do_not_change_the_recurrent_state_they_continue_from() -> None:
    first = ArraysCache(2)
    first[0], first[1] = tokens(3, 1.0), None
    saved = save_state(first)
    before = values(saved)
    row = ArraysCache(2)
    restore_state(row, saved)
    row[0][..., :1, :] = tokens(1, 5.0)
    row[1] = tokens(1, 6.0)
    assert values(saved) == before
    assert saved.arrays[1] is None
