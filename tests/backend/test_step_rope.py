"""RoPE of a decode step on a CPU: the numbers of mlx-lm's modules, and which of them are replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from millstream.backend.device import current_device
from millstream.backend.generation.layers.block_parts import read_rope
from millstream.backend.generation.layers.step_rope import use_step_rope
from millstream.backend.generation.layout_choice.chooser import LayoutChooser
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.weights.loading import load
from support.ropes import LLAMA3, YARN, Holder

LONG = {
    "type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + each / 4 for each in range(8)],
}
OFFSETS = (0, 7, mx.array([0, 3, 1000, 17, 90_000], dtype=mx.int32), mx.array(9), mx.array([12]))


class LyingRope(nn.RoPE):  # type: ignore[misc]
    """Rotates by other angles than its attributes say."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return super().__call__(x, offset + 1)


@pytest.mark.parametrize(
    ("rope", "width"),
    [
        (nn.RoPE(64), 64),
        (nn.RoPE(16), 64),
        (nn.RoPE(64, base=500_000.0, scale=0.25), 64),
        (nn.RoPE(8, traditional=True), 8),
        (nn.RoPE(8, traditional=True, scale=0.5), 20),
        (initialize_rope(16, 1e4, False, LLAMA3, 512), 16),
        (initialize_rope(16, 1e4, True, YARN, 512), 16),
        (initialize_rope(16, 1e4, False, YARN, 512), 24),
        (initialize_rope(16, 1e4, False, LONG, 512), 16),
    ],
)
def test_a_step_gets_the_numbers_of_the_module(rope: Any, width: int) -> None:
    x = mx.random.normal((5, 3, 1, width), key=mx.random.key(1))
    heads_last = mx.random.normal((5, 1, 3, width), key=mx.random.key(2)).swapaxes(1, 2)
    inputs = [(each, offset) for each in (x, heads_last) for offset in OFFSETS]
    expected = [rope(each * 1, offset=offset) for each, offset in inputs]  # some write to their input
    mx.eval(expected)
    assert use_step_rope(Holder(rope)) == 1
    for (each, offset), wanted in zip(inputs, expected, strict=True):
        got = rope(each * 1, offset=offset)
        assert got.shape == wanted.shape and got.dtype == mx.float32
        assert mx.allclose(got, wanted, rtol=1e-6, atol=2e-6).item(), mx.abs(got - wanted).max().item()


def test_what_is_no_step_is_left_to_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = nn.RoPE(16)
    use_step_rope(Holder(rope))
    asked: list[tuple[int, ...]] = []
    plain = nn.RoPE.__call__
    monkeypatch.setattr(
        nn.RoPE, "__call__", lambda self, x, offset=0: (asked.append(x.shape), plain(self, x, offset))[1]
    )
    rope(mx.zeros((2, 4, 3, 16)), offset=5)
    rope(mx.zeros((2, 4, 1, 16), dtype=mx.bfloat16), offset=5)
    assert asked == [(2, 4, 3, 16), (2, 4, 1, 16)]
    rope(mx.zeros((2, 4, 1, 16)), offset=5)
    assert len(asked) == 2


def test_modules_that_are_not_understood_stay() -> None:
    holder = Holder(nn.RoPE(16), LyingRope(16), nn.Linear(4, 4))
    kinds = [type(each) for each in holder.ropes]
    assert use_step_rope(holder) == 1
    assert [type(each) is kind for each, kind in zip(holder.ropes, kinds, strict=True)] == [False, True, True]
    assert read_rope(holder.ropes[0]) is not None and not holder.ropes[0].parameters(), "it is still a rotary embedding"


@pytest.mark.skipif(current_device().kind != "cpu", reason="GPUs have an operation for it: needs MLX's CPU device")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("like_gpu", [False, True])
def test_models_on_a_cpu_get_it(family: str, like_gpu: bool, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    model = load("folder", folder, current_device(), unpack=True).model
    settings = GenerationSettings("folder", folder, max_rows=4, like_gpu=like_gpu)
    LayoutChooser(settings, current_device(), model, takes_media=False).shape_layers()
    ropes = [module for _, module in model.named_modules() if read_rope(module) is not None]
    assert ropes
    assert [hasattr(rope, "_step_rope") for rope in ropes] == [not like_gpu] * len(ropes)
