"""Prompts that continue the same cached prefix share a pass, and answer as each alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.prefill import continuing
from millstream.backend.generation.prefill.continuing import COPIED_TOKENS, ContinuingPrompts
from millstream.backend.generation.prefill.groups import RightPaddedGroup
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from millstream.engine.generation.scheduler import GenerationScheduler
from support.engines import engine
from support.prefix_caches import caching_scheduler
from support.tiers import some
from support.tiny import BATCHABLE

VOCAB = 90
PREFIX = 56


def chunk(number: int, start: int, tokens: int, handles: tuple[int, ...], checkpoint: int | None = None) -> Prefill:
    request = Generate(number, (1,) * (start + tokens + 1), 4)
    return Prefill(request, start, start + tokens, reuse=handles, reuse_checkpoint=checkpoint)


def numbers_of(*chunks: Prefill) -> list[list[int]]:
    prompts = ContinuingPrompts(None, PrefixStore(), plain=True, padded=True, layers=None)
    return [[each.request.request_id for each in group] for group in prompts.groups(chunks)]


def test_they_share_a_pass_by_prefix_and_length() -> None:
    same = [chunk(number, 64, tokens, (1, 2)) for number, tokens in enumerate((20, 30, 9, 35))]
    assert numbers_of(*same) == [[0, 1, 3]], "the short one would be padding for the most part"
    others = (chunk(7, 64, 20, (1, 3)), chunk(8, 64, 20, (1, 2), checkpoint=5), chunk(9, 64, 20, (1, 3)))
    assert numbers_of(*same[:2], *others) == [[0, 1], [7, 9]]


def test_what_does_not_share_a_pass() -> None:
    long = [chunk(number, 64, 600, (1,)) for number in range(2)]
    later = [Prefill(chunk(number, 64, 40, (1,)).request, 80, 104) for number in range(2)]
    unfinished = [Prefill(chunk(number, 64, 40, (1,)).request, 64, 80, reuse=(1,)) for number in range(2)]
    assert numbers_of(*long) == numbers_of(*later) == numbers_of(*unfinished) == []


def test_copies_of_a_prefix_are_bounded() -> None:
    third = COPIED_TOKENS // 3
    assert numbers_of(*(chunk(number, third, 20, (1,)) for number in range(8))) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert numbers_of(*(chunk(number, COPIED_TOKENS, 20, (1,)) for number in range(3))) == []


def tail(draw: random.Random) -> tuple[int, ...]:
    """The prefix cache wants no checkpoint in the middle of it, where a prompt is cut: its end would run alone. With
    the longest, one is saved at its end."""
    return tuple(draw.randrange(1, VOCAB) for _ in range(draw.choice((2, 3, 5, 5))))


@pytest.mark.parametrize(
    ("family", "like_gpu"),
    some(
        [(family, like_gpu) for family in BATCHABLE for like_gpu in (False, True)],
        [("llama", True), ("gemma3_text", False), ("gemma3_text", True), ("lfm2", False), ("falcon_h1", True)],
    ),
)
def test_they_answer_as_each_alone(
    family: str, like_gpu: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do those that continue them: what is saved of such a pass is right too."""
    shared: list[int] = []

    def noted(kind: Any) -> Any:
        class Noted(kind):  # type: ignore[misc]
            def __init__(self, *given: Any, start: int, **named: Any) -> None:
                super().__init__(*given, start=start, **named)
                shared.append(len(self.members) if start == PREFIX else 0)

        return Noted

    for kind in (RightPaddedGroup, continuing.ContinuingGroup):
        monkeypatch.setattr(continuing, kind.__name__, noted(kind))
    draw = random.Random(family)
    prefix = tuple(draw.randrange(1, VOCAB) for _ in range(PREFIX))
    prompts = [prefix + tail(draw) for _ in range(6)]
    more = [prompt + tail(draw) for prompt in prompts]
    settings = GenerationSettings("folder", tiny_model(family), max_rows=8, like_gpu=like_gpu)
    make = functools.partial(MlxGenerationBackend, settings)
    wide: Any = lambda **given: GenerationScheduler(**{**given, "prefill_tokens": 400})  # noqa: E731
    with engine(make) as plain:
        expected = [plain.run(Generate(number, prompt, 6))[0] for number, prompt in enumerate(prompts + more)]
    with engine(make, make_scheduler=functools.partial(caching_scheduler, 10_000, None, make=wide)) as driver:
        shared.clear()
        driver.run(Generate(99, (*prefix, 1), 1))
        for first, asked in ((0, prompts), (len(prompts), more)):
            found = driver.run(*(Generate(first + number, prompt, 6) for number, prompt in enumerate(asked)))
            assert found == expected[first : first + len(asked)]
    assert sum(shared) >= 2, "some have shared a pass"
