"""Masks of sliding windows, as a prompt's own caches make them: attention must know what a mask is before a kernel may
take its place. An array that nobody reads is never computed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from millstream.backend.generation.prefix_store.cache_state import leaf_caches


class WindowMasks:
    """The masks of a forward pass by their window: the first layer with a window makes it for all of them."""

    def __init__(self) -> None:
        self.made: dict[int, mx.array] = {}


def remember_windows(caches: Sequence[Any]) -> None:
    """Have the window caches of one prompt, or of some that share a pass, remember the masks that they make."""
    masks = WindowMasks()
    for leaf in leaf_caches(caches):
        if type(leaf) is RotatingKVCache and not leaf.keep:
            leaf.window_masks = masks
            # Not the cache itself: a circle would keep its arrays until Python's collector runs.
            leaf.make_mask = functools.partial(_make_mask, weakref.ref(leaf), masks)


def window_of(cache: Any, mask: Any) -> int | None:
    """How many tokens each query of a chunk sees, its own included, if the mask says just that; the keys are those that
    the cache returned, oldest first."""
    if type(cache) is not RotatingKVCache or cache.keep:
        return None
    if isinstance(mask, str):
        return int(cache.max_size) if mask == "causal" else None
    masks = getattr(cache, "window_masks", None)
    made = masks.made if masks is not None else {}
    return next((window for window, each in made.items() if each is mask), None)


def _make_mask(
    cache: weakref.ref[RotatingKVCache],
    masks: WindowMasks,
    N: int,
    window_size: int | None = None,
    return_array: bool = False,
) -> Any:
    leaf = cache()
    assert leaf is not None, "its method is called"
    mask = RotatingKVCache.make_mask(leaf, N, window_size=window_size, return_array=return_array)
    if N > 1 and isinstance(mask, mx.array):
        masks.made = {**masks.made, window_size or leaf.max_size: mask}
    return mask
