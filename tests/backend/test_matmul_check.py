"""What a load may choose is compared with MLX's numbers: kernels with a fault, in their own source, must be found."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.generation.layers import block_check, block_search, fused_experts
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layers.fused_blocks import fuse_blocks
from millstream.backend.kernels import epilogues, matmul_tilings, matmul_tuning, norm_add, packed_groups, small_matmul
from millstream.backend.kernels.matmul_tilings import MOST_ROWS, WIDTHS, Tiling
from millstream.backend.kernels.small_matmul import Kind
from millstream.backend.kernels.weights import Norm, Packed, Weight
from millstream.backend.layers import matmul_check, matmul_reference, packed_products
from millstream.backend.layers.fused_matmul import BY_KERNELS, Call, calls_of
from millstream.backend.layers.matmul_check import Way, check_calls, ways_of
from millstream.backend.layers.projections import fuse_projections
from support.block_families import make, settings
from support.cuda_on_host import missing_compiler
from support.matmul_kernels import play_matmul, play_matmul_kernels
from support.matmul_on_host import run_on_host

on_host = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
on_cuda = pytest.mark.skipif(
    current_device().kind != "cuda", reason="compiles CUDA kernels: needs MLX's CUDA build and an NVIDIA GPU"
)
HEAD, K = 64, 64
STEPS = (1, *WIDTHS)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_by_mlx", "_shapes", "_warpgroups", "_groups", "_steady_to", "_pass_limits"):
        monkeypatch.setattr(matmul_tuning, name, {})
    for name in ("_refused", "_refused_ends"):
        monkeypatch.setattr(matmul_tuning, name, set())
    monkeypatch.setattr(matmul_tuning, "_expected", [])
    monkeypatch.setattr(matmul_check, "_compared", set())
    monkeypatch.setattr(packed_products, "_refused", set())


@pytest.fixture
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tilings, "has_warpgroups", lambda: True)
    monkeypatch.setattr(matmul_tilings, "shared_limit", lambda: 227 * 1024)
    for module in (matmul_tilings, packed_groups):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)


def random(*shape: int, scale: float = 1.0) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(mx.bfloat16)


def norm_of(size: int) -> Norm:
    return Norm(1 + random(size, scale=0.3), 1e-5)


def run_role(role: str, weight: Weight, *, normed: bool = False, rows: int = 1) -> Any:
    """As a block calls it: with all that it can have."""
    mx.random.seed(7)
    x, named = random(rows, 1, weight.inputs), {"bias": random(weight.outputs), "norm": norm_of(weight.inputs)}
    if role == "matmul":
        return BY_KERNELS.matmul(x, weight, **named)
    if role == "matmul_add":
        return BY_KERNELS.matmul_add(x, weight, random(rows, 1, weight.outputs), bias=named["bias"], factor=0.5)
    if role == "glu":
        return BY_KERNELS.glu(x, weight, activation="gelu_tanh", **named)
    periods = 10_000.0 ** (mx.arange(0, HEAD, 2, dtype=mx.float32) / HEAD)
    norms = {"q_norm": norm_of(HEAD), "k_norm": norm_of(HEAD)} if normed else {}
    offset = mx.arange(rows).astype(mx.int32)
    groups = weight.outputs // HEAD // 4
    return BY_KERNELS.qkv_rope(x, weight, offset, periods, 2 * groups, groups, HEAD, **named, **norms)


def dense(outputs: int = 4 * HEAD, inputs: int = K) -> Weight:
    mx.random.seed(outputs)
    return small_matmul.prepare(random(outputs, inputs, scale=inputs**-0.5))


def packed(outputs: int = 4 * HEAD, inputs: int = 128) -> Packed:
    mx.random.seed(outputs)
    weight = small_matmul.prepare(Packed(*mx.quantize(random(outputs, inputs, scale=inputs**-0.5), 64, 4), 4, 64))
    assert isinstance(weight, Packed)
    return weight


Fault = Callable[[Kind, int, int], Kind]
"""From a kernel, its width and the number of rows to another one."""


def with_fault(run: Callable[..., list[mx.array]], fault: Fault) -> Callable[..., list[mx.array]]:
    def faulty(
        kind: Kind, tiling: Tiling, width: int, weight: Weight, inputs: Sequence[mx.array], *rest: Any
    ) -> list[mx.array]:
        return run(fault(kind, width, inputs[0].shape[0]), tiling, width, weight, inputs, *rest)

    return faulty


FAULTS = {
    "the norm of keys is that of queries": ("qkv_rope", True, "q_norm[d] : k_norm[d]", "q_norm[d] : q_norm[d]"),
    "keys are not turned": ("qkv_rope", False, "if (head < H + KV) {", "if (head < H) {"),
    "what a gate opens is the gate": ("glu", False, "up = sum(row, col + k + HALF)", "up = sum(row, col + k)"),
    "one number of eight has no residual": ("matmul_add", False, "float(made[k])", "(k < 7 ? float(made[k]) : 0.f)"),
    "the last column of a tile is another's": ("matmul", False, "sum(row, col + k)", "sum(row, min(col + k, BN - 2))"),
}


@on_host
@pytest.mark.parametrize(("role", "normed", "right", "wrong"), FAULTS.values(), ids=FAULTS)
@pytest.mark.usefixtures("large_gpu")
def test_a_fault_in_what_stands_after_a_product_for_32_rows_is_found(
    role: Any,
    normed: bool,
    right: str,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the kernels' own source. Steps of other numbers of rows keep the kernel; those of 32 take MLX's numbers."""

    def fault(kind: Kind, width: int, rows: int) -> Kind:
        assert right in kind.epilogue
        return dataclasses.replace(kind, epilogue=kind.epilogue.replace(right, wrong)) if width == 32 else kind

    play_matmul_kernels(monkeypatch, lambda name: None)
    monkeypatch.setattr(small_matmul, "run", with_fault(run_on_host, fault))
    weight = dense()
    check_calls(lambda: run_role(role, weight, normed=normed))
    assert [rows for rows in STEPS if matmul_tuning.refused(role, weight, rows)] == [32]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert f"our kernel for {role} of {weight.outputs}x{K}, 32 rows, differs by " in caplog.text
    assert dict(matmul_tuning.exact_passes()) == {8: MOST_ROWS, 32: 0, 64: MOST_ROWS}
    monkeypatch.setattr(small_matmul, "run", None)
    run_role(role, weight, normed=normed, rows=32)
    with matmul_tuning.as_step_of(32):
        run_role(role, weight, normed=normed, rows=64)


@on_cuda
@pytest.mark.parametrize("role", ["matmul", "matmul_add", "glu", "qkv_rope"])
@pytest.mark.parametrize("kind", [dense, packed])
@pytest.mark.parametrize("inputs", [512, 4096])
def test_kernels_on_this_device_are_right(
    role: Any, kind: Callable[[int, int], Weight], inputs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At all numbers of rows, many by our kernels too."""
    weight = kind(32 * HEAD, inputs)
    matmul_tuning.expect_rows(MOST_ROWS)
    for width in matmul_tilings.MANY_WIDTHS:
        matmul_tuning.decide((role, weight.outputs, inputs, width), False)
    for normed in (False, True) if role == "qkv_rope" else (False,):
        check_calls(functools.partial(run_role, role, weight, normed=normed))
    assert not caplog.records


@pytest.mark.parametrize("role", ["matmul", "matmul_add", "glu", "qkv_rope"])
@pytest.mark.parametrize("kind", [dense, packed])
def test_kernels_that_are_right_stay_and_are_compared_once(
    role: Any, kind: Callable[[], Weight], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    weight = kind()
    for normed in (False, True) if role == "qkv_rope" else (False,):
        launched.clear()
        assert [call.name for call in check_calls(functools.partial(run_role, role, weight, normed=normed))] == [role]
        assert launched.count(role) >= len(STEPS) + len(WIDTHS), "another form is compared again"
        launched.clear()
        check_calls(functools.partial(run_role, role, weight, normed=normed))
        assert not launched
    assert not caplog.records
    assert not any(matmul_tuning.refused(role, weight, rows) for rows in STEPS)
    assert dict(matmul_tuning.exact_passes()) == dict.fromkeys(WIDTHS, MOST_ROWS)


def test_other_forms_of_a_call_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    play_matmul_kernels(monkeypatch, launched.append)
    weight, x = dense(), random(1, 1, K)
    for named in ({}, {"bias": random(weight.outputs)}, {"norm": norm_of(K)}, {"norm": Norm(norm_of(K).weight, 0.1)}):
        launched.clear()
        check_calls(functools.partial(BY_KERNELS.matmul, x, weight, **named))
        assert launched
    launched.clear()
    check_calls(lambda: BY_KERNELS.matmul(x, small_matmul.as_weight(weight.arrays[0])))
    assert launched, "blocks that share no tile are other blocks"


@pytest.mark.parametrize("trouble", ["wrong", "not a number", "broken", "one number"])
def test_whatever_is_wrong_is_refused(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(kind: Kind, tiling: Tiling, width: int, *rest: Any) -> list[mx.array]:
        (out,) = play_matmul(kind, tiling, width, *rest)
        if width != 64:
            return [out]
        if trouble == "broken":
            raise RuntimeError("cannot be launched")
        if trouble == "one number":
            out[3, 0, 5] = out[3, 0, 5] + 1
            return [out]
        return [out * (1.05 if trouble == "wrong" else float("nan"))]

    monkeypatch.setattr(small_matmul, "run", run)
    weight = dense()
    check_calls(lambda: run_role("matmul", weight))
    assert [rows for rows in STEPS if matmul_tuning.refused("matmul", weight, rows)] == [64]
    assert ("cannot be launched" in caplog.text) == (trouble == "broken")


def test_a_pass_that_is_wrong_is_not_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A fault that bands after the first one show: steps of so many rows keep their kernel."""

    def run(kind: Kind, tiling: Tiling, width: int, weight: Weight, inputs: Sequence[mx.array], *rest: Any) -> Any:
        (out,) = play_matmul(kind, tiling, width, weight, inputs, *rest)
        return [out + (inputs[0].shape[0] > width)]

    monkeypatch.setattr(small_matmul, "run", run)
    weight = dense()
    check_calls(lambda: run_role("glu", weight))
    assert not any(matmul_tuning.refused("glu", weight, rows) for rows in STEPS)
    assert dict(matmul_tuning.exact_passes()) == dict.fromkeys(WIDTHS, WIDTHS[-1])
    assert "256 rows for a step of 8, differs" in caplog.text


@pytest.mark.usefixtures("large_gpu")
def test_many_rows_fall_back_to_what_mlx_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First with our kernel for what stands after the product; without it if that is wrong too."""
    play_matmul_kernels(monkeypatch, lambda name: None)
    weight = dense()
    matmul_tuning.expect_rows(MOST_ROWS)
    for width in matmul_tilings.MANY_WIDTHS:
        matmul_tuning.decide(("qkv_rope", weight.outputs, K, width), False)

    def run(kind: Kind, tiling: Tiling, width: int, weight: Weight, inputs: Sequence[mx.array], *rest: Any) -> Any:
        made = play_matmul(kind, tiling, width, weight, inputs, *rest)
        return [each * 2 for each in made] if inputs[0].shape[0] == 192 else made

    monkeypatch.setattr(small_matmul, "run", run)
    check_calls(lambda: run_role("qkv_rope", weight))
    many = (128, 192, 256)
    assert [matmul_tuning.refused("qkv_rope", weight, rows) for rows in many] == [False, True, True]
    assert matmul_tuning.takes_end("qkv_rope") and matmul_tuning.takes_end("glu")
    right = epilogues.heads_of
    monkeypatch.setattr(epilogues, "heads_of", lambda *given, **named: (*right(*given, **named)[:2], mx.zeros((1,))))
    check_calls(lambda: run_role("qkv_rope", weight, normed=True))
    assert not matmul_tuning.takes_end("qkv_rope") and matmul_tuning.takes_end("glu")
    assert "MLX computes what stands after products" in caplog.text


def test_a_wrong_end_of_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no step has so many rows."""
    play_matmul_kernels(monkeypatch, lambda name: None)
    monkeypatch.setattr(epilogues, "gated", lambda joined, activation: matmul_reference.gated(joined, "silu"))
    check_calls(lambda: run_role("glu", dense()))
    assert not matmul_tuning.takes_end("glu") and matmul_tuning.takes_end("qkv_rope")


def test_a_wrong_sum_of_a_norm_and_a_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    play_matmul_kernels(monkeypatch, lambda name: None)
    right = norm_add.norm_add
    x, after = random(1, 1, K), norm_of(K)
    check_calls(lambda: BY_KERNELS.norm_add(x, norm_of(K), x))
    assert matmul_tuning.takes_end("norm_add")

    def wrong(x: mx.array, *given: Any, **named: Any) -> Any:
        made: Any = right(x, *given, **named)
        return (made[0], made[1] * (2 if x.shape[0] == 64 else 1))

    monkeypatch.setattr(norm_add, "norm_add", wrong)
    check_calls(lambda: BY_KERNELS.norm_add(x, norm_of(K), x, after=after))
    assert not matmul_tuning.takes_end("norm_add")
    made = BY_KERNELS.norm_add(mx.ones((64, 1, K), dtype=mx.bfloat16), after, mx.ones((64, 1, K)), after=after)
    assert mx.array_equal(made[1][0], made[1][1]).item()


@pytest.mark.usefixtures("large_gpu")
def test_a_packed_weight_falls_back_step_by_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups of warps, then bands, then MLX's operations after our product, then no kernel of ours."""
    wrong, launching = {"groups"}, [True]

    def run(kind: Kind, tiling: Tiling, *rest: Any) -> list[mx.array]:
        launching[0] = False  # what plays a kernel has none
        made = play_matmul(kind, tiling, *rest)
        launching[0] = True
        bad = tiling.body in wrong or kind.name in wrong
        return [each * 2 for each in made] if bad else made

    monkeypatch.setattr(small_matmul, "run", run)
    monkeypatch.setattr(packed_products, "_on_supported_gpu", lambda: launching[0])
    monkeypatch.setattr(packed_products, "unpacked", packed_products.unpacked_by_mlx)
    monkeypatch.setattr(packed_products, "_kernel_of", packed_products._kernel_of.__wrapped__)  # faults come and go
    monkeypatch.setattr(epilogues, "gated", matmul_reference.gated)
    weight = packed()
    size = matmul_tuning.size_of(weight)

    def state() -> tuple[bool, bool, bool]:
        for width in WIDTHS[1:]:
            matmul_tuning.decide_groups(size, width, True)
        monkeypatch.setattr(matmul_check, "_compared", set())
        check_calls(lambda: run_role("glu", weight))
        grouped = matmul_tuning.in_groups(weight, 32)
        return grouped, matmul_tuning.refused("glu", weight, 32), packed_products.is_refused(weight)

    assert state() == (False, False, False)
    wrong.add("bands")
    assert state() == (False, True, True), "the plain product takes bands as well"
    monkeypatch.setattr(packed_products, "_refused", set())
    monkeypatch.setattr(matmul_tuning, "_refused", set())
    wrong.clear()
    wrong.add("glu")
    assert state() == (False, True, False), "only what stands after the product is wrong"
    assert "MLX multiplies with the packed weight" in caplog.text


def test_the_ways_of_a_call() -> None:
    calls: list[Call] = calls_of(lambda: (run_role("matmul", dense()), run_role("qkv_rope", packed())))
    steps, passes = [Way(rows) for rows in STEPS], [Way(MOST_ROWS, step) for step in WIDTHS]
    assert ways_of(calls[0]) == [*steps, *passes]
    assert set(ways_of(calls[1])) == {
        *steps,
        *passes,
        *(Way(32, 8), Way(64, 8), Way(64, 32)),
        Way(MOST_ROWS, ends=True),
    }
    matmul_tuning.expect_rows(200)
    assert ways_of(calls[0])[: len(STEPS) + 3] == [*steps, Way(128), Way(192), Way(256)]


def test_noted_calls_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_matmul, "run", None)
    weight = dense()
    shapes = []
    for role in ("matmul", "matmul_add", "glu", "qkv_rope"):
        calls_of(lambda: shapes.append(run_role(role, weight, rows=3)))  # noqa: B023
    queries, keys, values = shapes.pop()
    assert [each.shape for each in shapes] == [(3, 1, 256), (3, 1, 256), (3, 1, 128)]
    assert (queries.shape, keys.shape, values.shape) == ((3, 2, 1, HEAD), (3, 1, 1, HEAD), (3, 1, 1, HEAD))


GLU, HEADS, ADD = ("glu", "activation", "norm"), ("qkv_rope", "norm"), ("matmul_add",)
NORMED_HEADS = ("qkv_rope", "k_norm", "norm", "q_norm")
MADE: dict[str, set[tuple[tuple[str, ...], ...]]] = {
    "llama": {(HEADS, ADD), (GLU, ADD)},
    "gemma3_text": {(NORMED_HEADS, ("matmul",), ("norm_add",)), (GLU, ("matmul",), ("norm_add",))},
    "granite": {(HEADS, (*ADD, "factor")), (GLU, (*ADD, "factor"))},
    "lfm2": {(NORMED_HEADS, ADD), (("matmul", "norm"), ADD), (GLU, ADD)},
    "nemotron": {(("qkv_rope",), ADD), (ADD,)},
    "mamba2": {(("matmul", "norm"), ADD)},
    "glm4_moe": {(NORMED_HEADS, ADD), (GLU, ADD), (("glu", "activation"), ("matmul",))},
}
"""The calls of the parts of a family's blocks, each with what it is told besides its weight."""
SIZES = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192, "moe_intermediate_size": 64}
LFM2_SIZES = {"block_dim": 128, "block_ff_dim": 192, "conv_dim": 128, "conv_dim_out": 128}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLX would have a C++ compiler make a library of what plays the kernels."""
    play_matmul_kernels(monkeypatch, lambda name: None)
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("family", MADE)
@pytest.mark.usefixtures("uncompiled")
def test_all_parts_of_a_block_have_their_calls_compared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[list[Call]] = []
    monkeypatch.setattr(block_check, "check_calls", lambda run: compared.append(calls_of(run)))
    for module in (block_search, fused_experts):  # other kernels are not played here
        for name in ("check_attention", "check_module", "check_half", "check_rows"):
            monkeypatch.setattr(module, name, lambda *given, **named: None, raising=False)
    model = make({**settings(family), **SIZES, **(LFM2_SIZES if family == "lfm2" else {})})
    model.set_dtype(mx.float16)
    adopt_attention(model, attention)
    fuse_projections(model)
    fusion = fuse_blocks(model, BY_KERNELS, attention)
    assert fusion.blocks == fusion.total

    def told(call: Call) -> tuple[str, ...]:
        return (call.name, *sorted(name for name, each in call.named.items() if each is not None and each != 1.0))

    assert {tuple(map(told, part)) for part in compared} == MADE[family]
