"""Our CUDA kernels for few-row matmuls, played by MLX on the CPU: from the very inputs and constants of a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.kernels import epilogues, matmul_source, matmul_tilings, norm_add, small_matmul
from millstream.backend.kernels.matmul_tilings import Tiling
from millstream.backend.kernels.small_matmul import Kind
from millstream.backend.kernels.weights import Norm, Packed, Weight
from millstream.backend.layers import matmul_reference

ACTIVATIONS = {source: name for name, source in matmul_source.ACTIVATED.items()}


def play_matmul(
    kind: Kind,
    tiling: Tiling,
    width: int,
    weight: Weight,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    heads: tuple[tuple[str, int], ...] = (),
) -> list[mx.array]:
    """What `small_matmul.run` gives."""
    assert tiling.shared_bytes(width) <= matmul_tilings.shared_limit() and tiling.threads <= 256
    assert tiling.split == 1 or weight.tickets is not None
    given, constants = dict(zip(kind.inputs, inputs, strict=True)), dict(kind.constants)
    bias = given.get("bias")
    norm = _norm(given, constants, "norm", "EPS")
    x, w = given["x"], weight if isinstance(weight, Packed) else given["w"]
    out: Any
    if kind.name == "matmul":
        out = matmul_reference.matmul(x, w, bias=bias, norm=norm)
    elif kind.name == "matmul_add":
        factor = _number(constants["FACTOR"])
        out = matmul_reference.matmul_add(x, w, given["r"], bias=bias, norm=norm, factor=factor)
    elif kind.name == "glu":
        activation = ACTIVATIONS[constants["ACTIVATED"]]
        out = matmul_reference.glu(x, w, activation=activation, bias=bias, norm=norm)
    else:
        sizes = dict(heads)
        out = matmul_reference.qkv_rope(
            x,
            w,
            given.get("offset", mx.zeros((x.shape[0],), dtype=mx.int32)),
            given.get("periods"),
            *(sizes[name] for name in ("H", "KV", "D")),
            bias=bias,
            norm=norm,
            q_norm=_norm(given, constants, "q_norm", "Q_EPS"),
            k_norm=_norm(given, constants, "k_norm", "K_EPS"),
        )
    outs = list(out) if isinstance(out, tuple) else [out]
    assert [each.shape for each in outs] == list(shapes)
    return outs


def _norm(given: dict[str, mx.array], constants: dict[str, str], name: str, eps: str) -> Norm | None:
    return Norm(given[name], _number(constants[eps])) if name in given else None


def _number(literal: str) -> float:
    return float(literal.removesuffix("f"))


def play_matmul_kernels(monkeypatch: pytest.MonkeyPatch, count: Callable[[str], None]) -> None:
    """Have MLX play the kernels, and count their launches by name."""

    def run(kind: Kind, *args: Any) -> list[mx.array]:
        count(kind.name)
        return play_matmul(kind, *args)

    def sum_of(*args: Any, **more: Any) -> Any:
        count("norm_add")
        return matmul_reference.norm_add(*args, **more)

    monkeypatch.setattr(small_matmul, "run", run)

    def gated(*args: Any) -> Any:
        count("gated")
        return matmul_reference.gated(*args)

    def heads_of(*args: Any, **more: Any) -> Any:
        count("heads")
        return matmul_reference.heads_of(*args, **more)

    monkeypatch.setattr(norm_add, "norm_add", sum_of)
    monkeypatch.setattr(epilogues, "gated", gated)
    monkeypatch.setattr(epilogues, "heads_of", heads_of)
