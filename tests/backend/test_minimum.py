"""Minimum output lengths: stop tokens are not sampled before them, and other rows do not notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import Generate, Generated
from millstream.types import FinishReason, Sampling
from support.engines import engine
from support.tiny import VOCAB

PROMPT = (5, 6, 7)
LENGTH = 24


def without_stops(folder: Path, stops: set[int], least: int) -> list[int]:
    """What mlx-lm generates if these tokens are forbidden in the first steps, up to the first of them after that."""
    model, _ = load_model(folder)
    steps = 0

    def forbid(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal steps
        steps += 1
        if steps <= least:
            logits[:, mx.array(sorted(stops))] = -float("inf")
        return logits

    output: list[int] = []
    for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=LENGTH, logits_processors=[forbid]):
        if int(token) in stops:
            break
        output.append(int(token))
    return output


def backend(folder: Path) -> Callable[[], MlxGenerationBackend]:
    return lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=6))


@pytest.mark.parametrize("least", [1, 4, 9])
def test_greedy_rows_equal_mlx_lm_with_forbidden_tokens(least: int, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    free = without_stops(folder, set(), 0)
    stops = frozenset({free[0], free[2], VOCAB + 5})  # one that the model has no logit for
    expected = without_stops(folder, stops - {VOCAB + 5}, least)
    with engine(backend(folder)) as driver:
        submits = [
            Generate(1, PROMPT, LENGTH, stop_tokens=stops, min_tokens=least),
            Generate(2, PROMPT, LENGTH, stop_tokens=stops),
            Generate(3, PROMPT, LENGTH),
        ]
        bounded, unbounded, other = driver.run(*submits)
    assert unbounded == [] and other == free
    assert bounded == expected and len(bounded) >= least


def test_sampled_rows_have_their_minimum_and_may_end_after_it(tiny_model: Callable[[str], Path]) -> None:
    """Half of the vocabulary ends the output, so rows end at once unless they must not."""
    stops = frozenset(range(0, VOCAB, 2))
    with engine(backend(tiny_model("llama"))) as driver:
        submits = [
            Generate(seed, PROMPT, LENGTH, Sampling(temperature=1.0, seed=seed), stop_tokens=stops, min_tokens=seed % 9)
            for seed in range(1, 40)
        ]
        outputs = driver.run(*submits)
        ends = [driver.ends[submit.request_id][0] for submit in submits]
    for submit, tokens, end in zip(submits, outputs, ends, strict=True):
        assert isinstance(end, Generated) and end.reason is FinishReason.STOP
        assert len(tokens) >= submit.min_tokens and not stops & set(tokens)
    assert any(len(tokens) == submit.min_tokens for submit, tokens in zip(submits, outputs, strict=True))
