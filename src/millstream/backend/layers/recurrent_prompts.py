"""Recurrent layers that read a prompt in pieces, where mlx-lm loops over its tokens in Python.

mlx-lm has kernels for some of these recurrences on Metal. Elsewhere each token is a dozen operations that wait for each
other, so a prompt takes as long as its columns are many, however fast the device is. Within a piece of columns the
recurrences here are matrix products, and only the state goes from one piece to the next:

- the delta rule (gated delta nets, KDA, RWKV 7): `delta_rule`;
- linear attention whose heads have a constant decay (Bailing's, Ling's): `linear_attention`;
- states of which each number decays by itself (Mamba, Jamba, RecurrentGemma): `scan`.

Mamba 2 is in this form already in mlx-lm.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import ssm

from millstream.backend.layers.patch_layers import patch_function

PIECE = 32
"""Columns of a piece of the delta rule, at most. Pieces of 16 and of 64 were slower on a CPU."""

FEWEST = 6
"""Columns from which on pieces are used: shorter passes loop as mlx-lm does."""

PASS_BYTES = 1 << 28
"""What the largest array of a layer may take: longer passes run as several, one after the other."""

SAFE_LOG = -20.0
"""Where each number of a key decays by itself, less of it is left than rounding shows; `_REACH` of these are the powers
of ten that float32 has."""

NOTHING_LEFT, TINY = -30.0, 1e-20
"""The logarithm of a decay, and a number: far below what rounding shows. Products of such are so small that a CPU
computes them a hundred times as slowly."""

_REACH = 4


def tell_lengths(model: Any) -> int:
    """Have Mamba 2 layers say where each row ends, as the mask of a padded pass does: mlx-lm's Nemotron-H does not, and
    its shorter rows lose their states. Returns how many layers there are."""
    theirs = ssm.ssm_update
    return patch_function(model, "ssm_update", functools.partial(told_lengths, theirs), instead_of=theirs)


def told_lengths(
    theirs: Callable[..., tuple[mx.array, mx.array]],
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """`lengths` of this pass: those of a prompt that is read in several would be wrong."""
    lengths = lengths if mask is None else mask.sum(axis=-1)
    return theirs(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)


def read_in_pieces(model: Any) -> int:
    """Have the recurrent layers of a model read prompts so. Returns how many do."""
    found = 0
    for (home, name), function in _FUNCTIONS.items():
        if (theirs := getattr(sys.modules.get(f"mlx_lm.models.{home}"), name, None)) is not None:
            found += patch_function(model, name, functools.partial(function, theirs), instead_of=theirs)
    for _, module in model.named_modules():
        kind: Any = type(module)
        if (method := _METHODS.get((kind.__module__.removeprefix("mlx_lm.models."), kind.__name__))) is not None:
            module.__class__ = _with_method(kind, *method)
            found += 1
    return found


@functools.cache
def _with_method(kind: Any, name: str, function: Callable[..., Any]) -> type:
    theirs = getattr(kind, name)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return function(functools.partial(theirs, self), self, *arguments, **named)

    return type(kind.__name__, (kind,), {name: method})


# The delta rule


def gated_delta_update(
    theirs: Callable[..., tuple[mx.array, mx.array]],
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """As `theirs`, which is mlx-lm's function of this name. Tokens that the mask leaves out change no state."""
    if q.shape[1] < FEWEST:
        options = {"use_kernel": use_kernel, "lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
        return theirs(q, k, v, a, b, A_log, dt_bias, state, mask, **options)
    beta = mx.sigmoid(b).astype(mx.float32) * (2.0 if allow_neg_eigval else 1.0)
    rate = mx.exp(A_log.astype(mx.float32))
    if lower_bound is None:  # the logarithm itself: a decay may be too small for float32
        logs = -rate * nn.softplus(a + dt_bias).astype(mx.float32)
    else:
        logs = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0.0)
        logs = mx.where(mask.reshape(*mask.shape, *[1] * (logs.ndim - 2)), logs, 0.0)
    if state is None:
        state = mx.zeros((q.shape[0], v.shape[2], v.shape[3], q.shape[3]), mx.float32)
    repeats = v.shape[2] // k.shape[2]
    if repeats > 1:
        q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    k, beta = k.astype(mx.float32), beta[..., None]
    return delta_rule(q, k, beta * v, -beta * k, None, logs, state)


def delta_rule(
    r: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array | None,
    logs: mx.array,
    state: mx.array,
    reach: int = _REACH,
) -> tuple[mx.array, mx.array]:
    """Per token S = S' + (S' a) b^T + v k^T and y = S r, where S' is the state before, decayed by exp(`logs`).

    All but `logs` are (rows, columns, heads, size); `logs` have no size if all of a head decays alike. b is k if it is
    None. `reach`: of how many tokens `logs` add up to less than float32 has powers, if each number decays by itself.
    """
    rows, columns, heads, size = r.shape
    vector = logs.ndim == 4
    piece = min(PIECE, 1 << (columns - 1).bit_length())
    reach = min(reach, piece)
    largest = max(size * max(size, v.shape[-1]), piece * size * (piece // reach if vector else 1))
    span = max(1, PASS_BYTES // (4 * rows * heads * largest)) * piece
    kind, state_kind, found = r.dtype, state.dtype, []
    carried = state.astype(mx.float32).swapaxes(-1, -2).flatten(0, 1)
    given = [r, k, v, a, *([] if b is None else [b]), logs if vector else logs[..., None]]
    for start in range(0, columns, span):
        parts = [_pieces(each[:, start : start + span], piece) for each in given]
        y, carried = _delta_pieces(parts, carried, reach)
        y = y.reshape(-1, rows, heads, piece, y.shape[-1]).transpose(1, 0, 3, 2, 4).flatten(1, 2)
        found.append(y.astype(kind))
    out = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
    carried = carried.reshape(rows, heads, *carried.shape[1:]).swapaxes(-1, -2)
    return out[:, :columns], carried.astype(state_kind)


def _pieces(x: mx.array, piece: int) -> mx.array:
    """From (rows, columns, heads, size) to (pieces, rows and heads, columns of a piece, size). Padding is zeros: it
    decays nothing and writes nothing."""
    rows, columns, heads, size = x.shape
    x = x.astype(mx.float32)
    if missing := -columns % piece:
        x = mx.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)])
    return x.reshape(rows, -1, piece, heads, size).transpose(1, 0, 3, 2, 4).flatten(1, 2)


def _delta_pieces(parts: list[mx.array], state: mx.array, reach: int) -> tuple[mx.array, mx.array]:
    """`parts`: r, k, v, a, perhaps b, and the logarithms of the decay. `state`: (rows and heads, keys, values)."""
    (r, k, v, a, *different), logs = parts[:-1], parts[-1]
    if logs.shape[-1] > 1:
        logs = mx.maximum(logs, SAFE_LOG)
    sums = mx.cumsum(logs, axis=2)
    grown, last = _left(sums), sums[:, :, -1:]
    left, kept = _left(last).swapaxes(-1, -2), _left(last - sums)
    scores = _decayed_products([a, r], [k, *different], sums, reach)
    triangle = _triangle(k.shape[2])
    among, asked = scores[-1]
    inverse, asked = triangle.inverse(triangle.before(among)), triangle.until(asked)
    writes = (different[0] if different else k) * kept
    turned = writes.swapaxes(-1, -2)
    known, said, added = v, None, None
    if different:  # v is written with k, and what is read of the state with b
        known, said = triangle.before(scores[0][0]) @ v, triangle.until(scores[0][1]) @ v
        added = (k * kept).swapaxes(-1, -2) @ v
    values, reads = inverse @ known, _settled(inverse @ (a * grown))
    moves = mx.addmm(_triangle(k.shape[-1]).one * left, turned, reads)
    gains = turned @ values if added is None else mx.addmm(added, turned, values)
    state, before = state[None], []
    for gain, move in zip(mx.split(gains, k.shape[0]), mx.split(moves, k.shape[0]), strict=True):
        before.append(state)
        state = mx.addmm(gain, move, state)
    carried = mx.concatenate(before)
    written = mx.addmm(values, reads, carried)
    out = (r * grown) @ carried if said is None else mx.addmm(said, r * grown, carried)
    return mx.addmm(out, asked, written), state[0]


def _decayed_products(
    lefts: list[mx.array], rights: list[mx.array], sums: mx.array, reach: int
) -> list[list[mx.array]]:
    """For each of `rights` the products of columns i of each of `lefts` with its columns j, times what is left at i of
    what stood at j. Of use where i is j or later."""
    if sums.shape[-1] == 1:
        factor = _left(sums - sums.swapaxes(-1, -2))
        return [[(left @ right.swapaxes(-1, -2)) * factor for left in lefts] for right in rights]
    # Each number decays by itself: the factor is split between both sides, around a column near i.
    count, heads, piece, size = sums.shape
    groups = (count, heads, piece // reach, reach, size)
    near = sums.reshape(groups)[:, :, :, reach // 2 : reach // 2 + 1]
    later = mx.exp(sums.reshape(groups) - near)
    stacked = mx.concatenate([left.reshape(groups) * later for left in lefts], axis=3)
    earlier = mx.exp(mx.clip(near - sums[:, :, None], 3 * SAFE_LOG, -SAFE_LOG * _REACH))
    found = []
    for right in rights:
        both = stacked @ (right[:, :, None] * earlier).swapaxes(-1, -2)
        found.append([each.reshape(count, heads, piece, piece) for each in mx.split(both, len(lefts), axis=3)])
    return found


def _decay(logs: mx.array) -> mx.array:
    """What is left after a decay."""
    return mx.where(logs > NOTHING_LEFT, mx.exp(mx.minimum(logs, 0.0)), 0.0)


def _without_tiny(x: mx.array) -> mx.array:
    return mx.where(mx.abs(x) < TINY, 0.0, x)


_left: Callable[[mx.array], mx.array] = mx.compile(_decay, shapeless=True)
_settled: Callable[[mx.array], mx.array] = mx.compile(_without_tiny, shapeless=True)


class _Triangle:
    """Lower triangular matrices of one size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._until = self._where(lambda row, column: column <= row)
        self._before = self._where(lambda row, column: column < row)
        self.one = self._where(operator.eq, mx.float32)
        self._corners = [self._corner(1 << power) for power in range((size - 1).bit_length())]

    def _where(self, chosen: Callable[[int, int], bool], dtype: mx.Dtype = mx.bool_) -> mx.array:
        numbers = range(self._size)
        return mx.array([[chosen(row, column) for column in numbers] for row in numbers], dtype)

    def _corner(self, half: int) -> mx.array:
        """Of blocks of two halves, the corner where the second meets the first."""

        def chosen(row: int, column: int) -> bool:
            return row // half % 2 == 1 and column // half == row // half - 1

        return self._where(chosen, mx.float32)

    def until(self, x: mx.array) -> mx.array:
        return mx.where(self._until, x, 0.0)

    def before(self, x: mx.array) -> mx.array:
        return mx.where(self._before, x, 0.0)

    def inverse(self, before: mx.array) -> mx.array:
        """Of 1 - `before`. By halves: the powers of the matrix cancel out where a prompt repeats a token."""
        found = self.one
        for number, corner in enumerate(self._corners):
            part = before * corner
            found = mx.addmm(found, found @ part, found) if number else found + part
        return mx.broadcast_to(found, before.shape)


_triangle = functools.cache(_Triangle)


def wkv7(
    theirs: Callable[..., tuple[mx.array, mx.array]],
    module: Any,
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """RWKV 7's. Its decay is at least exp(-0.61): a whole piece is within reach of float32, and what it reads of the
    state before the decay can be read after it."""
    if r.shape[1] < FEWEST:
        return theirs(r, w, k, v, a, b, state)
    if state is None:
        state = mx.zeros((r.shape[0], *r.shape[2:], r.shape[3]), r.dtype)
    w = w.astype(mx.float32)
    y, state = delta_rule(r, k, v, a / w, b, mx.log(w), state, reach=PIECE)
    return y[..., None], state


# Constant decays


def linear_attention(
    theirs: Callable[..., tuple[mx.array, mx.array]],
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    scale: float,
    h: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's `recurrent_gla`: S = S exp(g) + k v^T and y = scale q S, for arrays of (rows, heads, columns, size)."""
    rows, heads, columns, size = q.shape
    if columns < FEWEST:
        return theirs(q, k, v, g, scale, h)
    kind = q.dtype
    state = mx.zeros((rows, heads, size, v.shape[-1]), mx.float32) if h is None else h.astype(mx.float32)
    logs, found = g.astype(mx.float32)[:, None, None], []
    for start in range(0, columns, LINEAR_PIECE):
        each_q, each_k, each_v = (x[:, :, start : start + LINEAR_PIECE].astype(mx.float32) for x in (q, k, v))
        place = mx.arange(each_q.shape[2], dtype=mx.float32)[:, None]
        weights = _left(logs * mx.maximum(place - place.T, 0.0)) * scale
        scores = mx.tril((each_q @ each_k.swapaxes(-1, -2)) * weights)
        out = mx.addmm(scores @ each_v, each_q * (_left(logs * (place + 1)) * scale), state)
        left = _left(logs * (each_q.shape[2] - 1 - place))
        state = mx.addmm(state * _left(logs * each_q.shape[2]), (each_k * left).swapaxes(-1, -2), each_v)
        found.append(out.astype(kind))
    return mx.concatenate(found, axis=2), state.astype(kind)


LINEAR_PIECE = 128
"""Columns of a piece of linear attention."""


# States of which each number decays by itself


def scan(decay: mx.array, gain: mx.array, state: mx.array | None) -> mx.array:
    """All states h of h = decay h + gain, along axis 1. Pieces run side by side, as many as each has columns."""
    columns = gain.shape[1]
    piece = max(1, round(columns**0.5))
    missing = -columns % piece
    if missing:
        width = [(0, 0), (0, missing), *[(0, 0)] * (gain.ndim - 2)]
        decay, gain = mx.pad(decay, width, constant_values=1), mx.pad(gain, width)
    shape = (gain.shape[0], -1, piece, *gain.shape[2:])
    decay, gain = decay.reshape(shape), gain.reshape(shape)
    columns_of = [gain[:, :, 0]]
    for column in range(1, piece):
        columns_of.append(_advanced(columns_of[-1], decay[:, :, column], gain[:, :, column]))
    alone, left = mx.stack(columns_of, axis=2), mx.cumprod(decay, axis=2)
    carried = mx.zeros_like(alone[:, 0, 0]) if state is None else state.astype(alone.dtype)
    before = []
    for number in range(alone.shape[1]):
        before.append(carried)
        carried = _advanced(carried, left[:, number, -1], alone[:, number, -1])
    found = _advanced(mx.stack(before, axis=1)[:, :, None], left, alone).flatten(1, 2)
    return found[:, :columns] if missing else found


def _advance(state: mx.array, decay: mx.array, gain: mx.array) -> mx.array:
    return state * decay + gain


_advanced: Callable[[mx.array, mx.array, mx.array], mx.array] = mx.compile(_advance, shapeless=True)


def gated_scan(
    theirs: Callable[..., tuple[mx.array, mx.array]], x: mx.array, a: mx.array, h0: mx.array | None
) -> tuple[mx.array, mx.array]:
    """RecurrentGemma's."""
    if x.shape[1] < FEWEST:
        return theirs(x, a, h0)
    y = scan(a, x, h0)
    return y, y[:, -1]


def _selective(module: Any, x: mx.array, rates: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
    """Mamba's state space: what a token writes, keeps and reads depends on the token. x: (rows, columns, channels)."""
    size = module.ssm_state_size
    steps, writes, reads = mx.split(module.x_proj(x), [module.time_step_rank, module.time_step_rank + size], axis=-1)
    if "dt_layernorm" in module:
        steps, writes, reads = module.dt_layernorm(steps), module.b_layernorm(writes), module.c_layernorm(reads)
    elif module.use_bcdt_rms:
        eps = module.args.mixer_rms_eps
        steps, writes, reads = (mx.fast.rms_norm(each, None, eps) for each in (steps, writes, reads))
    steps = nn.softplus(module.dt_proj(steps))
    span = max(1, PASS_BYTES // (4 * x.shape[0] * x.shape[2] * size))
    found = []
    for start in range(0, x.shape[1], span):
        step, write, read, own = (each[:, start : start + span] for each in (steps, writes, reads, x))
        gain = mx.expand_dims(step * own, -1) * mx.expand_dims(write, -2)
        states = scan(mx.exp(mx.expand_dims(step, -1) * rates), gain, state)
        state = states[:, -1]
        found.append((states @ mx.expand_dims(read, -1)).squeeze(-1))
    y = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
    assert state is not None
    return y + module.D * x, state


def jamba_step(
    theirs: Callable[..., tuple[mx.array, mx.array]],
    module: Any,
    x: mx.array,
    A: mx.array,
    state: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    return theirs(x, A, state) if x.shape[1] < FEWEST else _selective(module, x, A, state)


def mamba_sequence(
    theirs: Callable[..., tuple[mx.array, tuple[mx.array, mx.array]]],
    module: Any,
    x: mx.array,
    conv_cache: mx.array | None,
    state_cache: mx.array | None,
) -> tuple[mx.array, tuple[mx.array, mx.array]]:
    if x.shape[1] < FEWEST:
        return theirs(x, conv_cache, state_cache)
    x, gate = mx.split(module.in_proj(x), 2, axis=-1)
    kept = module.conv_kernel_size - 1
    before = mx.zeros((x.shape[0], kept, x.shape[2]), x.dtype) if conv_cache is None else conv_cache
    x = mx.concatenate([before, x], axis=1)
    y, state = _selective(module, nn.silu(module.conv1d(x)), -mx.exp(module.A_log), state_cache)
    return module.out_proj(nn.silu(gate) * y), (x[:, -kept:], state)


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("gated_delta", "gated_delta_update"): gated_delta_update,
    ("bailing_moe_linear", "recurrent_gla"): linear_attention,
    ("recurrent_gemma", "rnn_scan"): gated_scan,
}
"""Where mlx-lm has a function that loops, and what does the same."""

_METHODS: dict[tuple[str, str], tuple[str, Callable[..., Any]]] = {
    ("rwkv7", "Rwkv7TimeMixing"): ("_wkv7", wkv7),
    ("jamba", "JambaMambaMixer"): ("ssm_step", jamba_step),
    ("mamba", "MambaBlock"): ("_process_sequence", mamba_sequence),
}
"""The same for methods of its layers."""
