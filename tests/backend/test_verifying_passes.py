"""Passes of several tokens per row, of which each row keeps its own count: what it does not keep is never seen again.

For every kind of KV cache, with MLX's operations and with the kernels' way of doing it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support.pointer_kernels import PointerKernels
from support.rare import RARE, write_rare
from support.tiers import some
from support.tiny import BATCHABLE
from support.verifying import VerifiedRows, text

LENGTHS = (1, 2, 3, 5, 9, 17)
RARELY = ("gemma4_text", "gpt_oss", "jamba", "nemotron_h", "qwen3_next")


def churn(rows: VerifiedRows, seed: int, steps: int, longest: int = 17) -> None:
    """Random lengths and counts; rows join and leave."""
    draw = random.Random(seed)
    lengths = [length for length in LENGTHS if length <= longest]
    texts = {name: text(name, draw.choice([60, 120, 340])) for name in range(1, 7)}
    prompts = {name: draw.choice([1, 2, 9, 30]) if len(tokens) < 300 else 240 for name, tokens in texts.items()}
    waiting = list(texts)
    for _ in range(steps):
        while waiting and (len(rows.lengths) < 3 or draw.random() < 0.1):
            count = min(len(waiting), draw.choice([1, 1, 2]))
            joining, waiting = waiting[:count], waiting[count:]
            rows.join({name: (texts[name], prompts[name]) for name in joining})
        if ended := {name for name in rows.lengths if rows.room(name) < longest or draw.random() < 0.02}:
            rows.drop(ended)
        if not rows.lengths:
            continue
        length = draw.choice(lengths)
        rows.step(length, {name: draw.randint(1, length) for name in rows.lengths})


@pytest.mark.parametrize(
    ("family", "like_gpu"),
    some(
        [(family, like_gpu) for family in (*BATCHABLE, *RARELY) for like_gpu in (False, True)],
        [
            ("llama", True),
            ("gemma3_text", False),
            ("gemma3_text", True),
            ("lfm2", True),
            ("mamba2", False),
            ("qwen3_next", True),
        ],
    ),
)
def test_rows_keep_their_own_counts(
    family: str, like_gpu: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_rare(tmp_path / family, family) if family in RARE else tiny_model(family)
    rows = VerifiedRows(folder, like_gpu=like_gpu)
    assert rows.layout.no_drafts is None and rows.caches.supports_length
    churn(rows, 1, 60)


@pytest.mark.parametrize("family", some(["llama", "gemma3_text", "qwen3_moe"], ["llama", "gemma3_text"]))
def test_rows_keep_their_own_counts_with_kernels(
    family: str, kernels: PointerKernels, tiny_model: Callable[[str], Path]
) -> None:
    rows = VerifiedRows(tiny_model(family), like_gpu=True)
    assert rows.layout.in_place and rows.caches.supports_length
    churn(rows, 2, 40)
    assert {"decode", "parted decode"} & set(kernels.calls)
