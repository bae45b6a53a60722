"""Recurrent layers that read prompts in pieces give mlx-lm's own numbers and states, in far fewer operations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import bailing_moe_linear, gated_delta, recurrent_gemma, rwkv7, ssm
from mlx_lm.models.jamba import JambaMambaMixer
from mlx_lm.models.jamba import ModelArgs as JambaArgs
from mlx_lm.models.mamba import MambaBlock
from mlx_lm.models.mamba import ModelArgs as MambaArgs

from millstream.backend.layers import recurrent_prompts
from millstream.backend.layers.recurrent_prompts import (
    gated_delta_update,
    linear_attention,
    read_in_pieces,
    scan,
    told_lengths,
)
from support.rare import RARE

PASSES = st.lists(st.integers(6, 70), min_size=1, max_size=3)
"""The lengths of the rows of a pass."""


def near(one: mx.array, other: mx.array, within: float = 2e-5) -> bool:
    assert one.shape == other.shape and one.dtype == other.dtype
    return bool(mx.max(mx.abs(one - other)) <= within * mx.maximum(mx.max(mx.abs(other)), 1.0))


def gated(lengths: list[int], seed: int, *, vector: bool, same: bool = False) -> tuple[list[mx.array], mx.array]:
    """What a gated delta net gives to mlx-lm's function; and its mask. `same`: keys as of one token said again and
    again, written at full strength."""
    mx.random.seed(seed)
    rows, columns, heads, size = len(lengths), max(lengths), 4, 8
    q, k = (mx.random.normal((rows, columns, 2, size)) for _ in range(2))
    k = mx.broadcast_to(k[:, :1], k.shape) if same else k
    q, k = gated_delta.normalize_qk(q, k, inv_scale=size**-0.5, eps=1e-6)
    v = mx.random.normal((rows, columns, heads, size))
    gate = mx.random.normal((rows, columns, heads, size) if vector else (rows, columns, heads))
    decay = mx.log(mx.random.uniform(1e-3, 1e-2 if same else 30, (heads, 1) if vector else (heads,)))
    strength = mx.random.normal((rows, columns, heads)) + (9 if same else 0)
    bias = mx.random.normal((heads, size) if vector else (heads,))
    return [q, k, v, gate, strength, decay, bias], mx.arange(columns) < mx.array(lengths)[:, None]


@pytest.mark.parametrize("options", [{}, {"allow_neg_eigval": True}, {"lower_bound": -5.0}], ids=str)
@pytest.mark.parametrize("vector", [False, True])
@given(lengths=PASSES, seed=st.integers(0, 99), masked=st.booleans(), begun=st.booleans())
@settings(max_examples=5, deadline=None)
def test_gated_delta(
    vector: bool, options: dict[str, Any], lengths: list[int], seed: int, masked: bool, begun: bool
) -> None:
    arrays, mask = gated(lengths, seed, vector=vector)
    state = mx.random.normal((len(lengths), 4, 8, 8)) if begun else None
    theirs = gated_delta.gated_delta_update
    y, after = theirs(*arrays, state, mask if masked else None, **options)
    ours, kept = gated_delta_update(theirs, *arrays, state, mask if masked else None, **options)
    if masked:  # of padding the numbers do not count
        y, ours = (mx.where(mask[..., None, None], each, 0) for each in (y, ours))
    assert near(ours, y) and near(kept, after)


def test_a_token_that_is_said_again_and_again_costs_no_accuracy() -> None:
    """There the powers of a piece's matrix grow to 1e8 before they cancel out."""
    arrays, _ = gated([64, 64], 1, vector=False, same=True)
    theirs = gated_delta.gated_delta_update
    for one, other in zip(gated_delta_update(theirs, *arrays), theirs(*arrays), strict=True):
        assert near(one, other, 1e-4)


def test_long_passes_run_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, mask = gated([150, 90], 2, vector=True)
    theirs = gated_delta.gated_delta_update
    expected = theirs(*arrays, None, mask)
    monkeypatch.setattr(recurrent_prompts, "PASS_BYTES", 1 << 16)
    y, state = gated_delta_update(theirs, *arrays, None, mask)
    live = mask[..., None, None]
    assert near(mx.where(live, y, 0), mx.where(live, expected[0], 0)) and near(state, expected[1])


@given(length=st.integers(6, 80), begun=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_rwkv(length: int, begun: bool, seed: int) -> None:
    names = ("hidden_size", "intermediate_size", "head_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
    sizes = dict(zip(names, (32, 48, 8, 4, 4, 4), strict=True))
    args = rwkv7.ModelArgs(
        model_type="rwkv7", vocab_size=9, norm_eps=1e-5, num_hidden_layers=1, decay_low_rank_dim=4, **sizes
    )
    mx.random.seed(seed)
    layer = rwkv7.Rwkv7TimeMixing(args, 0)
    layer.update({name: mx.random.normal(layer[name].shape) for name in ("x_w", "x_k", "x_a", "k_k", "k_a", "r_k")})
    x = mx.random.normal((2, length, 32))
    began = [mx.random.normal((2, 1, 32)), mx.random.normal((2, 4, 8, 8)), None] if begun else [None] * 3
    first, second = list(began), list(began)
    expected = layer(x, None, first)[0]
    assert read_in_pieces(layer) == 1
    assert near(layer(x, None, second)[0], expected) and near(second[1], first[1])


@given(length=st.integers(6, 300), begun=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_linear_attention(length: int, begun: bool, seed: int) -> None:
    mx.random.seed(seed)
    q, k, v = (mx.random.normal((2, 3, length, 8)) for _ in range(3))
    state = mx.random.normal((2, 3, 8, 8)) if begun else None
    given_ = (q, k, v, -mx.random.uniform(0.001, 1.0, (3,)), 0.3, state)
    for one, other in zip(
        linear_attention(bailing_moe_linear.recurrent_gla, *given_),
        bailing_moe_linear.recurrent_gla(*given_),
        strict=True,
    ):
        assert near(one, other)


@given(length=st.integers(1, 90), begun=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_scans(length: int, begun: bool, seed: int) -> None:
    mx.random.seed(seed)
    decay, gain = mx.random.uniform(0, 1, (2, length, 5)), mx.random.normal((2, length, 5))
    state = mx.random.normal((2, 5)) if begun else None
    expected, _ = recurrent_gemma.rnn_scan(gain, decay, state)
    assert near(scan(decay, gain, state), expected)


@given(lengths=st.lists(st.integers(1, 600), min_size=2, max_size=3), begun=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_states_of_mamba_2_end_with_their_rows(lengths: list[int], begun: bool, seed: int) -> None:
    mx.random.seed(seed)
    rows, columns = len(lengths), max(lengths)
    x, step = mx.random.normal((rows, columns, 4, 8)), mx.random.normal((rows, columns, 4))
    b, c = (mx.random.normal((rows, columns, 1, 16)) for _ in range(2))
    rates, own, bias = (mx.random.normal((4,)) for _ in range(3))
    state = mx.random.normal((rows, 4, 8, 16)) if begun else None
    mask = mx.arange(columns) < mx.array(lengths)[:, None]
    _, after = told_lengths(ssm.ssm_update, x, rates, b, c, own, step, bias, state, mask=mask)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1), slice(0, length)
        _, alone = ssm.ssm_update(
            x[one], rates, b[one], c[one], own, step[one], bias, None if state is None else state[row : row + 1]
        )
        assert near(after[row : row + 1], alone)


MAMBA = {"hidden_size": 16, "intermediate_size": 32, "state_size": 4, "conv_kernel": 4, "time_step_rank": 4}


@pytest.mark.parametrize("kind", ["jamba", "mamba", "falcon_mamba"])
@given(length=st.integers(6, 60), begun=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_selective_states(kind: str, length: int, begun: bool, seed: int) -> None:
    mx.random.seed(seed)
    if kind == "jamba":
        layer: Any = JambaMambaMixer(JambaArgs.from_dict({"model_type": kind, **RARE["jamba"], "hidden_size": 16}))
    else:
        rest = {"num_hidden_layers": 1, "vocab_size": 9, "use_bias": True, "use_conv_bias": True}
        layer = MambaBlock(MambaArgs.from_dict({"model_type": kind, **MAMBA, **rest}))
    x, inner, size = mx.random.normal((2, length, 16)), layer.intermediate_size, layer.ssm_state_size
    began = [mx.random.normal((2, 3, inner)), mx.random.normal((2, inner, size))] if begun else [None, None]
    expected, states = layer._process_sequence(x, *began)
    assert read_in_pieces(layer) == 1
    out, ours = layer._process_sequence(x, *began)
    assert near(out, expected) and all(near(one, other) for one, other in zip(ours, states, strict=True))


@pytest.mark.parametrize("vector", [False, True])
def test_a_long_prompt_is_few_operations(vector: bool, tmp_path: Path) -> None:
    arrays, mask = gated([500], 3, vector=vector)

    def count(found: tuple[mx.array, mx.array]) -> int:
        mx.export_to_dot(str(tmp_path / "graph"), *found)
        return len(re.findall("shape=rectangle", (tmp_path / "graph").read_text()))

    theirs = gated_delta.gated_delta_update
    assert count(gated_delta_update(theirs, *arrays, None, mask)) < 400 < 10_000 < count(theirs(*arrays, None, mask))
