"""The decisions of the CUDA sampling kernel against the reference sampler. g++ compiles the kernel's own source."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.generation.sampling.sampler import seeds
from millstream.backend.kernels import sample
from millstream.types import Sampling
from support.cuda_on_host import compile_for_host, missing_compiler
from support.sampling_grid import disagreements, grid, reference_tokens

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

Kernel = Callable[[list[Sampling], mx.array, mx.array], list[int]]

PROGRAM = """
using T = float;
static const float *logits, *settings;
static const unsigned* seeds;
static const int* positions;
static const long* told;
static int *out, *next_positions, logits_shape[2];
HEADER
static void kernel() {
SOURCE
}
extern "C" void run(
    const float* x, const float* s, const unsigned* k, const int* p, int* tokens, int* next, const long* to, int rows,
    int count) {
  logits = x, settings = s, seeds = k, positions = p, out = tokens, next_positions = next, told = to;
  logits_shape[0] = rows, logits_shape[1] = count;
  for (int row = 0; row < rows; row++) run_block(row, kernel);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """Draws a token per row, as `sample.sample` does on a GPU."""
    program = PROGRAM.replace("HEADER", sample.HEADER).replace("SOURCE", sample.source(told=True))
    library = compile_for_host(program, tmp_path_factory.mktemp("kernel"), block_size=sample.THREADS)

    def draw(rows: list[Sampling], logits: mx.array, positions: mx.array) -> list[int]:
        given = (logits, sample.settings_of(rows), seeds(rows), positions.astype(mx.int32))
        inputs = [np.ascontiguousarray(np.array(each)) for each in given]
        tokens, following, told = (np.full(len(rows), -1, dtype=np.int32) for _ in range(3))
        address = np.array([told.ctypes.data], dtype=np.int64)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*inputs, tokens, following, address)]
        library.run(*pointers, *logits.shape)
        assert told.tolist() == tokens.tolist(), "the host is told the same"
        assert following.tolist() == (positions + 1).tolist()
        found: list[int] = tokens.tolist()
        return found

    return draw


def test_the_mass_of_top_p_is_taken_before_min_p_cuts(kernel: Kernel) -> None:
    rows = [Sampling(temperature=1.0, top_k=4, top_p=0.6, min_p=0.35, seed=3)] * 30
    logits = mx.broadcast_to(mx.log(mx.array([1.0, 0.5, 0.3, 0.2])), (30, 4))
    drawn = kernel(rows, logits, mx.arange(30))
    assert set(drawn) == {0, 1}
    assert drawn == reference_tokens(rows, logits, mx.arange(30))


def test_tokens_as_likely_as_the_kth_belong_to_the_top_k(kernel: Kernel) -> None:
    """Ties are common: logits are bf16. There is no order among them, so all of them count."""
    rows = [Sampling(temperature=1.0, top_k=2, top_p=0.6, seed=3)] * 60
    logits = mx.broadcast_to(mx.log(mx.array([1.0, 0.5, 0.5, 0.5])), (60, 4))
    drawn = kernel(rows, logits, mx.arange(60))
    assert set(drawn) == {0, 1, 2, 3}
    assert drawn == reference_tokens(rows, logits, mx.arange(60))


def test_every_combination_draws_what_the_reference_draws(kernel: Kernel) -> None:
    rows, logits, positions = grid()
    assert disagreements(rows, kernel(rows, logits, positions), reference_tokens(rows, logits, positions)) == []


@pytest.mark.parametrize(
    "row",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.8, top_k=40, seed=2),
        Sampling(temperature=1.2, top_p=0.9, min_p=0.05, seed=3),
        Sampling(temperature=1.2, top_k=200, top_p=0.8, min_p=0.02, seed=4),
        Sampling(temperature=1.0, top_p=0.0, top_k=-1, seed=5),
        Sampling(temperature=1.0, top_p=0.0, top_k=40, seed=6),
    ],
    ids=["all", "top-k", "top-p and min-p", "all three", "the best", "the best of some"],
)
def test_a_vocabulary_larger_than_a_block(kernel: Kernel, row: Sampling) -> None:
    """Each thread has several tokens, the last threads have none, and some tokens are masked out."""
    values = np.random.default_rng(5).normal(0, 2, (1, 2500)).astype(np.float32)
    values[0, ::7] = -np.inf
    logits = mx.broadcast_to(mx.array(values), (20, 2500))
    rows = [row] * 20
    assert kernel(rows, logits, mx.arange(20)) == reference_tokens(rows, logits, mx.arange(20))


@pytest.mark.parametrize("count", [5000, 5003], ids=["packs", "no packs"])
@pytest.mark.parametrize(
    "row",
    [
        Sampling(temperature=1.0, top_p=0.9, seed=1),
        Sampling(temperature=1.0, top_k=3000, top_p=0.7, seed=2),
        Sampling(temperature=1.0, top_k=30, seed=3),
        Sampling(temperature=0.1, top_p=0.5, min_p=0.01, seed=4),
    ],
    ids=["top-p", "top-k and top-p", "small top-k", "peaked"],
)
def test_a_flat_distribution(kernel: Kernel, row: Sampling, count: int) -> None:
    """What decides is deeper than the list of the likeliest tokens, or in it only after some attempts."""
    values = np.random.default_rng(6).normal(0, 0.5, (1, count)).astype(np.float32)
    logits = mx.broadcast_to(mx.array(values), (6, count))
    rows = [row] * 6
    assert kernel(rows, logits, mx.arange(6)) == reference_tokens(rows, logits, mx.arange(6))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_number_gives_a_token(kernel: Kernel, temperature: float) -> None:
    """It may be masked out completely. A token beyond the vocabulary would be read by the next step."""
    logits = mx.full((1, 40), -mx.inf)
    assert kernel([Sampling(temperature=temperature, top_p=0.9)], logits, mx.array([0])) == [0]
