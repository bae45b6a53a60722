"""What the backend does on CUDA, on a CPU that pretends to be one: kernels are played by MLX and NumPy.

It shows that the choices for CUDA fit together, which else only a GPU would show. It says nothing about the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend import mlx_backend
from millstream.backend.device import Device, current_device
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.layers import attention
from millstream.backend.generation.layout_choice import block_fusion
from millstream.backend.generation.layout_choice.fast_paths import FastPaths
from millstream.backend.generation.sampling.sampler import Sampler
from millstream.backend.kernels import matmul_tuning, sample, small_matmul
from millstream.backend.kernels.matmul_tilings import Tiling
from millstream.backend.kernels.small_matmul import Kind
from millstream.backend.layers import matmul_check
from millstream.backend.layers.capped_attention import capped_attention
from millstream.engine.generation.messages import Generate
from millstream.types import Sampling
from support.engines import engine
from support.matmul_kernels import play_matmul_kernels
from support.pointer_kernels import PointerKernels, play_pointer_kernels
from support.tiny import VOCAB, write_model

pytestmark = pytest.mark.skipif(
    current_device().kind != "cpu", reason="pretends that the CPU is a GPU: needs MLX's CPU device"
)


LEFT_OUT = frozenset({"warmup", "compiled-step"})
"""A step that NumPy computes cannot be compiled."""


class Pretended(PointerKernels):
    """The kernels, and how often each was called."""

    def prefill(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        left: Any,
        *,
        window: int = 0,
        sinks: Any = None,
        softcap: float | None = None,
        flat: bool = False,
    ) -> mx.array:
        self.count(
            "flat prefill"
            if flat
            else "windowed prefill"
            if window
            else "prefill"
            if left is None
            else "padded prefill"
        )
        count, length = queries.shape[2], keys.shape[2]
        own = mx.arange(length - count, length)[:, None]
        mask = (mx.arange(length) <= own) & (mx.arange(length) > own - (window or length))
        if left is not None:
            mask = mask & (mx.arange(length) >= (left[:, None] if flat else left[:, None, None, None]))
        if softcap is not None:
            return capped_attention(queries, keys, values, scale, mask, softcap, sinks)
        out: mx.array = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out

    def sample(
        self, logits: mx.array, settings: mx.array, seeds: mx.array, positions: mx.array, letter: object = None
    ) -> tuple[mx.array, mx.array]:
        self.count("sample")
        rows = [
            Sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=int(top_k), seed=seed)
            for (temperature, top_p, min_p, top_k), seed in zip(settings.tolist(), seeds.tolist(), strict=True)
        ]
        return Sampler(rows)(logits, positions), positions + 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    kernels = Pretended()
    monkeypatch.setattr(mlx_backend, "current_device", lambda: Device("cuda", "pretended", 2**34))
    monkeypatch.setattr(block_fusion, "supported_here", lambda: True)
    # NumPy reads arrays, which a function that is traced must not.
    monkeypatch.setattr(FastPaths, "steps_compile", False)
    play_matmul_kernels(monkeypatch, kernels.count)
    play_pointer_kernels(monkeypatch, kernels)
    monkeypatch.setattr(attention, "prefill_attention", kernels.prefill)
    monkeypatch.setattr(sample, "sample", kernels.sample)
    # MLX would have a C++ compiler make a library of what the players compute.
    mx.disable_compile()
    yield kernels
    mx.enable_compile()


def write_half(folder: Path, family: str, **changes: Any) -> Path:
    """With sizes that the kernels take. Half precision: their types are no others."""
    write_model(folder, family, **{"hidden_size": 128, "head_dim": 64, "intermediate_size": 192, **changes})
    file = str(folder / "model.safetensors")
    weights = {name: value.astype(mx.float16) for name, value in mx.load(file).items()}
    mx.save_safetensors(file, weights)
    return folder


def prompts() -> list[tuple[int, ...]]:
    return [
        tuple((seed * 11 + index * 7) % VOCAB for index in range(length)) for seed, length in enumerate((90, 3, 40))
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_gets_every_fast_path(family: str, cuda: Pretended, tmp_path: Path) -> None:
    folder = write_half(tmp_path / family, family)
    settings = GenerationSettings("folder", folder, max_rows=4, disabled=LEFT_OUT)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None
        (note,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        assert note == (
            "fast paths: fuse, slots, kernel, fused-matmul, group-prefill, calibration; not used: "
            "mkl-layout (for the CPU), packed-matmul (no packed weights), compiled-step (--disable), warmup (--disable)"
        )
        answers = driver.run(*(Generate(number, prompt, 12) for number, prompt in enumerate(prompts())))
    assert [len(answer) for answer in answers] == [12] * 3
    used = {"join_rows", "parted decode", "prefill", "flat prefill", "matmul_add", "glu", "qkv_rope"}
    assert used <= set(cuda.calls)


def test_full_attention_beside_a_sliding_window_gets_the_attention_kernels(cuda: Pretended, tmp_path: Path) -> None:
    folder = write_half(tmp_path / "gemma3_text", "gemma3_text", sliding_window=16)
    settings = GenerationSettings("folder", folder, max_rows=4, disabled=LEFT_OUT)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None
        (note,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        assert note.startswith("fast paths: fuse, slots, kernel, fused-matmul, group-prefill, calibration; not used: ")
        assert "fused blocks: 4 of 4 (4 with attention and MLP)" in driver.facts.notes
        answers = driver.run(*(Generate(number, prompt, 12) for number, prompt in enumerate(prompts())))
    assert [len(answer) for answer in answers] == [12] * 3
    assert {"join_rows", "parted decode", "prefill", "windowed prefill"} <= set(cuda.calls)


def test_a_quantised_cache_gets_the_same_kernels(cuda: Pretended, tmp_path: Path) -> None:
    folder = write_half(tmp_path / "llama", "llama")
    settings = GenerationSettings("folder", folder, max_rows=4, kv_bits=8, disabled=LEFT_OUT)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None
        (note,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        answers = driver.run(*(Generate(number, prompt, 12) for number, prompt in enumerate(prompts())))
    assert note.startswith("fast paths: fuse, slots, kernel, fused-matmul, group-prefill, calibration; not used: ")
    assert [len(answer) for answer in answers] == [12] * 3
    assert {"join_rows", "parted decode", "prefill"} <= set(cuda.calls)


def test_capped_scores_get_the_attention_kernels(cuda: Pretended, tmp_path: Path) -> None:
    folder = write_half(tmp_path / "gemma2", "gemma2", query_pre_attn_scalar=64)
    settings = GenerationSettings("folder", folder, max_rows=4, disabled=LEFT_OUT)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        answers = driver.run(*(Generate(number, prompt, 12) for number, prompt in enumerate(prompts())))
    assert [len(answer) for answer in answers] == [12] * 3
    assert {"join_rows", "parted decode", "prefill"} <= set(cuda.calls)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampling_kernel_gets_all_rows(cuda: Pretended, tmp_path: Path, temperature: float) -> None:
    folder = write_half(tmp_path / "llama", "llama")
    settings = GenerationSettings("folder", folder, max_rows=4, disabled=LEFT_OUT)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        driver.run(Generate(1, (1, 2, 3), 4, Sampling(temperature=temperature, seed=1)))
    assert cuda.calls["sample"] > 0


def test_a_kernel_that_is_wrong_for_32_rows_is_not_used(
    cuda: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks are compared with few rows, kernels with as many as there may be: a load finds it."""
    for name, value in (("_refused", set()), ("_refused_ends", set()), ("_pass_limits", {})):
        monkeypatch.setattr(matmul_tuning, name, value)
    monkeypatch.setattr(matmul_check, "_compared", set())
    right, answers = small_matmul.run, []

    def wrong(kind: Kind, tiling: Tiling, width: int, *rest: Any) -> list[mx.array]:
        made = right(kind, tiling, width, *rest)
        return [made[0], made[1] * 1.1, made[2]] if kind.name == "qkv_rope" and width == 32 else made

    monkeypatch.setattr(small_matmul, "run", wrong)
    folder = write_half(tmp_path / "qwen3", "qwen3")
    for disabled in (LEFT_OUT, LEFT_OUT | {"fused-matmul"}):
        settings = GenerationSettings("folder", folder, max_rows=12, disabled=disabled)
        with engine(lambda: MlxGenerationBackend(settings)) as driver:  # noqa: B023
            assert driver.facts is not None
            if disabled == LEFT_OUT:
                assert "fused blocks: 4 of 4 (4 with attention and MLP)" in driver.facts.notes
                assert dict(driver.facts.exact_passes) == {8: 256, 32: 0, 64: 256}
            answers.append(driver.run(*(Generate(number, (number, 2, 3), 5) for number in range(12))))
    assert answers[0] == answers[1]
    (warning,) = [record.getMessage() for record in caplog.records if "our kernel" in record.getMessage()]
    assert warning.startswith("our kernel for qkv_rope of ") and "32 rows, differs by " in warning


def test_layers_that_do_not_fit_leave_the_width_to_cublas(cuda: Pretended, tmp_path: Path) -> None:
    """Sizes that are no multiple of a tile: the kernels take no weight at all."""
    folder = write_half(tmp_path / "odd", "llama", hidden_size=144, head_dim=68, intermediate_size=200)
    settings = GenerationSettings("folder", folder, max_rows=4, disabled=LEFT_OUT)
    with engine(lambda: MlxGenerationBackend(settings)) as driver:
        assert driver.facts is not None
        (note,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        driver.run(Generate(1, (1, 2, 3), 4))
    assert "fused-matmul (layer 0 has nothing to fuse: self_attn has projections that the matmuls do not take)" in note
