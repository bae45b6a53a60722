"""When a layout counts as right: two rows can run in it, and answer as each of them does alone."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from millstream.backend.generation.layout import Layout

AGREED = 0.1
"""How far the logits of rows together may be from those of each alone, relative to their size. Rounding is far below,
and a mask that the model does not understand far above."""

EXACT = 1e-4
"""The same in single precision, beyond what rows differ without padding."""

UNRELATED = 0.5
"""So far apart, logits may have nothing to do with each other: what differs so much by rounding alone tells nothing."""

ERRORS = (ValueError, TypeError, RuntimeError, AttributeError)
"""What models raise if they cannot run in a layout."""


class Trial(Protocol):
    """Runs two rows of unequal length in a layout."""

    def two_rows(self, layout: Layout) -> None:
        """Raises what the model raises if it cannot run them."""
        ...

    def disagreement(self, layout: Layout, *, together: bool = False) -> float:
        """How far the logits of two rows together are from those of each alone, relative to their size. `together`: the
        logits and states of rows whose prompts share a pass, if they may."""
        ...

    def verification(self, layout: Layout, *, one_by_one: bool = False) -> float:
        """How far the logits of passes of several tokens per row are from those of each row alone, or of the same
        tokens one by one."""
        ...

    def continuation(self, layout: Layout) -> float:
        """How far the logits of two rows that continue a cached prefix in one pass are from those of each alone."""
        ...

    def in_arenas(self) -> Literal["padded", "unpadded", "wrong"]:
        """Whether rows of unequal lengths run together in arenas as alone, and whether a padded pass may read them."""
        ...


def trouble_of(trial: Trial, layout: Layout) -> str | None:
    """Why two rows cannot run in this layout: some models cannot take a batch although their caches can."""
    try:
        trial.two_rows(layout)
    except ERRORS as error:
        return str(error) or type(error).__name__
    return None


def disagreement(trial: Trial, layout: Layout, other: Layout) -> str | None:
    """Why a layout cannot be used: two rows cannot run in it, or they answer otherwise than alone. If they do that in
    the other layout too, the layout is not the reason: PLaMo 3 answers by the chunks in which its prompt was read."""
    if (trouble := trouble_of(trial, layout)) is not None:
        return trouble
    if trial.disagreement(layout) <= AGREED:
        return None
    everywhere = trouble_of(trial, other) is None and trial.disagreement(other) > AGREED
    return None if everywhere else "its rows answer differently together than alone"


def rounding_limit(model: Any, trial: Trial, layout: Layout) -> float:
    """How far answers may be off in another layout, by how far they are in this one: deep models with large residuals
    round so much in half precision that rows differ from themselves (Gemma 3: two of three tokens). In logits it
    would hide a state that carries on very little (Nemotron-H: 0.3 %), so states are compared too."""
    alike = trial.disagreement(layout, together=True)
    return EXACT + 3 * alike if _is_single_precision(model) else min(UNRELATED, max(AGREED, 2 * alike))


def _is_single_precision(model: Any) -> bool:
    weights = [array for _, array in tree_flatten(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)]
    return all(array.dtype == mx.float32 for array in weights)
