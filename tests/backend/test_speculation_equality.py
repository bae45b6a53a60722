"""Tokens with drafts, whatever they are, equal tokens without: all that a client sees but the speed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.drafters.drafter import Drafter
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.messages import Cancel
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import compiler_of
from millstream.types import Grammar, Sampling
from support.drafting import drafting
from support.engines import Driver, engine
from support.known_drafter import KnownDrafter
from support.mixed_requests import mixed, seen
from support.tiers import some
from support.tiny import FAMILIES, VOCAB, write_model, write_tokenizer

END = 258
"""The byte tokenizer's <|im_end|>."""

KINDS = ["llama", "gemma3_text", "qwen3_moe"]
"""Full attention, windows, experts."""


class Drafted:
    """An engine whose backend has these drafters; remembers the backend."""

    def __init__(self, folder: Path, drafters: Sequence[Drafter] | None, **changes: Any) -> None:
        settings = GenerationSettings("folder", folder, **{"max_rows": 5, **changes})
        self._make = lambda: MlxGenerationBackend(settings, drafters)

    def __call__(self) -> MlxGenerationBackend:
        self.backend = self._make()
        return self.backend


def answers(driver: Driver, wanted: Sequence[Generate]) -> dict[int, list[int]]:
    return {submit.request_id: list(driver.tokens.get(submit.request_id, [])) for submit in wanted}


def proposed(driver: Driver, wanted: Sequence[Generate]) -> tuple[int, int]:
    """Tokens of drafts that were right, and that were wrong, by usage."""
    usages = [end.usage for each in wanted for end in driver.ends[each.request_id] if isinstance(end, Generated)]
    return sum(each.accepted_prediction_tokens for each in usages), sum(
        each.rejected_prediction_tokens for each in usages
    )


@pytest.mark.parametrize("family", some([*FAMILIES], KINDS))
@pytest.mark.parametrize(
    ("right", "shape"),
    [(1.0, {}), (0.7, {"ragged": True}), (0.3, {"offer": 0.5}), (0.9, {"too_long": True}), (0.0, {})],
)
def test_any_drafts_give_the_same_answers(
    family: str, right: float, shape: Mapping[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    """Greedy and sampled rows, penalties, minimum lengths, log-probabilities, stop tokens inside a draft."""
    folder = tiny_model(family)
    wanted = mixed(len(family) + int(10 * right), 12)
    with engine(Drafted(folder, []), prefill_tokens=16) as driver:
        expected = seen(driver, wanted, cached=False)
        known = answers(driver, wanted)
    drafter = KnownDrafter(known, right, seed=3, **shape)
    make = Drafted(folder, [drafter])
    with engine(make, make_scheduler=functools.partial(drafting, 5)) as driver:
        assert seen(driver, wanted, cached=False) == expected
        if driver.facts is not None and driver.facts.drafters:
            accepted, rejected = proposed(driver, wanted)
            assert (accepted > 5) == (right > 0) and (rejected > 5) == (right < 1)
    assert not len(drafter), "rows that have ended are forgotten"
