"""A request that ends in prefill leaves what was computed in the prefix cache, and it changes no later output."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.messages import Generate, Generated, Tokens
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.messages import Event, expanded
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.cache import PrefixCache
from millstream.engine.prefix_cache.checkpoints import CheckpointPrefixCache
from millstream.engine.prefix_cache.index import PrefixIndex

BLOCK = 4
PROMPT = tuple(number * 7 % 83 + 1 for number in range(61))


class Engine:
    """A backend and its scheduler, step by step."""

    def __init__(self, backend: MlxGenerationBackend, scheduler: GenerationScheduler) -> None:
        self.backend = backend
        self.scheduler = scheduler
        self.prefilling = False
        self.events: list[Event] = []

    def submit(self, number: int, prompt: tuple[int, ...], tokens: int = 8) -> None:
        self.scheduler.submit(Generate(number, prompt, tokens))

    def step(self) -> None:
        plan = self.scheduler.plan()
        result = self.backend.step(plan)
        assert not result.unsaved
        self.prefilling = result.prefilling
        self.events += expanded(self.scheduler.advance(plan, result))

    def tokens(self, number: int) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, Tokens) and event.request_id == number
            for token in event.tokens
        ]

    def answer(self, number: int, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], int]:
        """The tokens of a request, and how many of its prompt were cached."""
        self.submit(number, prompt)
        while not (ends := [each for each in self.events if isinstance(each, Generated) and each.request_id == number]):
            self.step()
        return self.tokens(number), ends[0].usage.cached_tokens


def owned(folder: Path, run: Callable[[Engine], None], *, like_gpu: bool, chunk: int, states: bool = False) -> None:
    """Runs on one thread, as an owner does. `states`: the model resumes from checkpoints."""

    def own() -> None:
        backend = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4, like_gpu=like_gpu))
        facts = backend.load()
        assert facts.prefix_sizes is not None and bool(facts.prefix_sizes.states) is states
        index = PrefixIndex(block=BLOCK, block_bytes=1, budget=10_000, from_checkpoints=states)
        cache: PrefixCache = CheckpointPrefixCache(index, lambda tokens: 1) if states else BlockPrefixCache(index)
        sizer = ChunkSizer(most=chunk, least=chunk)
        scheduler = GenerationScheduler(max_rows=4, prefill_tokens=90, chunk_sizer=sizer, prefix_cache=cache)
        try:
            run(Engine(backend, scheduler))
        finally:
            backend.close()

    with ThreadPoolExecutor(1) as owner:
        owner.submit(own).result()


@pytest.mark.parametrize("like_gpu", [False, True])
def test_a_cancelled_prompt_is_continued_when_it_comes_again(like_gpu: bool, tiny_model: Callable[[str], Path]) -> None:
    """After any step of its prefill, also while a chunk is deferred. A stream decodes meanwhile."""
    found: list[int] = []
    deferred: list[bool] = []

    def run(engine: Engine) -> None:
        engine.submit(1, (5, 6, 7), tokens=1000)
        engine.step()
        for steps in (1, 2, 3, 5, 6, 8):
            prompt = (80 + steps, *PROMPT)
            engine.submit(10 * steps + 1, prompt)
            for _ in range(steps):
                engine.step()
            deferred.append(engine.prefilling)
            engine.scheduler.cancel(10 * steps + 1)
            engine.step()
            tokens, cached = engine.answer(10 * steps + 2, prompt)
            found.append(cached)
            engine.backend.reset()
            engine.scheduler.fail("start anew")
            engine.submit(10 * steps + 3, (5, 6, 7), tokens=1000)
            engine.step()
            assert (tokens, 0) == engine.answer(10 * steps + 4, prompt)

    owned(tiny_model("llama"), run, like_gpu=like_gpu, chunk=16)
    assert all(found), "some blocks were computed before every cancel"
    assert all(tokens % BLOCK == 0 for tokens in found)
    if like_gpu:  # over how many steps a chunk is spread follows what steps take
        assert found == sorted(found) and found[0] == 16 and found[-1] >= 32
    else:
        assert found == [16, 32, 48, 60, 60, 60]
    assert any(deferred) is like_gpu


def test_a_prompt_of_a_group_is_saved_before_it_joins(tiny_model: Callable[[str], Path]) -> None:
    """Prompts of unequal length are prefilled in one padded pass; then one is cancelled."""

    def run(engine: Engine) -> None:
        first, second = PROMPT[:40], PROMPT[3:33]
        engine.submit(1, first)
        engine.submit(2, second)
        engine.step()
        assert engine.scheduler.cancel(2)
        engine.step()
        again = engine.answer(3, second)
        assert again[1] == 28
        engine.backend.reset()
        engine.scheduler.fail("start anew")
        assert engine.answer(4, second) == (again[0], 0)

    owned(tiny_model("llama"), run, like_gpu=True, chunk=90)


def test_a_prompt_that_resumes_from_checkpoints_leaves_them(tiny_model: Callable[[str], Path]) -> None:
    def run(engine: Engine) -> None:
        engine.submit(1, (5, 6, 7), tokens=1000)
        engine.step()
        prompt = PROMPT * 40  # checkpoints are 1,024 tokens apart
        engine.submit(2, prompt)
        for _ in range(15):
            engine.step()
        engine.scheduler.cancel(2)
        engine.step()
        tokens, cached = engine.answer(3, prompt)
        assert cached == 1024
        engine.backend.reset()
        engine.scheduler.fail("start anew")
        assert engine.answer(4, prompt) == (tokens, 0)

    owned(tiny_model("lfm2"), run, like_gpu=False, chunk=90, states=True)
