"""Runs two rows of unequal length in a layout at load, to find out whether a model can and whether it answers right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from millstream.backend.generation.arena.trial import tried
from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.batch import Batch
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import leaf_caches
from millstream.backend.kernels.compiled import rehearse
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from millstream.engine.prefix_cache.orders import SavePrefix

BLOCK = 16
"""Tokens in each block of a cached prefix."""


class TwoRowTrial:
    """Owner only. Prompts are of tokens from all over the vocabulary: its first ones may mean nothing."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def two_rows(self, layout: Layout) -> None:
        """Two steps, each evaluated by itself. Raises what the model raises, and `ModelError` if writes were lost."""
        self._rehearse(lambda: self._two_rows(layout))
        self._two_rows(layout)

    def disagreement(self, layout: Layout, *, together: bool = False) -> float:
        """How far the logits of two rows together are from those of each alone, relative to their spread.
        `together`: of prompts so alike in length that they share a pass; then their states count too."""
        self._rehearse(lambda: self._disagreement(layout, together))
        return self._disagreement(layout, together)

    def verification(self, layout: Layout, *, one_by_one: bool = False) -> float:
        """How far the logits of passes of three tokens per row, of which rows keep other counts, are from those of each
        row alone, or of the same tokens one by one."""
        self._rehearse(lambda: self._verification(layout, one_by_one))
        return self._verification(layout, one_by_one)

    def continuation(self, layout: Layout) -> float:
        """How far the logits of two rows that continue a cached prefix in one pass are from those of each alone."""
        self._rehearse(lambda: self._continuation(layout))
        return self._continuation(layout)

    def in_arenas(self) -> Literal["padded", "unpadded", "wrong"]:
        """Whether rows of unequal lengths run together in arenas as alone, and whether a padded pass may read them."""
        return tried(self._assembly.model, self._assembly.vocab_size)

    def _rehearse(self, work: Callable[[], object]) -> None:
        rehearse(work)
        self._assembly.forget_templates()

    def _two_rows(self, layout: Layout) -> None:
        tokens = [self._assembly.vocab_size // part for part in (2, 3, 5, 7)]
        batch, _ = self._joined(layout, [(tokens[0],), tuple(tokens[1:])])
        if layout.compiled_step and not batch.can_be_compiled:
            raise ValueError("its KV caches cannot be traced")
        first = batch.launch(batch.forward())
        second = batch.launch(batch.forward())
        first.read(batch.ids)
        second.read(batch.ids)
        self._assembly.check_writes(layout)

    def _disagreement(self, layout: Layout, together: bool) -> float:
        model = self._assembly.model
        lengths = (25, 33) if together else (1, 9)
        prompts = [tuple(self._assembly.vocab_size // (2 + index) for index in range(length)) for length in lengths]
        batch, joined = self._joined(layout, prompts)
        return _distance_from_alone(model, batch, joined, states=together)

    def _verification(self, layout: Layout, one_by_one: bool) -> float:
        """Of two rows the first keeps one token of three, then all of three; the second all, then two."""
        vocab, model = self._assembly.vocab_size, self._assembly.model
        prompts = [tuple(vocab // (2 + index) for index in range(length)) for length in (3, 9)]
        texts = [[vocab // (3 + index + 2 * row) for index in range(6)] for row in range(2)]
        batch, joined = self._joined(layout, prompts)
        tokens = mx.array([texts[min(row, 1)] for row in range(batch.size)], dtype=mx.int32)
        if one_by_one:
            expected = [batch.given_tokens(tokens[:, at : at + 1], [1] * batch.size)[:2, 0] for at in range(6)]
            batch, _ = self._joined(layout, prompts)
        else:
            rows = zip(joined, texts, strict=True)
            alone = [
                model(mx.array([[*prompt[:-1], *text]]), cache=new_row_caches(model))[0, -6:] for prompt, text in rows
            ]
            expected = list(mx.stack(alone, axis=1))
        at, worst = [0, 0], 0.0
        for kept in ([1, 3], [3, 2]):
            counts = [kept[min(row, 1)] for row in range(batch.size)]
            inputs = [tokens[row, at[min(row, 1)] : at[min(row, 1)] + 3] for row in range(batch.size)]
            garbage = mx.arange(3) >= mx.array(counts)[:, None]
            logits = batch.given_tokens(mx.where(garbage, 1, mx.stack(inputs)), counts)
            for row in range(2):
                for token in range(kept[row]):
                    distance = _distance(expected[at[row] + token][row], logits[row, token])
                    worst = max(worst, distance if math.isfinite(distance) else math.inf)
                at[row] += kept[row]
        return worst

    def _continuation(self, layout: Layout) -> float:
        vocab, model = self._assembly.vocab_size, self._assembly.model
        prefix = tuple(vocab // (2 + index) for index in range(2 * BLOCK))
        prompts = [(*prefix, *(vocab // (3 + index + row) for index in range(9 + 5 * row))) for row in range(2)]
        batch, prefiller = self._assembly.make(layout, PrefixStore())
        saved = SavePrefix(0, 0, BLOCK, handles=(1, 2), checkpoint=3, tokens=len(prefix))
        first = Prefill(Generate(0, prompts[0], 1), 0, len(prefix), save=saved)
        mx.eval(prefiller.prefill([first]))
        prefiller.drop([0])
        submits = [Generate(number, prompt, 1) for number, prompt in enumerate(prompts, start=1)]
        chunks = [
            Prefill(submit, len(prefix), len(submit.prompt) - 1, reuse=(1, 2), reuse_checkpoint=3) for submit in submits
        ]
        mx.eval(prefiller.prefill(chunks))
        joined, rows = prefiller.take([1, 2])
        batch.join(joined, rows)
        return _distance_from_alone(model, batch, [submit.prompt for submit in joined], states=True)

    def _joined(self, layout: Layout, prompts: list[tuple[int, ...]]) -> tuple[Batch, list[tuple[int, ...]]]:
        """A batch of rows with these prompts, and the prompts in the order of the rows."""
        batch, prefiller = self._assembly.make(layout, PrefixStore())
        submits = [Generate(number, prompt, 1) for number, prompt in enumerate(prompts)]
        mx.eval(prefiller.prefill([Prefill(submit, 0, len(submit.prompt) - 1) for submit in submits]))
        joined, rows = prefiller.take([submit.request_id for submit in submits])
        batch.join(joined, rows)
        return batch, [submit.prompt for submit in joined]


def _distance_from_alone(model: Any, batch: Batch, prompts: Sequence[tuple[int, ...]], *, states: bool) -> float:
    """Of the logits of a step, and perhaps of the states after it: logits may hardly show that a state was lost."""
    worst = 0.0
    for index, (prompt, logits) in enumerate(zip(prompts, batch.forward(), strict=False)):
        caches = new_row_caches(model)
        worst = max(worst, _distance(model(mx.array([prompt]), cache=caches)[0, -1], logits))
        alone = [state for leaf in leaf_caches(caches) if isinstance(leaf, ArraysCache) for state in leaf.cache]
        for one, other in zip(alone, batch.states(index) if states else [], strict=False):
            far, size = (mx.linalg.norm(each.astype(mx.float32)) for each in (one - other, one))
            worst = max(worst, float((far / mx.maximum(size, 1e-9)).item()))  # type: ignore[arg-type]
    return worst


def _distance(one: mx.array, other: mx.array) -> float:
    """Of two vectors of logits, relative to their spread."""
    one, other = (each.astype(mx.float32) - mx.mean(each.astype(mx.float32)) for each in (one, other))
    return float((mx.linalg.norm(one - other) / mx.linalg.norm(one)).item())  # type: ignore[arg-type]
