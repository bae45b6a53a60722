"""The numbers that follow from what a device and a model cost: of an H200, of a laptop's GPU, of two CPU cores."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.cost_model import (
    UNCALIBRATED,
    block_tokens,
    describe,
    fixed_seconds,
    tune,
    workspace_bytes,
)
from millstream.model_facts import Calibration, GenerationFacts, PrefixSizes


def facts(token_bytes: int, calibration: Calibration | None) -> GenerationFacts:
    return GenerationFacts(
        131_072, 128_000, 64, 10**9, "bfloat16", "any", prefix_sizes=PrefixSizes(token_bytes), calibration=calibration
    )


def calibration(
    fixed: float, per_token: float, *, longest: int, step: float, save: float, bytes_per_second: float
) -> Calibration:
    """A device on which a chunk costs `fixed` and `per_token` seconds, measured up to `longest` tokens."""
    lengths = [length for length in (2**power for power in range(4, 13)) if length <= longest]
    return Calibration(
        chunks=tuple((length, fixed + per_token * length) for length in lengths),
        steps=((1, step), (4, 1.05 * step), (16, 1.3 * step)),
        save_seconds=save,
        save_seconds_per_byte=2 / bytes_per_second,
        workspace_bytes=2**20 * longest,
    )


def h200(fixed: float) -> GenerationFacts:
    """A bf16 Llama of 1.2B: 80,000 tokens/s in chunks of 2,048."""
    per_token = (2048 / 80_000 - fixed) / 2048
    measured = calibration(fixed, per_token, longest=4096, step=0.0018, save=0.0005, bytes_per_second=2e12)
    return facts(32 * 1024, measured)


def laptop(per_token: float) -> GenerationFacts:
    """An 8B model in 4 bits on a Mac: 500 tokens take 0.5 to 1 s. A second ends the calibration early."""
    measured = calibration(0.018, per_token, longest=128, step=0.02, save=0.001, bytes_per_second=3e11)
    return facts(128 * 1024, measured)


def two_cores() -> GenerationFacts:
    """The demo model in float32 on two CPU cores."""
    return facts(46_080, calibration(0.03, 0.0022, longest=128, step=0.035, save=0.0015, bytes_per_second=8e9))


@pytest.mark.parametrize("fixed", [0.003, 0.005, 0.009])
def test_an_h200_gets_about_what_was_tuned_there_by_hand(fixed: float) -> None:
    """2,048 tokens per step, chunks of 64 to 512 or, under pressure, 8,192; 5 ms free; 512 new tokens in blocks of
    64."""
    tuning = tune(h200(fixed))
    assert tuning.prefill_tokens in (2048, 4096)
    assert (tuning.shortest_chunk, tuning.gentle_chunk, tuning.longest_chunk) == (64, 512, 8192)
    assert 0.5 * fixed <= tuning.free_seconds <= fixed
    assert tuning.block_tokens == 64
    assert 384 <= tuning.min_new_tokens <= 640


@pytest.mark.parametrize("per_token", [0.001, 0.002])
def test_a_laptop_gets_short_chunks_and_caches_short_prompts(per_token: float) -> None:
    tuning = tune(laptop(per_token))
    assert tuning.prefill_tokens == 256
    assert tuning.shortest_chunk <= 16
    assert tuning.gentle_chunk == 64
    assert tuning.longest_chunk == 1024
    assert tuning.block_tokens == 16
    assert tuning.min_new_tokens <= 32


def test_two_cores_get_about_what_was_tuned_there_by_hand() -> None:
    """256 tokens per step, chunks of 16 to 128, every block saved."""
    tuning = tune(two_cores())
    assert tuning.prefill_tokens == 256
    assert tuning.shortest_chunk == 16, "of 8 tokens the fixed cost would be most, and nobody measured them"
    assert tuning.gentle_chunk == 64
    assert tuning.min_new_tokens == tuning.block_tokens == 32


def test_what_was_not_measured_gets_numbers_that_suit_a_slow_device() -> None:
    assert tune(facts(32 * 1024, None)) == UNCALIBRATED
    assert describe(facts(32 * 1024, None))[0].startswith("not calibrated; prefill: 256 tokens per step")


def test_noise_hardly_changes_a_number_and_never_the_block_size() -> None:
    """The block size is in the stamp of the disk tier: it must not change from load to load."""
    quiet = laptop(0.0015)
    assert quiet.calibration is not None
    noisy_chunks = tuple(
        (tokens, seconds * (1.3 if tokens % 3 else 0.8)) for tokens, seconds in quiet.calibration.chunks
    )
    for save in (0.0, 0.002):
        noisy = dataclasses.replace(quiet.calibration, chunks=noisy_chunks, save_seconds=save)
        tuning, before = tune(dataclasses.replace(quiet, calibration=noisy)), tune(quiet)
        assert tuning.block_tokens == before.block_tokens
        assert before.min_new_tokens <= max(16, tuning.min_new_tokens) <= before.min_new_tokens + 32


@pytest.mark.parametrize(
    "token_bytes, tokens", [(0, 64), (1024, 64), (32_768, 64), (46_080, 32), (131_072, 16), (10**7, 16)]
)
def test_a_block_has_about_two_mebibytes(token_bytes: int, tokens: int) -> None:
    assert block_tokens(token_bytes) == tokens


def test_copies_that_cost_more_than_they_save_need_many_tokens() -> None:
    """A copy that costs more than a tenth of the prefill is not worth it; prompts so long may still share a prefix."""
    measured = calibration(0.0, 1e-5, longest=4096, step=0.002, save=0.001, bytes_per_second=1e9)
    assert tune(facts(32 * 1024, measured)).min_new_tokens == 1024


def test_a_model_measured_on_one_length_gets_short_chunks() -> None:
    """Its shortest chunk takes as long as the whole calibration may."""
    measured = Calibration(chunks=((16, 3.0),), steps=((1, 1.0),), save_seconds=0.003)
    tuning = tune(facts(131_072, measured))
    assert (tuning.prefill_tokens, tuning.gentle_chunk, tuning.shortest_chunk) == (256, 64, 4)
    assert tuning.min_new_tokens == 16


def test_workspace_grows_with_the_chunk() -> None:
    """As far as the longest that is ever planned. What another engine took meanwhile is not believed."""
    measured = dataclasses.replace(laptop(0.001), weight_bytes=4 * 2**30)
    assert measured.calibration is not None and tune(measured).longest_chunk == 1024
    assert workspace_bytes(measured) == 1024 * 2**20
    disturbed = dataclasses.replace(measured.calibration, workspace_bytes=2**40)
    assert workspace_bytes(dataclasses.replace(measured, calibration=disturbed)) == 2 * 2**30
    assert workspace_bytes(dataclasses.replace(measured, calibration=None)) == 0


durations = st.floats(1e-7, 100.0)


@given(
    st.lists(durations, min_size=1, max_size=9),
    durations,
    st.floats(0, 1.0),
    st.floats(0, 1e-3),
    st.integers(0, 10**7),
)
def test_whatever_is_measured_the_numbers_are_usable(
    chunks: list[float], step: float, save: float, per_byte: float, token_bytes: int
) -> None:
    measured = Calibration(tuple((16 << n, each) for n, each in enumerate(chunks)), ((1, step),), save, per_byte, 10)
    given_facts = facts(token_bytes, measured)
    tuning = tune(given_facts)
    assert 4 <= tuning.shortest_chunk <= tuning.gentle_chunk <= tuning.prefill_tokens <= tuning.longest_chunk <= 8192
    assert 0 <= tuning.free_seconds <= 0.01 and fixed_seconds(measured) >= 0
    assert tuning.min_new_tokens % tuning.block_tokens == 0 and 16 <= tuning.min_new_tokens <= 1024
    assert pickle.loads(pickle.dumps(given_facts)) == given_facts
    assert len(describe(given_facts)) == 4
