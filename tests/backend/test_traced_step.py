"""A decode step as a compiled function of arrays gives what the step itself gives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from millstream.backend.generation import compiled_step
from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.batch import Batch
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.kernels.compiled import compile_ahead
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from support.tiny import VOCAB


def batch_of(model: Any, layout: Layout, lengths: list[int]) -> Batch:
    batch, prefiller = Assembly(model, VOCAB).make(layout, PrefixStore())
    submits = [
        Generate(number, tuple((7 * number + each) % VOCAB for each in range(length)), 9)
        for number, length in enumerate(lengths)
    ]
    mx.eval(prefiller.prefill([Prefill(submit, 0, len(submit.prompt) - 1) for submit in submits]))
    batch.join(*prefiller.take([submit.request_id for submit in submits]))
    return batch


def traced_forward(model: Any, batch: Batch) -> mx.array:
    """A step of a batch as one compiled function."""
    caches: Any = batch._caches
    caches.begin_step()
    assert caches.step_key() is not None
    arrays = caches.step_arrays()

    def step(tokens: mx.array, given: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        caches.bind(given)
        return model(tokens[:, None], cache=caches.layers)[:, -1, :], caches.results()

    logits, results = mx.compile(step)(batch._inputs, arrays)
    caches.commit(results)
    caches.end_step()
    batch._launches += 1
    return logits


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_a_compiled_step_gives_what_a_step_gives(family: str, tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(tiny_model(family))
    adopt_attention(model, attention)
    layout = Layout(caches="classes" if family == "llama" else "mixed", attention="mlx-lm")
    plain, traced = (batch_of(model, layout, [3, 9, 40, 300]) for _ in range(2))
    for _ in range(4):
        expected, found = plain.forward(), traced_forward(model, traced)
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)
        tokens = [batch.launch(logits).read(batch.ids) for batch, logits in ((plain, expected), (traced, found))]
        assert tokens[0] == tokens[1]
    plain.drop({1})
    traced.drop({1})
    np.testing.assert_allclose(np.array(traced_forward(model, traced)), np.array(plain.forward()), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_a_rehearsed_step_gives_what_a_step_gives(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a step are compiled before it is traced, by a run whose results are dropped."""
    rehearsed: list[None] = []

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        rehearsed.append(None)
        with compile_ahead():
            yield

    monkeypatch.setattr(compiled_step, "keeps_kernels", lambda: True)
    monkeypatch.setattr(compiled_step, "compile_ahead", counted)
    model, _ = load_model(tiny_model(family))
    adopt_attention(model, attention)
    layout = Layout(caches="classes" if family == "llama" else "mixed", attention="mlx-lm")
    plain = batch_of(model, layout, [3, 9, 40, 300])
    compiled = batch_of(model, dataclasses.replace(layout, compiled_step=True), [3, 9, 40, 300])
    for _ in range(4):
        expected, found = plain.forward(), compiled.forward()
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)
        tokens = [batch.launch(logits).read(batch.ids) for batch, logits in ((plain, expected), (compiled, found))]
        assert tokens[0] == tokens[1]
    assert rehearsed
