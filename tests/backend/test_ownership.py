"""The rule of the house: a model is loaded, run and freed on one thread. This machine enforces it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.weights.materialize import evaluate_all, reachable_arrays
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan
from millstream.engine.ownership import NotOwner
from support.engines import Run, engine
from support.tiny import BATCHABLE
from support.wrapped import Wrapped


@pytest.mark.parametrize("family", BATCHABLE)
def test_a_naive_server_breaks_on_this_machine(
    family: str, tiny_model: Callable[[str], Path], two_threads: tuple[Run, Run]
) -> None:
    """Loaded lazily on one thread, run on another: MLX refuses. Otherwise the tests below would prove nothing."""
    loader, runner = two_threads
    model, _ = loader(lambda: load_model(tiny_model(family), lazy=True))
    with pytest.raises(RuntimeError, match="no Stream"):
        runner(lambda: mx.eval(model(mx.array([[1, 2, 3]]))))


def test_parameters_alone_leave_private_tables_lazy(
    tiny_model: Callable[[str], Path], two_threads: tuple[Run, Run]
) -> None:
    """Evaluating parameters() is not enough for llama3-scaled RoPE; evaluating all that is reachable is."""
    folder = tiny_model("llama")
    loader, runner = two_threads

    def load(evaluate: Callable[[Any], Any]) -> Any:
        model, _ = load_model(folder, lazy=True)
        evaluate(model)
        return model

    half = loader(lambda: load(lambda model: mx.eval(model.parameters())))
    with pytest.raises(RuntimeError, match="no Stream"):
        runner(lambda: mx.eval(half(mx.array([[1, 2, 3]]))))
    whole = loader(lambda: load(evaluate_all))
    runner(lambda: mx.eval(whole(mx.array([[1, 2, 3]]))))


def test_private_arrays_are_reached(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(tiny_model("llama"), lazy=True)
    reached = {id(array) for array in reachable_arrays(model)}
    assert all(id(layer.self_attn.rope._freqs) in reached for layer in model.layers)


class Witness(Wrapped):
    """A real backend that notes the thread of every call."""

    def __init__(self, folder: Path, seen: dict[str, set[int]]) -> None:
        self._seen = seen
        self.note("make")
        super().__init__(MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4)))

    def note(self, what: str) -> None:
        self._seen.setdefault(what, set()).add(threading.get_ident())


@pytest.mark.parametrize("family", BATCHABLE)
def test_load_step_and_free_happen_on_one_thread(family: str, tiny_model: Callable[[str], Path]) -> None:
    seen: dict[str, set[int]] = {}
    before = threading.active_count()
    with engine(lambda: Witness(tiny_model(family), seen)) as driver:
        driver.run(Generate(1, (1, 2, 3), 5), Generate(2, (4,), 3))
    assert set(seen) == {"make", "background_task", "load", "step", "memory_bytes", "close"}
    assert len(set().union(*seen.values())) == 1
    assert threading.get_ident() not in seen["load"]
    assert threading.active_count() == before, "the owner thread is still there"


def test_memory_comes_back_after_unload(tmp_path: Path) -> None:
    from support.tiny import write_model

    folder = write_model(tmp_path / "m", "llama", hidden_size=512, intermediate_size=1024, head_dim=128)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4))) as driver:
        driver.run(Generate(1, tuple(range(90)), 20))
        weights = driver.facts.weight_bytes if driver.facts else 0
        assert weights > 2**23
        assert mx.get_active_memory() >= before + weights
    assert mx.get_active_memory() - before < weights // 100


def test_twenty_lives_leave_nothing_behind(tiny_model: Callable[[str], Path]) -> None:
    """Load and unload over and over: the same answer each time, no thread and no memory kept."""
    folder = tiny_model("llama")
    answers = set()
    threads, memory = threading.active_count(), mx.get_active_memory()
    for _ in range(20):
        with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4))) as driver:
            answers.add(tuple(driver.run(Generate(1, (5, 6, 7), 8))[0]))
    assert len(answers) == 1
    assert threading.active_count() == threads
    assert mx.get_active_memory() - memory < 2**20


def test_a_foreign_thread_is_refused_by_name(tiny_model: Callable[[str], Path], two_threads: tuple[Run, Run]) -> None:
    backend = two_threads[0](
        lambda: MlxGenerationBackend(GenerationSettings("folder", tiny_model("llama"), max_rows=4))
    )
    with pytest.raises(NotOwner, match=r"step belongs to thread .* called on 'MainThread'"):
        backend.step(Plan())
