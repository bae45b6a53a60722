"""Whether the sampling kernel gives the reference's tokens on this device: a load asks before it relies on it."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from millstream.backend.generation.sampling.sampler import Sampler, seeds
from millstream.backend.kernels import sample
from millstream.backend.kernels.outbox import close_outbox, outbox
from millstream.types import Sampling

log = logging.getLogger(__name__)

ROWS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, top_p=0.7, seed=2),
    Sampling(temperature=1.3, top_k=20, seed=3),
    Sampling(temperature=1.0, top_k=200, top_p=0.9, min_p=0.01, seed=4),
)
VOCABULARY = 4096


def kernel_agrees(model: Any) -> bool:
    """Compares one step of rows with every kind of settings, for logits of the type that this model's have."""
    dtypes = [value.dtype for _, value in tree_flatten(model.parameters())]
    dtype = next((dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)), mx.float32)
    logits = (mx.random.normal((len(ROWS), VOCABULARY), key=mx.random.key(0)) * 3).astype(dtype)
    positions = mx.arange(len(ROWS), dtype=mx.int32)
    box = outbox()
    letter = None if box is None else box.take(len(ROWS))
    try:
        tokens, following = sample.sample(logits, sample.settings_of(ROWS), seeds(ROWS), positions, letter)
        mx.eval(tokens, following)
    except RuntimeError as error:  # it cannot be compiled or launched
        log.warning("the sampling kernel is not used: %s", error)
        return False
    if letter is not None and letter.read(len(ROWS)) != tokens.tolist():
        log.warning("tokens are read through MLX: what the sampling kernel wrote to the host's memory is not there")
        close_outbox()
    expected = Sampler(ROWS)(logits, positions)
    if mx.array_equal(tokens, expected).item() and mx.array_equal(following, positions + 1).item():
        return True
    log.warning("the sampling kernel is not used: it drew %s, not %s", tokens.tolist(), expected.tolist())
    return False
