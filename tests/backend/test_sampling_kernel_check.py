"""A load relies on the sampling kernel only if it draws what the reference draws."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from millstream.backend.generation.sampling.kernel_check import ROWS, kernel_agrees
from millstream.backend.generation.sampling.sampler import Sampler
from millstream.backend.kernels import sample

Drawn = tuple[mx.array, mx.array]


def right(logits: mx.array, settings: mx.array, seeds: mx.array, positions: mx.array, letter: object = None) -> Drawn:
    assert logits.dtype == mx.bfloat16
    return Sampler(ROWS)(logits, positions), positions + 1


def one_wrong(logits: mx.array, settings: mx.array, seeds: mx.array, positions: mx.array, letter: object) -> Drawn:
    tokens, following = right(logits, settings, seeds, positions)
    return mx.where(positions == 3, tokens + 1, tokens), following


def stays(logits: mx.array, settings: mx.array, seeds: mx.array, positions: mx.array, letter: object) -> Drawn:
    return right(logits, settings, seeds, positions)[0], positions


def broken(*arguments: object) -> Drawn:
    raise RuntimeError("does not compile")


@pytest.mark.parametrize(("kernel", "agrees"), [(right, True), (one_wrong, False), (stays, False), (broken, False)])
def test_a_kernel_that_draws_other_tokens_is_not_used(
    kernel: Callable[..., Drawn], agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "sample", kernel)
    model = nn.Linear(4, 4)
    model.set_dtype(mx.bfloat16)
    assert kernel_agrees(model) is agrees
