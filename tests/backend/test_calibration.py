"""Calibration at load: the logic on a fake clock, and real measurements of tiny models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.calibration import calibrate
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.generation.speculation.lengths import LENGTHS
from millstream.model_facts import Calibration, GenerationFacts, PrefixSizes
from support.engines import Run, engine
from support.fake import FakeBackend
from support.tiers import some

TOKEN_BYTES = 1000


class TimedBackend(FakeBackend):
    """Steps take as long as a cost model says, on a clock of its own."""

    def __init__(
        self,
        *,
        chunk: Callable[[int], float] = lambda tokens: 0.001 + 1e-5 * tokens,
        step: Callable[[int], float] = lambda rows: 0.001 * (1 + rows),
        save: Callable[[int], float] = lambda tokens: 0.0005 + 1e-10 * TOKEN_BYTES * tokens,
        max_rows: int = 8,
        context_length: int = 10_000,
    ) -> None:
        super().__init__(max_rows=max_rows, context_length=context_length)
        self.clock = 0.0
        self._chunk, self._step, self._save = chunk, step, save
        self.saved: set[int] = set()

    def step(self, plan: Plan) -> StepResult:
        for chunk in plan.prefill:
            if chunk.end > chunk.start:
                self.clock += self._chunk(chunk.end - chunk.start)
            if chunk.save is not None:
                self.clock += self._save(len(chunk.save.handles) * chunk.save.block)
                self.saved |= set(chunk.save.all_handles)
        if plan.decode:
            self.clock += self._step(len(plan.decode))
        self.saved -= set(plan.evict)
        return super().step(plan)

    def calibrate(self, available_bytes: int = 10**12, sizes: PrefixSizes | None = None) -> Calibration:
        facts = GenerationFacts(
            self.context_length, self.vocab_size, self.max_rows, 0, "none", "cpu", prefix_sizes=sizes
        )
        return calibrate(self, facts, available_bytes=lambda: available_bytes, now=lambda: self.clock)


def test_costs_are_found_and_nothing_is_left_behind() -> None:
    backend = TimedBackend()
    found = backend.calibrate(sizes=PrefixSizes(TOKEN_BYTES))
    assert [tokens for tokens, _ in found.chunks] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert [seconds for _, seconds in found.chunks] == pytest.approx([0.001 + 1e-5 * n for n, _ in found.chunks])
    assert dict(found.steps) == pytest.approx({1: 0.002, 4: 0.005})
    assert found.save_seconds == pytest.approx(0.0005, rel=0.05)
    assert found.save_seconds_per_byte == pytest.approx(1e-10)
    assert not backend.rows and not backend.progress and not backend.saved
    assert backend.clock <= 1.0


def test_states_are_saved_with_the_blocks_and_evicted() -> None:
    backend = TimedBackend()
    backend.calibrate(sizes=PrefixSizes(TOKEN_BYTES, ((8, 10),)))
    saves = [chunk.save for plan in backend.plans for chunk in plan.prefill if chunk.save is not None]
    assert saves and all(save.checkpoint is not None for save in saves)
    assert not backend.saved


def test_a_disturbed_save_does_not_look_like_a_slow_copy() -> None:
    """Else nothing would be worth saving until the model is loaded again."""
    found = TimedBackend(save=lambda tokens: 0.0005 if tokens <= 16 else 1.0).calibrate(sizes=PrefixSizes(TOKEN_BYTES))
    assert found.save_seconds_per_byte == 1e-9


def test_a_model_without_a_prefix_cache_saves_nothing() -> None:
    backend = TimedBackend()
    found = backend.calibrate(sizes=None)
    assert (found.save_seconds, found.save_seconds_per_byte) == (0.0, 0.0)
    assert all(chunk.save is None for plan in backend.plans for chunk in plan.prefill)


@pytest.mark.parametrize("token", [1e-5, 1e-3, 2e-2])
def test_a_slow_device_is_measured_on_shorter_chunks(token: float) -> None:
    """In about the same time. The shortest chunk and one row are measured whatever they take."""
    backend = TimedBackend(chunk=lambda tokens: 0.02 + token * tokens, step=lambda rows: 0.02 + token * rows)
    found = backend.calibrate()
    assert found.chunks[0][0] == 16 and found.steps[0][0] == 1
    assert backend.clock < 1.2
    assert found.chunks[-1][0] == {1e-5: 4096, 1e-3: 128, 2e-2: 16}[token]


def test_a_very_slow_device_is_measured_once() -> None:
    backend = TimedBackend(chunk=lambda tokens: 5.0, step=lambda rows: 2.0, save=lambda tokens: 0.001)
    found = backend.calibrate(sizes=PrefixSizes(TOKEN_BYTES))
    assert (found.chunks, found.steps) == (((16, 5.0),), ((1, 2.0),))
    prompts = [chunk for plan in backend.plans for chunk in plan.prefill if chunk.end > chunk.start]
    assert len(prompts) == 2, "one chunk, and the prompt of one row"


def test_lengths_end_where_the_throughput_does() -> None:
    backend = TimedBackend(chunk=lambda tokens: 1e-5 * max(tokens, 256))
    assert [tokens for tokens, _ in backend.calibrate().chunks] == [16, 32, 64, 128, 256, 512, 1024]


def test_lengths_end_with_the_context_and_with_the_memory() -> None:
    backend = TimedBackend(context_length=100, max_rows=1)
    found = backend.calibrate()
    assert found.chunks[-1][0] == 64
    assert [rows for rows, _ in found.steps] == [1]
    assert len(TimedBackend().calibrate(available_bytes=-1).chunks) == 1


def test_a_chunk_that_was_disturbed_is_run_again() -> None:
    """However long it took: what was believed of it would hold until the model is loaded again."""
    slow = {1024: 0.26}
    backend = TimedBackend(chunk=lambda tokens: slow.pop(tokens, 0.006 + 1e-6 * tokens))
    found = dict(backend.calibrate().chunks)
    assert found[1024] == pytest.approx(0.006 + 1e-6 * 1024)
    assert found[4096] == pytest.approx(0.006 + 1e-6 * 4096)


def test_decode_steps_are_measured_however_long_chunks_took() -> None:
    backend = TimedBackend(chunk=lambda tokens: 0.002 + 2e-4 * tokens, step=lambda rows: 0.005, max_rows=16)
    found = backend.calibrate()
    assert dict(found.steps) == pytest.approx({1: 0.005, 4: 0.005, 16: 0.005})


class SpanningBackend(TimedBackend):
    """Computes chunks over several steps while rows decode. Prompts share a pass."""

    def step(self, plan: Plan) -> StepResult:
        return dataclasses.replace(super().step(plan), prefilling=bool(plan.decode and plan.prefill))


def test_passes_over_short_prompts_are_measured_where_they_may_span_steps() -> None:
    backend = SpanningBackend(chunk=lambda tokens: 0.001 + 1e-5 * tokens, max_rows=16)
    found = backend.calibrate()
    assert dict(found.passes) == pytest.approx({64 * prompts: prompts * 0.00164 for prompts in (1, 4, 16)})
    assert not backend.rows and not backend.progress
    assert TimedBackend().calibrate().passes == ()


class VerifyingBackend(TimedBackend):
    """Has a draft for every row that may have one."""

    def __init__(self, cost: Callable[[int, int], float], *, verifies: bool = True, max_rows: int = 16) -> None:
        super().__init__(step=lambda rows: cost(rows, 1), max_rows=max_rows)
        self._cost, self._verifies = cost, verifies
        self.lengths: list[tuple[int, int]] = []

    def step(self, plan: Plan) -> StepResult:
        result = super().step(plan)
        if not plan.drafts or not self._verifies:
            return result
        rows, length = len(plan.decode), 1 + plan.drafts[0][1]
        assert [row for row, _ in plan.drafts] == list(plan.decode)
        self.lengths.append((rows, length))
        seconds = self._cost(rows, length)
        self.clock += seconds - self._cost(rows, 1)
        return dataclasses.replace(result, length=length, pass_seconds=seconds)

    def found(self, **more: Any) -> dict[tuple[int, int], float]:
        facts = GenerationFacts(
            self.context_length, self.vocab_size, self.max_rows, 0, "none", "cpu", **{"drafters": ("one",), **more}
        )
        measured = calibrate(self, facts, available_bytes=lambda: 10**12, now=lambda: self.clock)
        return {(rows, length): seconds for rows, length, seconds in measured.verifying}


def test_passes_that_verify_drafts_are_measured() -> None:
    def cost(rows: int, length: int) -> float:
        return 0.002 + 1e-4 * rows * length

    backend = VerifyingBackend(cost)
    found = backend.found()
    assert list(found) == [
        *((1, length) for length in (2, 3, 5, 9, 17)),
        *((4, length) for length in (2, 3, 5, 9, 17)),
        *((16, length) for length in (2, 3, 5, 9)),
    ]
    assert found == pytest.approx({each: cost(*each) for each in found})
    assert not backend.rows and not backend.progress
    narrow = VerifyingBackend(cost).found(exact_passes=((1, 9), (4, 12)))
    assert list(narrow) == [(1, 2), (1, 3), (1, 5), (1, 9), (4, 2), (4, 3)], "others would not be exact"


def test_where_nothing_drafts_or_nothing_is_verified_no_pass_is_measured() -> None:
    silent = VerifyingBackend(lambda rows, length: 0.002)
    assert silent.found(drafters=()) == {} and not silent.lengths
    assert VerifyingBackend(lambda rows, length: 0.002, verifies=False).found() == {}


@pytest.mark.parametrize("token", [1e-4, 0.01, 0.1, 1.0])
def test_passes_that_take_too_long_are_left_out(token: float) -> None:
    """About as long again as without them, at most."""

    def cost(rows: int, length: int) -> float:
        return token * (4 + 0.5 * rows * length)

    without, backend = VerifyingBackend(cost), VerifyingBackend(cost)
    without._chunk = backend._chunk = lambda tokens: token * (4 + 0.5 * tokens)
    without.found(drafters=())
    found = backend.found()
    assert backend.clock - without.clock < 0.5
    assert ((1, 17) in found) is (token < 0.1)
    assert bool(found) is (token < 0.1)


def test_a_first_pass_that_compiles_kernels_is_run_again() -> None:
    seen: set[tuple[int, int]] = set()

    def cost(rows: int, length: int) -> float:
        first = 0.03 * (length > 1 and (rows, length) not in seen)
        seen.add((rows, length))
        return 0.002 + first

    backend = VerifyingBackend(cost, max_rows=1)
    assert backend.found() == pytest.approx({(1, length): 0.002 for length in (2, 3, 5, 9, 17)})


@pytest.mark.parametrize(
    "family, like_gpu",
    some(
        [("llama", False), ("llama", True), ("gemma3_text", False), ("mamba2", False), ("llama4", False)],
        [("llama", True), ("gemma3_text", False), ("mamba2", False)],
    ),
)
def test_a_real_model_is_measured_at_load(
    family: str, like_gpu: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of KV cache; and it answers as it does without."""
    settings = GenerationSettings("folder", tiny_model(family), max_rows=4, like_gpu=like_gpu)
    requests = [Generate(number, tuple(range(1, 20 + number)), 6) for number in range(3)]
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None and driver.facts.calibration is None, "too small to be worth it"
        expected = driver.run(*requests)
    monkeypatch.setattr("millstream.backend.generation.preparation.MIN_WEIGHT_BYTES", 0)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None and (found := driver.facts.calibration) is not None
        assert driver.run(*requests) == expected
    assert found.chunks[0][0] == 16 and found.steps[0][0] == 1
    assert all(seconds > 0 for _, seconds in (*found.chunks, *found.steps))
    assert found.workspace_bytes > 0 and driver.facts.workspace_bytes > 0
    assert (found.save_seconds > 0) == (driver.facts.prefix_sizes is not None)
    assert bool(found.verifying) == bool(driver.facts.drafters)
    assert all(seconds > 0 and length in LENGTHS[1:] for _, length, seconds in found.verifying)


def test_without_speculation_no_pass_is_measured(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.backend.generation.preparation.MIN_WEIGHT_BYTES", 0)
    settings = GenerationSettings("folder", tiny_model("llama"), max_rows=4, speculation=False)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None and driver.facts.calibration is not None
        assert driver.facts.calibration.verifying == ()


def test_a_real_model_keeps_nothing_of_it_in_memory(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, two_threads: tuple[Run, Run]
) -> None:
    monkeypatch.setattr("millstream.backend.generation.preparation.MIN_WEIGHT_BYTES", 0)

    def load() -> tuple[GenerationFacts, int]:
        backend = MlxGenerationBackend(GenerationSettings("folder", tiny_model("llama"), max_rows=4))
        facts, memory = backend.load(), backend.memory_bytes()
        assert backend._speculating.drafts.names == facts.drafters, "the drafter of the calibration is gone"
        assert backend._speculating.rows == 0
        backend.close()
        return facts, memory

    facts, memory = two_threads[0](load)
    assert facts.calibration is not None
    assert memory == facts.weight_bytes


def test_calibration_can_be_disabled(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.backend.generation.preparation.MIN_WEIGHT_BYTES", 0)
    settings = GenerationSettings("folder", tiny_model("llama"), max_rows=4, disabled=frozenset({"calibration"}))
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None
        assert (driver.facts.calibration, driver.facts.workspace_bytes) == (None, 0)
