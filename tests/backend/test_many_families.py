"""Families of mlx-lm that no other test covers: a small random model of each gives the same output batched and alone.

With the layout of this device and with that of a GPU; with `--whole` more families.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import Generate
from support import block_families
from support.engines import engine
from support.tiny import VOCAB, write_model

SETTINGS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "hidden_act": "silu",
    "bias": True,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "n_head": 4,
    "n_embd": 64,
    "n_layer": 2,
    "n_ctx": 512,
    "n_positions": 512,
}
"""Settings that some family needs; the others ignore them."""
SOME = ("cohere", "gemma2", "glm4_moe", "gpt2", "olmo2", "phi3", "smollm3")
MORE = (
    "gemma",
    "granite",
    "qwen3",
    "qwen2",
    "starcoder2",
    "ernie4_5",
    "glm",
    "glm4",
    "helium",
    "internlm2",
    "internlm3",
    "mimo",
    "mixtral",
    "nemotron",
    "phimoe",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("family", [*SOME, *MORE] if metafunc.config.getoption("--whole") else SOME)


def test_batched_equals_alone(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / family, family, **{**SETTINGS, **block_families.SETTINGS.get(family, {})})
    draw = random.Random(family)
    wanted = [
        (tuple(draw.randrange(VOCAB) for _ in range(draw.choice([1, 2, 3, 8, 20, 70]))), draw.choice([1, 5, 12]))
        for _ in range(10)
    ]
    model, _ = load_model(folder)
    expected = [[int(token) for token, _ in generate_step(mx.array(p), model, max_tokens=n)] for p, n in wanted]
    submits = [Generate(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
    for like_gpu in (False, True):
        settings = GenerationSettings("folder", folder, max_rows=4, like_gpu=like_gpu)
        with engine(lambda settings=settings: MlxGenerationBackend(settings), prefill_tokens=64) as driver:
            assert driver.facts is not None and driver.facts.max_rows == 4
            assert driver.run(*submits) == expected, "GPU layout" if like_gpu else "default layout"
