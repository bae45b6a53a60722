"""A decode step's forward pass as one compiled function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.caches.traced_step import Ref, TracedStep
from millstream.backend.generation.compiled_step import CompiledStep
from millstream.backend.generation.layout_choice.fast_paths import FastPaths
from millstream.engine.generation.messages import Generate
from support.engines import engine
from support.tiny import write_model

SUBMITS = (Generate(1, (5, 6, 7), 3), Generate(2, (8,), 4))


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compiled on this device too, each token anew."""
    monkeypatch.setattr(FastPaths, "steps_compile", True)


def answers(folder: Path, **settings: Any) -> tuple[list[list[int]], str]:
    """What two rows generate, and the note on fast paths."""
    made = GenerationSettings("folder", folder, max_rows=4, like_gpu=True, **settings)
    with engine(lambda: MlxGenerationBackend(made)) as driver:
        assert driver.facts is not None
        (note,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        return driver.run(*SUBMITS), note


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_compiled_steps_give_the_same_tokens(family: str, everywhere: None, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    plain, note = answers(folder, disabled=frozenset({"compiled-step"}))
    assert "compiled-step (--disable)" in note
    compiled, note = answers(folder)
    assert "compiled-step" in note.split("; not used: ")[0]
    assert compiled == plain


def test_a_model_that_cannot_be_traced_runs_as_before(
    everywhere: None, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import llama

    forward = llama.Model.__call__

    def reading(self: Any, inputs: mx.array, **named: Any) -> mx.array:
        assert inputs.max().item() >= 0
        out: mx.array = forward(self, inputs, **named)
        return out

    folder = tiny_model("llama")
    expected, _ = answers(folder, disabled=frozenset({"compiled-step"}))
    monkeypatch.setattr(llama.Model, "__call__", reading)
    found, note = answers(folder)
    assert found == expected
    assert "compiled-step (" in note.split("; not used: ")[1] and "eval" in note


def test_no_weight_outlives_its_engine(everywhere: None, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama", hidden_size=256, intermediate_size=512, head_dim=64)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4))) as driver:
        driver.run(Generate(1, (5, 6, 7), 3))
        weights = driver.facts.weight_bytes if driver.facts else 0
        assert mx.get_active_memory() >= before + weights > before + 2**20
    assert mx.get_active_memory() - before < weights // 20


class OneState(TracedStep):
    """Caches with one array, which a step replaces."""

    def __init__(self) -> None:
        self.layers = [self]
        self.state = mx.zeros((2, 1))
        self.key: Hashable | None = "key"

    def step_key(self) -> Hashable | None:
        return self.key

    def step_refs(self) -> list[Ref]:
        return [(self, "state")]

    def result_refs(self) -> list[Ref]:
        return [(self, "state")]

    def forget_step(self) -> None: ...


class Counting:
    """A model that counts how often it is traced."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: mx.array, cache: list[OneState], shift: mx.array | None = None) -> mx.array:
        self.calls += 1
        cache[0].state = cache[0].state + tokens
        out = cache[0].state + (0 if shift is None else shift)
        if self.calls == 4:
            raise ValueError("told to")
        return out[:, None]


def test_a_function_is_traced_once_for_each_kind_of_step() -> None:
    model, caches, tokens = Counting(), OneState(), mx.array([1, 2])
    step = CompiledStep(model)
    for count in range(1, 4):
        logits = step.run(tokens, caches, {})
        assert logits is not None and logits.tolist() == [[count], [2 * count]]
    assert model.calls == 1
    other = OneState()
    again = step.run(tokens, other, {})
    assert again is not None and again.tolist() == [[1], [2]]
    assert model.calls == 1, "another batch of the same model uses the same functions"
    shifted = step.run(tokens, caches, {"shift": mx.array([[10], [20]])})
    assert shifted is not None and shifted.tolist() == [[14], [28]]
    caches.key = "another"
    assert step.run(tokens, caches, {}) is not None
    assert model.calls == 3
    caches.key = None
    assert step.run(tokens, caches, {}) is None


def test_a_trace_that_fails_leaves_the_caches_as_they_were() -> None:
    model, caches = Counting(), OneState()
    model.calls = 3
    with pytest.raises(ValueError, match="told to"):
        CompiledStep(model).run(mx.array([1, 2]), caches, {})
    assert caches.state.tolist() == [[0], [0]]
