"""A churning batch gives, token for token, what mlx-lm's own single-request generation gives at temperature 0."""

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
from millstream.engine.messages import Cancel, Submit
from support.engines import engine
from support.rare import RARE
from support.tiers import some
from support.tiny import BATCHABLE, FAMILIES, VOCAB, write_model

Case = tuple[tuple[int, ...], int]


def cases(seed: int, count: int) -> list[Case]:
    """Prompts from one token to several windows and chunks long, answers from one token to a few dozen."""
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
    answers = []
    for prompt, count in wanted:
        steps = generate_step(mx.array(prompt), model, max_tokens=count)
        answers.append([int(token) for token, _ in steps])
    return answers


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


OTHERWISE: dict[str, dict[str, Any]] = {
    "deepseek_v3": RARE["deepseek_v3"],
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_churning_batch_equals_single_requests(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    wanted = cases(seed=len(family), count=20)
    expected = reference(folder, wanted)
    assert len({token for answer in expected for token in answer}) > 20, "the model says too little to tell rows apart"
    with engine(backend(folder)) as driver:
        assert driver.facts is not None
        assert driver.facts.max_rows == (6 if family in BATCHABLE else 1)
        submits = [Submit(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize(
    ("family", "path"),
    some(
        [(family, path) for family in ("llama", "qwen3_moe", "gemma3_text") for path in PATHS],
        [*(("llama", path) for path in PATHS), ("qwen3_moe", "all as on a GPU"), ("gemma3_text", "slots as on a GPU")],
    ),
)
def test_every_fast_path_on_and_off_gives_the_same(family: str, path: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    wanted = cases(seed=3, count=30)
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=7, **PATHS[path]), prefill_tokens=60) as driver:
        submits = [Submit(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize("path", some(["slots", "all as on a GPU"], ["slots"]))
def test_slots_outlast_their_columns(path: str, tiny_model: Callable[[str], Path]) -> None:
    """Rows that run for longer than a buffer has columns, while short ones come and go beside them."""
    folder = tiny_model("llama")
    wanted: list[Case] = [((5, 6, 7), 330), ((8,), 2), ((9, 9), 300), *cases(seed=8, count=12), ((1, 2), 270)]
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=4, **PATHS[path])) as driver:
        submits = [Submit(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a model of a family that several tests read, made once."""
    root = tmp_path_factory.mktemp("models")

    def get(family: str, **changes: Any) -> Path:
        folder = root / family
        return folder if folder.exists() else write_model(folder, family, **changes)

    return get


@pytest.mark.parametrize("family", OTHERWISE)
@pytest.mark.parametrize("path", some(["none", "slots", "all as on a GPU"], ["slots", "all as on a GPU"]))
def test_layers_that_make_something_else_of_keys(family: str, path: str, model: Callable[..., Path]) -> None:
    """DeepSeek's keep latent vectors and put the scores of positions into the mask; Phi's compute in float32; Gemma 2's
    have scores of five dimensions, where a mask of four has the rows in the place of the heads."""
    folder = model(family, **OTHERWISE[family])
    wanted = cases(seed=3, count=12)
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=5, **PATHS[path]), prefill_tokens=60) as driver:
        alone = family == "gemma2" and path == "none"  # mlx-lm's own batch caches know masks of four dimensions only
        assert driver.facts is not None and driver.facts.max_rows == (1 if alone else 5)
        submits = [Submit(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize("path", some(["slots", "all as on a GPU"], ["all as on a GPU"]))
def test_heads_of_the_size_that_our_kernels_take(path: str, model: Callable[..., Path]) -> None:
    """On CUDA this runs the kernels; elsewhere what they stand for. One row is long enough to be computed in parts."""
    folder = model("llama", head_dim=64, max_position_embeddings=4096)
    long: Case = (tuple(number * 7 % VOCAB for number in range(1100)), 20)
    wanted: list[Case] = [((5, 6, 7), 270), *cases(seed=8, count=6), long, *cases(seed=9, count=6)]
    expected = reference(folder, wanted)
    with engine(backend(folder, max_rows=5, **PATHS[path]), prefill_tokens=200) as driver:
        submits = [Submit(number, prompt, count) for number, (prompt, count) in enumerate(wanted)]
        assert driver.run(*submits) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_rows_that_leave_do_not_change_the_others(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    wanted = cases(seed=5, count=12)
    expected = reference(folder, wanted)
    with engine(backend(folder)) as driver:
        for number, (prompt, count) in enumerate(wanted):
            driver.post(Submit(1000 + number, prompt[::-1], 500))
            driver.post(Submit(number, prompt, count))
            if number % 2:
                driver.post(Cancel(1000 + number))
        driver.wait(lambda: any(key < 1000 for key in driver.ends))
        for number in range(len(wanted)):
            driver.post(Cancel(1000 + number))
        driver.wait_ended(*range(len(wanted)))
        assert [driver.tokens.get(number, []) for number in range(len(wanted))] == expected


def test_a_cache_that_cannot_batch_says_so_and_serves_one_by_one(tiny_model: Callable[[str], Path]) -> None:
    with engine(backend(tiny_model("llama4"))) as driver:
        assert driver.facts is not None
        assert any("one request at a time" in note and "ChunkedKVCache" in note for note in driver.facts.notes)
