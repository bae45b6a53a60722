"""The limit of a server: mlx-lm's model in a plain loop, without HTTP, requests that come and go, or a choice of tokens
by row. Prompts are read in passes of 8, all rows are sampled at once, and each step is queued before the last is read.

    python bench/plain_loop.py FOLDER --levels 1,8,32 --prompt-tokens 500 --output-tokens 128
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from millstream.backend.environment import load_blas

load_blas()  # on a CPU the BLAS that ours has: MLX's own is a tenth as fast

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import _extend_cache, _merge_caches  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

TOGETHER = 8
"""Prompts in a pass, as in mlx-lm's own server."""
LONGEST = 2048
"""Columns of a pass."""


def run(model: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
    """Tokens/s of all rows together, and when their first tokens were there, in milliseconds."""
    start = time.perf_counter()
    caches: list[Any] = []
    firsts: list[float] = []
    tokens: mx.array | None = None
    for begin in range(0, len(prompts), TOGETHER):
        group = prompts[begin : begin + TOGETHER]
        cache = read(model, group)
        first = step(model, cache, mx.array([prompt[-1] for prompt in group]))
        mx.eval(first)
        firsts += [time.perf_counter() - start] * len(group)
        caches = _extend_cache(caches, cache)
        tokens = first if tokens is None else mx.concatenate([tokens, first])
    assert tokens is not None
    for _ in range(output_tokens - 1):
        following = step(model, caches, tokens)
        mx.async_eval(following)
        tokens.tolist()
        tokens = following
    tokens.tolist()
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": len(prompts) * output_tokens / seconds,
        "first_p50": statistics.median(firsts) * 1000,
        "first_worst": max(firsts) * 1000,
    }


def read(model: Any, group: list[list[int]]) -> list[Any]:
    """All tokens of these prompts but their last, in right-padded passes."""
    lengths = [len(prompt) - 1 for prompt in group]
    widest = max(lengths)
    cache = _merge_caches([make_prompt_cache(model) for _ in group]) if len(group) > 1 else make_prompt_cache(model)
    if len(group) > 1:
        for layer in cache:
            layer.prepare(lengths=lengths, right_padding=[widest - length for length in lengths])
    tokens = mx.array([prompt[:-1] + [0] * (widest - length) for prompt, length in zip(group, lengths, strict=True)])
    for begin in range(0, widest, LONGEST):
        model(tokens[:, begin : begin + LONGEST], cache=cache)
        mx.eval([layer.state for layer in cache])
    if len(group) > 1:
        for layer in cache:
            layer.finalize()
    return cache


def step(model: Any, cache: list[Any], tokens: mx.array) -> mx.array:
    return mx.argmax(model(tokens[:, None], cache=cache)[:, -1], axis=-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--levels", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many, after one that warms up")
    arguments = parser.parse_args()
    model, config = load_model(arguments.folder)
    vocab = config.get("vocab_size") or config["text_config"]["vocab_size"]
    found: dict[str, dict[str, float]] = {}
    for rows in map(int, arguments.levels.split(",")):
        draw = random.Random(rows)
        prompts = [[draw.randrange(1, vocab) for _ in range(arguments.prompt_tokens)] for _ in range(rows)]
        run(model, prompts, 4)
        rounds = [run(model, prompts, arguments.output_tokens) for _ in range(arguments.rounds)]
        found[str(rows)] = max(rounds, key=lambda figures: figures["tokens_per_second"])
        print(json.dumps({rows: found[str(rows)]}), file=sys.stderr, flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
