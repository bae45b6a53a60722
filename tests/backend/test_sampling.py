"""The vectorised sampler against the definition of each setting, and the reproducibility of each row."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.backend.generation.sampling.logprobs import RowLogprobs
from millstream.backend.generation.sampling.penalties import Penalties
from millstream.backend.generation.sampling.sampler import Sampler, _descending, _softmax
from millstream.backend.kernels import sample as sample_kernel
from millstream.types import LEAST_TEMPERATURE, Sampling
from support.tiers import examples

VOCAB = 40
LARGE = 9_000
"""On a CPU: one row is sorted by MLX, two are by NumPy, and the softmax is ours."""


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32))


def sample(row: Sampling, values: mx.array, positions: range) -> list[int]:
    """Many samples of one row: the same logits at many positions."""
    count = len(positions)
    sampler = Sampler([row] * count)
    values = mx.broadcast_to(values, (count, values.shape[-1]))
    return sampler(values, mx.array(list(positions))).tolist()  # type: ignore[return-value]


def allowed(row: Sampling, values: np.ndarray) -> set[int]:
    """The tokens that top-k, top-p and min-p allow by definition, computed in float64."""
    scaled = values.astype(np.float64) / row.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    order = list(np.argsort(-weights))
    in_top_k = order[: row.top_k] if row.top_k else order
    total = weights[in_top_k].sum()
    nucleus, mass = set(), 0.0
    for token in in_top_k:
        if mass < row.top_p * total:
            nucleus.add(int(token))
        mass += weights[token]
    return {token for token in nucleus if weights[token] >= row.min_p * weights.max()}


ROWS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.sampled_from([(), ((3, 2.5),), ((3, -100.0), (7, 5.0))]),
)


def test_temperature_zero_takes_the_best() -> None:
    values = logits(5)
    assert Sampler([Sampling()] * 5)(values, mx.zeros(5)).tolist() == mx.argmax(values, axis=-1).tolist()


@given(row=ROWS.filter(lambda row: row.temperature > 0 and not row.logit_bias), seed=st.integers(0, 50))
@settings(max_examples=examples(60), deadline=None)
def test_only_allowed_tokens_are_sampled(row: Sampling, seed: int) -> None:
    values = logits(1, seed)
    assert set(sample(row, values, range(300))) <= allowed(row, np.array(values)[0])


@pytest.mark.parametrize(
    "row",
    [
        Sampling(temperature=0.7, top_p=0.9, seed=1),
        Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=2),
        Sampling(temperature=1.3, top_k=5, seed=3),
        Sampling(temperature=1.0, top_p=0.5, min_p=0.05, seed=4),
    ],
)
def test_only_allowed_tokens_of_a_large_vocabulary_are_sampled(row: Sampling) -> None:
    values = logits(1, 5, LARGE)
    inside = allowed(row, np.array(values)[0])
    drawn = [token for start in range(0, 300, 20) for token in sample(row, values, range(start, start + 20))]
    assert set(drawn) <= inside
    assert len(set(drawn)) > len(inside) / 10 or len(set(drawn)) > 50


def test_a_large_vocabulary_is_sorted_as_a_small_one_is() -> None:
    """Bit for bit, so that a row draws the same in every batch."""
    probs = mx.softmax(logits(7, 3, LARGE), axis=-1)
    ours = _descending(probs)
    assert mx.array_equal(ours, mx.sort(probs, axis=-1)[:, ::-1]).item()
    alone = mx.concatenate([_descending(probs[row : row + 1]) for row in range(7)])
    assert mx.array_equal(ours, alone).item()


def test_forbidden_tokens_of_a_large_vocabulary_have_no_probability() -> None:
    scores = logits(3, 4, LARGE) * 20
    forbidden = mx.arange(LARGE) % 3 == 0
    scores = mx.where(forbidden, -math.inf, scores)
    probs = _softmax(scores)
    assert mx.all(mx.where(forbidden, probs == 0, probs >= 0)).item()
    assert mx.allclose(probs, mx.softmax(scores, axis=-1), rtol=1e-5, atol=1e-30).item()
    assert mx.array_equal(probs[1:2], _softmax(scores[1:2])).item()


@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 50), vocab=st.sampled_from([VOCAB, LARGE]))
@settings(max_examples=examples(60), deadline=None)
def test_a_row_samples_the_same_alone_and_in_a_batch(rows: list[Sampling], seed: int, vocab: int) -> None:
    values, positions = logits(len(rows), seed, vocab), mx.array([3 * index for index in range(len(rows))])
    together = Sampler(rows)(values, positions).tolist()
    alone = [
        Sampler([row])(values[index : index + 1], positions[index : index + 1]).item() for index, row in enumerate(rows)
    ]
    assert together == alone


def test_samples_follow_the_distribution() -> None:
    values = logits(1)
    expected = np.array(mx.softmax(values / 0.8, axis=-1))[0]
    count = 20000
    shares = np.bincount(sample(Sampling(temperature=0.8, seed=9), values, range(count)), minlength=VOCAB) / count
    # Five standard deviations of a binomial share: a wrong sampler is off by far more, a right one almost never.
    assert np.all(np.abs(shares - expected) < 5 * np.sqrt(expected * (1 - expected) / count) + 1e-4)


def test_seeds_and_positions_change_the_sample() -> None:
    values = logits(1)
    first = sample(Sampling(temperature=1.5, seed=1), values, range(50))
    assert sample(Sampling(temperature=1.5, seed=1), values, range(50)) == first
    assert sample(Sampling(temperature=1.5, seed=2), values, range(50)) != first
    assert sample(Sampling(temperature=1.5, seed=1 << 40), values, range(50)) != first
    assert len(set(first)) > 5


def test_a_bias_forces_and_forbids() -> None:
    values = logits(3)
    best = mx.argmax(values, axis=-1).tolist()
    rows = [Sampling(logit_bias=((5, 100.0),)), Sampling(logit_bias=((best[1], -100.0),)), Sampling()]  # type: ignore[index]
    tokens = Sampler(rows)(values, mx.zeros(3)).tolist()
    assert tokens[0] == 5  # type: ignore[index]
    assert tokens[1] != best[1]  # type: ignore[index]
    assert tokens[2] == best[2]  # type: ignore[index]


@pytest.mark.parametrize("temperature", [9e-6, 1e-30, 1e-38, 1e-45, 2.2250738585072014e-308])
def test_a_tiny_temperature_takes_the_best(temperature: float) -> None:
    """Clients send the smallest number there is for 0; logits divided by it are no numbers."""
    values = logits(1) * 100
    rows = [Sampling(temperature, seed=seed, top_p=0.9) for seed in range(3)]
    best = mx.argmax(values, axis=-1).item()
    assert Sampler(rows)(mx.broadcast_to(values, (3, VOCAB)), mx.arange(3)).tolist() == [best] * 3
    assert sample_kernel.numbers_of(rows)[:, 0].tolist() == [0, 0, 0]


def test_the_least_temperature_and_penalties_keep_numbers_finite() -> None:
    values = logits(1) * 100
    penalties = Penalties()
    penalties.add(0, Sampling(repetition_penalty=0.01), prompt=range(VOCAB), vocab_size=VOCAB)
    row = Sampling(LEAST_TEMPERATURE, top_p=0.9, top_k=5, min_p=0.1)
    best = mx.argmax(values, axis=-1).item()
    assert Sampler([row])(penalties.apply(values), mx.arange(1)).item() == best


def test_penalties_follow_their_definition_and_change_no_other_row() -> None:
    values = logits(3)
    penalties = Penalties()
    row = Sampling(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    penalties.add(1, row, prompt=(1, 2, 2), vocab_size=VOCAB)
    for token in (7, 7, 9):
        penalties.count(mx.array([0, token, 0]))
    got = np.array(penalties.apply(values))
    expected = np.array(values)
    for token in (1, 2, 7, 9):
        value = expected[1, token]
        expected[1, token] = value / 1.5 if value > 0 else value * 1.5
    expected[1, 7] -= 2 * 0.3 + 0.4
    expected[1, 9] -= 0.3 + 0.4
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(np.array(values), np.array(logits(3)), "the model's own logits must not change")


def test_penalties_move_with_their_rows() -> None:
    penalties = Penalties()
    for index, prompt in ((0, (1,)), (2, (2,)), (3, (3,))):
        penalties.add(index, Sampling(repetition_penalty=2.0), prompt, VOCAB)
    penalties.count(mx.array([10, 11, 12, 13]))
    penalties.filter([1, 3, 2])
    assert penalties.rows == [2, 1]
    flat = mx.ones((3, VOCAB))
    changed = [set(np.flatnonzero(np.array(row) != 1).tolist()) for row in penalties.apply(flat)]
    assert changed == [set(), {3, 13}, {2, 12}]
    penalties.filter([0])
    assert penalties.rows == []
    assert np.all(np.array(penalties.apply(flat)) == 1)


@pytest.mark.parametrize("top", [0, 1, 5])
def test_log_probabilities_are_the_models_own(top: int) -> None:
    values = logits(3)
    tokens = mx.array([4, 5, 6])
    pending = RowLogprobs([None, top, None])(values, tokens)
    result = pending.read([4, 5, 6])
    assert list(result) == [1]
    row = np.array(values)[1].astype(np.float64)
    expected = row - math.log(np.exp(row).sum())
    assert result[1].token == 5
    assert result[1].logprob == pytest.approx(expected[5], abs=1e-5)
    best = np.argsort(-expected)[:top]
    assert [token for token, _ in result[1].top] == best.tolist()
    assert [value for _, value in result[1].top] == pytest.approx(expected[best].tolist(), abs=1e-5)
