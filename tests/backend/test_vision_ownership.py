"""Thread ownership of vision models: the towers belong to the owner thread too."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from test_ownership import Witness

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.weights.materialize import evaluate_all
from millstream.backend.weights.vision import load_vision
from support.engines import Run, engine
from support.tiers import some
from support.tiny_vision import AUDIO, Case, picture

FAMILIES = ["qwen3_vl", "gemma4", "gemma4-audio", "pixtral", "llava"]


def encode(model: object, family: str) -> None:
    arrays, tokens = picture(family, 1)
    given = {name: mx.array(value) for name, value in arrays.items()}
    ids = mx.array([tokens])
    out = model.get_input_embeddings(  # type: ignore[attr-defined]
        ids, given.pop("pixel_values"), mask=mx.ones(ids.shape, dtype=mx.int32), **given
    )
    mx.eval(out.inputs_embeds)
    if family == "gemma4-audio":
        audio = mx.zeros((1, 20, 128))
        encoded = model.get_input_embeddings(mx.array([[AUDIO] * 5]), input_features=audio)  # type: ignore[attr-defined]
        mx.eval(encoded.inputs_embeds)


@pytest.mark.parametrize("family", some(FAMILIES, ["qwen3_vl", "gemma4-audio"]))
def test_a_naive_server_breaks_on_this_machine(
    family: str, vision_model: Callable[[str], Path], two_threads: tuple[Run, Run]
) -> None:
    """A tower loaded on one thread and run on another: MLX raises, unless all of it was evaluated."""
    folder = vision_model(family)
    loader, runner = two_threads
    lazy = loader(lambda: load_vision(folder)[0])
    with pytest.raises(RuntimeError, match="no Stream"):
        runner(lambda: encode(lazy, family))

    def load() -> object:
        model, _ = load_vision(folder)
        evaluate_all(model)
        return model

    evaluated = loader(load)
    runner(lambda: encode(evaluated, family))


@pytest.mark.parametrize("family", some(FAMILIES, ["qwen3_vl", "gemma4-audio"]))
def test_images_are_encoded_on_the_thread_that_loaded_the_model(
    family: str, vision_model: Callable[[str], Path]
) -> None:
    threads: dict[str, set[int]] = {}
    before = threading.active_count()
    with engine(lambda: Witness(vision_model(family), threads)) as driver:
        outputs = driver.run(*(Case(family, n, [n] * (n % 2), words=3, count=4).submit(n) for n in range(4)))
    assert all(len(output) == 4 for output in outputs)
    assert set(threads) == {"make", "background_task", "load", "step", "memory_bytes", "close"}
    assert len(set().union(*threads.values())) == 1
    assert threading.get_ident() not in threads["load"]
    assert threading.active_count() == before, "the owner thread is still there"


def test_closed_engines_leave_no_threads_and_no_memory(vision_model: Callable[[str], Path]) -> None:
    folder = vision_model("qwen3_vl")
    outputs = set()
    gc.collect()
    threads, memory = threading.active_count(), mx.get_active_memory()
    for _ in range(4):
        with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4))) as driver:
            outputs.add(tuple(driver.run(Case("qwen3_vl", 1, [1, 2], words=3, count=6).submit(1))[0]))
    assert len(outputs) == 1
    assert threading.active_count() == threads
    gc.collect()
    assert mx.get_active_memory() - memory < 2**18
