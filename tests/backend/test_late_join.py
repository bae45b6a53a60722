"""Rows of long prompts join after the decode pass of their step: same tokens, and no saved block that lacks a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millstream.backend.generation import backend as generation_backend
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.drafters.drafter import Drafter
from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.messages import Generate, Generated, Tokens
from millstream.engine.generation.plan import Plan, Prefill, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.messages import Event, expanded
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.index import PrefixIndex
from support.known_drafter import KnownDrafter
from support.tiers import some

BLOCK, STREAM = 4, 1
PROMPT = tuple(number * 7 % 83 + 1 for number in range(64))
"""Whole blocks with its last token, which a row computes in its first step."""


class Steps:
    """A backend and its scheduler beside a stream that never ends, step by step."""

    def __init__(self, backend: MlxGenerationBackend) -> None:
        self.backend = backend
        self.scheduler = GenerationScheduler(
            max_rows=4,
            prefill_tokens=90,
            chunk_sizer=ChunkSizer(most=32, least=32),
            prefix_cache=BlockPrefixCache(PrefixIndex(block=BLOCK, block_bytes=1, budget=10_000), share_tokens=16),
        )
        self.steps: list[tuple[Plan, StepResult]] = []
        self.events: list[Event] = []
        self.scheduler.submit(Generate(STREAM, (5, 6, 7), 10_000))
        self.step()

    def step(self) -> tuple[Plan, StepResult]:
        plan = self.scheduler.plan()
        result = self.backend.step(plan)
        self.steps.append((plan, result))
        self.events += expanded(self.scheduler.advance(plan, result))
        return plan, result

    def answer(self, number: int, prompt: tuple[int, ...], tokens: int = 8) -> list[int]:
        self.scheduler.submit(Generate(number, prompt, tokens))
        while not any(isinstance(each, Generated) and each.request_id == number for each in self.events):
            self.step()
        return self.tokens(number)

    def tokens(self, number: int) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, Tokens) and event.request_id == number
            for token in event.tokens
        ]

    def first_with(self, number: int) -> int:
        """The step whose plan has the request decode for the first time."""
        return next(index for index, (plan, _) in enumerate(self.steps) if number in plan.decode)


def owned(folder: Path, run: Callable[[MlxGenerationBackend], None], drafters: list[Drafter] | None = None) -> None:
    def own() -> None:
        backend = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4, like_gpu=True), drafters)
        backend.load()
        try:
            run(backend)
        finally:
            backend.close()

    with ThreadPoolExecutor(1) as owner:
        owner.submit(own).result()


def beside_a_stream(folder: Path, run: Callable[[Steps], None]) -> None:
    owned(folder, lambda backend: run(Steps(backend)))


@pytest.fixture(params=[True, False], ids=["late", "at once"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(generation_backend, "MAX_PADDED_CHUNK", 16 if request.param else 512)
    return bool(request.param)


def test_a_long_prompt_decodes_from_the_step_after_the_one_that_it_joins_in(
    late: bool, tiny_model: Callable[[str], Path]
) -> None:
    def run(engine: Steps) -> None:
        cold = engine.answer(2, PROMPT)
        joined = engine.first_with(2)
        first = next(
            index for index, (_, result) in enumerate(engine.steps) if 2 in [row.request_id for row in result.rows]
        )
        assert first - joined == 1 + late, "a step reports the tokens of the one before"
        assert all(any(row.request_id == STREAM for row in result.rows) for _, result in engine.steps[2:])
        assert len(cold) == 8
        assert engine.answer(3, PROMPT) == cold, "from the prefix cache"
        assert engine.answer(4, (*PROMPT, *cold[:3], 9)) == engine.answer(5, (*PROMPT, *cold[:3], 9))
        engine.backend.reset()
        engine.scheduler.fail("start anew")
        assert engine.answer(6, PROMPT) == cold, "alone: it has nobody to wait for"

    beside_a_stream(tiny_model("llama"), run)


@pytest.mark.parametrize("after", some([0, 1, 2, 3], [0, 1]))
def test_a_request_that_is_cancelled_as_it_joins_saves_only_what_is_computed(
    after: int, late: bool, tiny_model: Callable[[str], Path]
) -> None:
    """`after`: steps from the one that it joins in. Its prompt's last block has a token that its row had not computed
    when it joined."""

    def run(engine: Steps) -> None:
        engine.scheduler.submit(Generate(2, PROMPT, 100))
        while 2 not in engine.steps[-1][0].decode:
            engine.step()
        for _ in range(after):
            engine.step()
        engine.scheduler.cancel(2)
        engine.step()
        unsaved = engine.steps[-1][1].unsaved
        assert bool(unsaved) is (late and after == 0), "the block with the prompt's last token"
        longer = (*PROMPT, 17, 3)
        warm = engine.answer(3, longer)
        engine.backend.reset()
        engine.scheduler.fail("start anew")
        engine.scheduler.submit(Generate(7, (5, 6, 7), 10_000))
        engine.step()
        assert engine.answer(4, longer) == warm

    beside_a_stream(tiny_model("llama"), run)


def test_what_is_saved_is_copied_before_its_row_joins(late: bool, tiny_model: Callable[[str], Path]) -> None:
    """In steps of their own, if no chunk is computed meanwhile."""

    def run(engine: Steps) -> None:
        engine.answer(2, PROMPT)
        saved = next(index for index, (plan, _) in enumerate(engine.steps) if plan.save)
        assert [result.saving for _, result in engine.steps[saved:]][:3] == [True, True, False]
        assert not any(result.prefilling for _, result in engine.steps[saved:])
        assert engine.first_with(2) == saved + 3

    beside_a_stream(tiny_model("llama"), run)


class Watching(KnownDrafter):
    """Notes which rows were asked for a draft that had no token yet."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        super().__init__(answers, 1.0)
        self.too_early: list[int] = []

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        self.too_early += [row for row in wanted if not self.gained[row]]
        return super().propose(wanted)


@pytest.mark.parametrize("drafts", [(), ((STREAM, 3),)], ids=["a plain step", "a pass that verifies"])
@pytest.mark.parametrize("family", some(["llama", "lfm2"], ["lfm2"]))
def test_a_row_that_has_just_joined_has_no_draft_yet(
    family: str, drafts: tuple[tuple[int, int], ...], late: bool, tiny_model: Callable[[str], Path]
) -> None:
    """The next step may verify drafts of other rows; a drafter may need what the target made of a row's last token.
    `drafts`: those that are verified in the step in which it joins; then it joins before."""
    stream, long = Generate(STREAM, (5, 6, 7), 100), Generate(2, PROMPT, 100)
    begin = [
        Plan(prefill=(Prefill(stream, 0, 2),)),
        Plan(decode=(STREAM,)),
        Plan(decode=(STREAM,), prefill=(Prefill(long, 0, len(PROMPT) - 1),), complete_prefill=True),
    ]
    both = Plan(decode=(STREAM, 2))

    def tokens(backend: MlxGenerationBackend, joins: Plan, then: Plan, steps: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {STREAM: [], 2: []}
        for plan in [*begin, joins, *[then] * steps]:
            for row in backend.step(plan).rows:
                found[row.request_id] += row.tokens
        return found

    plain: dict[int, list[int]] = {}
    owned(tiny_model(family), lambda backend: plain.update(tokens(backend, both, both, 24)), [])
    drafter = Watching(plain)

    def drafted(backend: MlxGenerationBackend) -> None:
        joins, then = (Plan(decode=(STREAM, 2), drafts=some) for some in (drafts, ((STREAM, 3), (2, 3))))
        found = tokens(backend, joins, then, 5)
        for row, seen in found.items():
            assert seen == plain[row][: len(seen)] and len(seen) >= 9

    owned(tiny_model(family), drafted, [drafter])
    assert drafter.proposals
    if late and not drafts:  # a row that joined at once may be asked before its first token was read
        assert not drafter.too_early
