"""A decode step as a compiled function of arrays gives what the step itself gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.batch import Batch
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.prefix_store.blocks import PrefixStore
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
