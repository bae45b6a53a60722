"""A changing batch gives, token for token, the output of mlx-lm's single-request generation at temperature 0."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.config import FAST_PATHS
from millstream.engine.generation.messages import Generate
from millstream.engine.messages import Cancel
from support.engines import engine
from support.rare import RARE
from support.tiers import some
from support.tiny import BATCHABLE, FAMILIES, VOCAB, write_model

Case = tuple[tuple[int, ...], int]


def cases(seed: int, count: int) -> list[Case]:
    """Prompts from one token to several windows and chunks, outputs from one token to a few dozen."""
    rng = random.Random(seed)
    lengths = [1, 1, 2, 3, 7, 8, 9, 16, 30, 60]
    return [
        (tuple(rng.randrange(VOCAB) for _ in range(rng.choice(lengths))), rng.choice([1, 2, 5, 20, 40]))
        for _ in range(count)
    ]


def reference(folder: Path, wanted: list[Case]) -> list[list[int]]:
    return list(_reference(folder, tuple(wanted)))


@functools.cache
def _reference(folder: Path, wanted: tuple[Case, ...]) -> list[list[int]]:
    model, _ = load_model(folder)
    outputs = []
    for prompt, count in wanted:
        steps = generate_step(mx.array(prompt), model, max_tokens=count)
        outputs.append([int(token) for token, _ in steps])
    return outputs


def backend(folder: Path, max_rows: int = 6, **changes: Any) -> Callable[[], MlxGenerationBackend]:
    return lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=max_rows, **changes))


ALL_OFF = frozenset(FAST_PATHS)
PATHS: dict[str, dict[str, Any]] = {
    "none": {"disabled": ALL_OFF},
    "fuse": {"disabled": ALL_OFF - {"fuse"}},
    "slots": {"disabled": ALL_OFF - {"slots"}},
    "slots as on a GPU": {"disabled": ALL_OFF - {"slots"}, "like_gpu": True},
    "all as on a GPU": {"like_gpu": True},
}


UNUSUAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": RARE["deepseek_v3"],
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changing_batch_equals_single_requests(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    wanted = cases(seed=len(family), count=20)
    expected = reference(folder, wanted)
    assert len({token for output in expected for token in output}) > 20, (
        "the model's outputs are too uniform to tell rows apart"
    )
    with engine(backend(folder)) as driver:
        assert driver.facts is not None
        assert driver.facts.max_rows == (6 if family in BATCHABLE else 1)
        submits = [Generate(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize(
    ("family", "path"),
    some(
        [(family, path) for family in BATCHABLE for path in PATHS],
        [*(("llama", path) for path in PATHS), ("qwen3_moe", "all as on a GPU"), ("gemma3_text", "slots as on a GPU")],
    ),
)
def test_every_fast_path_on_and_off_gives_the_same(family: str, path: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    wanted = cases(seed=3, count=30)
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=7, **PATHS[path]), prefill_tokens=60) as driver:
        submits = [Generate(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize("path", some(["slots", "all as on a GPU"], ["slots"]))
def test_rows_outgrow_the_columns_of_their_slots(path: str, tiny_model: Callable[[str], Path]) -> None:
    """Rows that run for longer than a buffer has columns, while short ones join and leave."""
    folder = tiny_model("llama")
    wanted: list[Case] = [((5, 6, 7), 330), ((8,), 2), ((9, 9), 300), *cases(seed=8, count=12), ((1, 2), 270)]
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=4, **PATHS[path])) as driver:
        submits = [Generate(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a model of a family that several tests read, made once."""
    root = tmp_path_factory.mktemp("models")

    def get(family: str, **changes: Any) -> Path:
        folder = root / family
        return folder if folder.exists() else write_model(folder, family, **changes)

    return get


@pytest.mark.parametrize("family", UNUSUAL)
@pytest.mark.parametrize("path", some(["none", "slots", "all as on a GPU"], ["slots", "all as on a GPU"]))
def test_layers_with_unusual_attention(family: str, path: str, model: Callable[..., Path]) -> None:
    """DeepSeek caches latent vectors and adds the scores of positions to the mask; Phi computes in float32; Gemma 2 has
    scores of five dimensions, where a mask of four would broadcast rows over heads."""
    folder = model(family, **UNUSUAL[family])
    wanted = cases(seed=3, count=12)
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=5, **PATHS[path]), prefill_tokens=60) as driver:
        alone = family == "gemma2" and path == "none"  # mlx-lm's batch caches support masks of four dimensions only
        assert driver.facts is not None and driver.facts.max_rows == (1 if alone else 5)
        submits = [Generate(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize(
    ("family", "path"),
    some(
        [("llama", "slots"), ("llama", "all as on a GPU"), ("gemma3_text", "all as on a GPU")],
        [("llama", "all as on a GPU")],
    ),
)
def test_head_sizes_that_our_kernels_support(family: str, path: str, model: Callable[..., Path]) -> None:
    """On CUDA this runs the kernels; elsewhere their MLX reference. One row is long enough to be split."""
    folder = model(family, head_dim=64, max_position_embeddings=4096)
    long: Case = (tuple(number * 7 % VOCAB for number in range(1100)), 20)
    wanted: list[Case] = [((5, 6, 7), 270), *cases(seed=8, count=6), long, *cases(seed=9, count=6)]
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=5, **PATHS[path]), prefill_tokens=200) as driver:
        submits = [Generate(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_rows_that_leave_do_not_change_the_others(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    wanted = cases(seed=5, count=12)
    expected = reference(folder, wanted)
    with engine(backend(folder)) as driver:
        for number, (prompt, count) in enumerate(wanted):
            driver.post(Generate(1000 + number, prompt[::-1], 500))
            driver.post(Generate(number, prompt, count))
            if number % 2:
                driver.post(Cancel(1000 + number))
        driver.wait(lambda: any(key < 1000 for key in driver.ends))
        for number in range(len(wanted)):
            driver.post(Cancel(1000 + number))
        driver.wait_ended(*range(len(wanted)))
        assert [driver.tokens.get(number, []) for number in range(len(wanted))] == expected


def test_a_cache_that_cannot_be_batched_is_reported_and_served_one_by_one(tiny_model: Callable[[str], Path]) -> None:
    with engine(backend(tiny_model("llama4"))) as driver:
        assert driver.facts is not None
        assert any("one request at a time" in note and "ChunkedKVCache" in note for note in driver.facts.notes)
