"""Turns what the calibration measured into the numbers that the scheduler and the prefix cache run by. Pure.

Each number is a rule about cost, not about a device: an H200 prefills 64 tokens in a fraction of a millisecond and pays
5 ms per chunk, a laptop pays a millisecond per token. Numbers are rounded to powers of two or to whole blocks, and
bounded, so that noise in a measurement changes little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millstream.model_facts import Calibration, GenerationFacts

SATURATED = 0.9
"""Without running rows, a step prefills as many tokens as reach this share of the best throughput."""

GENTLE = 0.6
"""Beside running rows a chunk reaches this share at most: longer ones would only make the streams' gaps longer."""

PRESSURE = 4
"""When prompts queue, a chunk may be so many times as long as one without running rows."""

SAVE_SHARE = 0.1
"""Saving a prefix may cost this share of prefilling it again. Copies cost a GPU's host launches, and most prefixes are
never used again: with all saved, 64 streams of 260 tokens ran at 10,250 tokens/s on an H200, with none at 12,273."""

MAX_FREE_SECONDS = 0.01
"""Where a chunk costs more than this by itself, it is the weights that are read, and decode steps take as long."""

MAX_NEW_TOKENS = 1024
BLOCK_BYTES = 2 * 2**20
"""Per KV block. More blocks would only make the index slow: that of 8,000 tokens in blocks of 16 takes an H200's host 2
to 3 ms between two decode steps, where a step of a small model takes 2."""

PREFILL_BOUNDS, GENTLE_BOUNDS, SHORTEST_BOUNDS, BLOCK_BOUNDS = (256, 4096), (64, 512), (4, 64), (16, 64)
MAX_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Tuning:
    """The defaults are for a device that nothing is known of: short chunks, and all prefixes saved."""

    prefill_tokens: int = 256
    """Prompt tokens per step while no row decodes."""
    gentle_chunk: int = 128
    """The longest chunk of one prompt while rows decode and nobody waits long."""
    shortest_chunk: int = 4
    longest_chunk: int = 256
    """The longest chunk while rows decode and prompts queue."""
    free_seconds: float = 0.0
    """What a chunk may add to a decode step, however short that is."""
    fixed_seconds: float = 0.0
    """What a chunk costs however short it is."""
    block_tokens: int = 16
    """Tokens per KV block of the prefix cache."""
    min_new_tokens: int = 16
    """The fewest new tokens that are saved to the prefix cache."""
    token_seconds: float | None = None
    """What a prompt token costs, if it was measured."""
    gentle_token_seconds: float | None = None
    """The same in a chunk of `gentle_chunk`, where fixed costs count for more."""
    steps: tuple[tuple[int, float], ...] = ()
    """What decode steps cost: (rows, seconds)."""
    passes: tuple[tuple[int, float], ...] = ()
    """What passes over short prompts cost, (tokens, seconds), if the device can spread them over steps."""
    depth_cost: float = 0.0
    """By how much a prompt token costs more for each token before it, relative to the first."""


UNCALIBRATED = Tuning()


def tune(facts: GenerationFacts) -> Tuning:
    """The numbers for a model on its device."""
    if (measured := facts.calibration) is None:
        return UNCALIBRATED
    token_bytes = 0 if facts.prefix_sizes is None else facts.prefix_sizes.token
    prefill_tokens = _bounded(_length_at(measured, SATURATED), PREFILL_BOUNDS)
    gentle = _bounded(_length_at(measured, GENTLE), GENTLE_BOUNDS)
    block = block_tokens(token_bytes)
    return Tuning(
        prefill_tokens=prefill_tokens,
        gentle_chunk=gentle,
        shortest_chunk=shortest_chunk(measured),
        longest_chunk=min(MAX_CHUNK, PRESSURE * prefill_tokens),
        free_seconds=min(fixed_seconds(measured), MAX_FREE_SECONDS),
        fixed_seconds=fixed_seconds(measured),
        block_tokens=block,
        min_new_tokens=min_new_tokens(measured, token_bytes, block),
        token_seconds=token_seconds(measured),
        gentle_token_seconds=next(
            (seconds / tokens for tokens, seconds in measured.chunks if tokens >= gentle), token_seconds(measured)
        ),
        steps=measured.steps,
        passes=measured.passes,
        depth_cost=measured.depth_cost,
    )


def token_seconds(measured: Calibration) -> float:
    """The cost of one more token in a long chunk: that of a token at the best throughput."""
    return min(seconds / tokens for tokens, seconds in measured.chunks)


def fixed_seconds(measured: Calibration) -> float:
    """What a chunk costs however short it is: building its graph, launching it, reading the weights. From the shortest
    one, less its tokens by what they cost more in that with the best throughput."""
    tokens, seconds = measured.chunks[0]
    most, longest = min(measured.chunks, key=lambda chunk: chunk[1] / chunk[0])
    return max(0.0, seconds - tokens * (longest - seconds) / (most - tokens)) if most > tokens else 0.0


def shortest_chunk(measured: Calibration) -> int:
    """A chunk that spends half its time on tokens: cutting finer would slow the prompt down more than it helps the
    streams. Not shorter than the shortest one that was measured, if that does not either: on a CPU, 8 tokens take as
    long as 16."""
    tokens = fixed_seconds(measured) / token_seconds(measured)
    rule = _bounded(2 ** int(math.log2(max(1.0, tokens))), SHORTEST_BOUNDS)
    least = measured.chunks[0][0]
    return least if least / 2 < tokens < least else rule


def block_tokens(token_bytes: int) -> int:
    """About `BLOCK_BYTES`: 64 tokens of a small model, 16 of a large one.

    A fact of the model, not of the measurement: the block size is in the stamp of the files on disk, so one that
    changed with the noise of a load would throw them away.
    """
    least, most = BLOCK_BOUNDS
    return (
        most if not token_bytes else _bounded(2 ** int(math.log2(max(1.0, BLOCK_BYTES / token_bytes))), (least, most))
    )


def min_new_tokens(measured: Calibration, token_bytes: int, block: int) -> int:
    """The fewest new tokens whose save costs less than `SAVE_SHARE` of prefilling them again, in whole blocks."""
    gained = SAVE_SHARE * token_seconds(measured) - token_bytes * measured.save_seconds_per_byte
    tokens = min(MAX_NEW_TOKENS, measured.save_seconds / gained) if gained > 0 else MAX_NEW_TOKENS
    return max(1, math.ceil(tokens / block)) * block


def workspace_bytes(facts: GenerationFacts) -> int:
    """Memory beside weights and KV cache for the longest chunk: in proportion to the longest one that was measured. At
    most half of the weights: more was another engine's, since MLX counts per process."""
    if (measured := facts.calibration) is None:
        return 0
    scale = max(1.0, tune(facts).longest_chunk / measured.chunks[-1][0])
    return min(math.ceil(measured.workspace_bytes * scale), facts.weight_bytes // 2)


def describe(facts: GenerationFacts) -> list[str]:
    """What was measured and what follows from it, in lines for the log."""
    tuning, measured = tune(facts), facts.calibration
    chosen = (
        f"prefill: {tuning.prefill_tokens} tokens per step; beside running rows chunks of {tuning.shortest_chunk} to "
        f"{tuning.gentle_chunk}, up to {tuning.longest_chunk} when prompts queue; "
        f"{1e3 * tuning.free_seconds:.1f} ms of a chunk are free; prefix cache: blocks of {tuning.block_tokens} "
        f"tokens, saved from {tuning.min_new_tokens} new ones"
    )
    if measured is None:
        return [f"not calibrated; {chosen}"]
    chunks = ", ".join(f"{tokens}: {1e3 * seconds:.1f} ms" for tokens, seconds in measured.chunks)
    best = 1 / token_seconds(measured)
    steps = ", ".join(f"{rows}: {1e3 * seconds:.1f} ms" for rows, seconds in measured.steps)
    passes = ", ".join(f"{tokens}: {1e3 * seconds:.1f} ms" for tokens, seconds in measured.passes)
    verifying = ", ".join(f"{rows} x {length}: {1e3 * seconds:.1f} ms" for rows, length, seconds in measured.verifying)
    per_gib = 1e3 * measured.save_seconds_per_byte * 2**30
    lines = [
        f"chunks by tokens: {chunks}; at best {best:.0f} tokens/s, {1e3 * fixed_seconds(measured):.1f} ms fixed; "
        f"after 10,000 tokens {1 + 10_000 * measured.depth_cost:.1f} times as much per token",
        f"decode steps by rows: {steps}" + (f"; passes over short prompts by tokens: {passes}" if passes else ""),
        f"saving a prefix: {1e3 * measured.save_seconds:.2f} ms and {per_gib:.1f} ms per GiB; "
        f"workspace {measured.workspace_bytes / 2**20:.0f} MiB",
        chosen,
    ]
    return lines + ([f"verifying drafts by rows x tokens: {verifying}"] if verifying else [])


def _length_at(measured: Calibration, share: float) -> int:
    """The shortest chunk that reaches this share of the best throughput."""
    best = 1 / token_seconds(measured)
    return next(tokens for tokens, seconds in measured.chunks if tokens / seconds >= share * best)


def _bounded(value: int, bounds: tuple[int, int]) -> int:
    least, most = bounds
    return max(least, min(most, value))
