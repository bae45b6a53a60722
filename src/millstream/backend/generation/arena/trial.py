"""What a model was found to do right in arenas: two rows of different lengths against each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.arena.rows import Rows
from millstream.backend.generation.caches.batch_caches import new_row_caches

LOST = 0.5
"""How far states may be off at most, relative to their size: what is off so much by rounding alone tells nothing."""

LENGTHS, LONGEST = (12, 7), 12


def takes_padding(model: Any, vocab_size: int) -> bool:
    """Whether states end where their row does, in a pass that goes on. Equal answers would not tell: a model whose
    states matter little would lose them unseen."""
    prompts = [[vocab_size // (2 + index + row) for index in range(LONGEST)] for row in range(2)]
    rounding = _distance(model, prompts)
    return _distance(model, [prompt[:n] for prompt, n in zip(prompts, LENGTHS, strict=True)]) <= min(
        LOST, 1e-3 + 3 * rounding
    )


def _distance(model: Any, prompts: Sequence[Sequence[int]]) -> float:
    """Of two rows' states from those of each alone, and of the logits that follow."""
    together = _read(model, prompts)
    worst = 0.0
    for row, prompt in enumerate(prompts):
        for both, alone in zip(together, _read(model, [prompt]), strict=True):
            mine, own = both[row : row + 1].astype(mx.float32), alone.astype(mx.float32)
            far = mx.abs(mine - own).max() / (mx.abs(own).max() + 1e-9)
            worst = max(worst, float(far.item()))  # type: ignore[arg-type]
    return worst


def _read(model: Any, prompts: Sequence[Sequence[int]]) -> list[mx.array]:
    """The states after some prompts, and the logits of a token after them."""
    rows = Rows(new_row_caches(model))
    rows.join(None, range(len(prompts)))
    longest = max(map(len, prompts))
    table = mx.array([[*prompt, *[1] * (longest - len(prompt))] for prompt in prompts], dtype=mx.int32)
    rows.run(model, table, list(map(len, prompts)))
    states = [array for each in rows.states for array in each.arrays]
    logits = rows.run(model, mx.full((len(prompts), 1), 3, dtype=mx.int32), [1] * len(prompts))[:, -1]
    mx.eval(states, logits)
    return [*states, logits]
