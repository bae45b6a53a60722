"""What a model was found to do right in arenas: rows of different lengths against each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx

from millstream.backend.generation.arena.rows import Rows
from millstream.backend.generation.caches.batch_caches import new_row_caches

LOST = 0.5
"""How far states and answers may be off at most, relative to their size: what is off so much by rounding alone tells
nothing."""

LENGTHS, LONGEST = (40, 23, 31), 40
"""Of three rows: few models have three heads, so a mask that is taken for one of another shape fails."""


def tried(model: Any, vocab_size: int) -> Literal["padded", "unpadded", "wrong"]:
    """Whether rows of different lengths run together as alone; and whether their states end where they do, in a pass
    that goes on. Equal answers would not tell: a model whose states matter little would lose them unseen."""
    prompts = [[vocab_size // (2 + index + row) for index in range(LONGEST)] for row in range(len(LENGTHS))]
    most = min(LOST, 1e-3 + 3 * _distance(model, prompts, together=True))
    cut = [prompt[:length] for prompt, length in zip(prompts, LENGTHS, strict=True)]
    if _distance(model, cut, together=True) <= most:
        return "padded"
    return "unpadded" if _distance(model, cut, together=False) <= most else "wrong"


def _distance(model: Any, prompts: Sequence[Sequence[int]], *, together: bool) -> float:
    """Of rows' states, and of the logits that follow, from those of each alone."""
    both = _read(model, prompts, together=together)
    worst = 0.0
    for row, prompt in enumerate(prompts):
        for ours, alone in zip(both, _read(model, [prompt], together=True), strict=True):
            mine, own = ours[row : row + 1].astype(mx.float32), alone.astype(mx.float32)
            far = mx.abs(mine - own).max() / (mx.abs(own).max() + 1e-9)
            worst = max(worst, float(far.item()))  # type: ignore[arg-type]
    return worst


def _read(model: Any, prompts: Sequence[Sequence[int]], *, together: bool) -> list[mx.array]:
    """The states after some prompts, and the logits of a token after them. `together`: in one padded pass; else one by
    one, before they join."""
    rows = Rows(new_row_caches(model))
    for some in [prompts] if together else [[prompt] for prompt in prompts]:
        group = rows.empty()
        group.join(None, range(len(some)))
        longest = max(map(len, some))
        table = [[*prompt, *[1] * (longest - len(prompt))] for prompt in some]
        group.run(model, mx.array(table, dtype=mx.int32), list(map(len, some)))
        rows.join(group, range(len(some)))
    states = [array for each in rows.states for array in each.arrays]
    logits = rows.run(model, mx.full((len(prompts), 1), 3, dtype=mx.int32), [1] * len(prompts))[:, -1]
    mx.eval(states, logits)
    return [*states, logits]
