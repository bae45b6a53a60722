"""Embeddings on one device, without HTTP: what an engine computes per second, as a share of the device's peak.

Scheduler and backend are those of an engine. The peak is a large matmul, measured in the same run. FLOPs are those of
the inputs' own tokens: padding counts as time lost. Needs only mlx, mlx-lm, numpy and Millstream.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

import encoder_shapes
from embedding_inputs import lengths
from millstream.backend.environment import avoid_cudnn_attention, load_blas

ONE_BY_ONE = "one by one"
CASES = (("mixed", 1, ""), ("mixed", 64, ONE_BY_ONE), *((mix, count, "") for mix, count in (
    ("mixed", 64), ("mixed", 2048), ("short", 2048), ("full", 512),
)))  # fmt: skip
CPU_CASES = (("mixed", 64, ONE_BY_ONE), ("mixed", 64, ""), ("short", 64, ""), ("long", 64, ""))
QUICK_CASES = (("mixed", 16, ONE_BY_ONE), ("mixed", 16, ""))
ROUNDS = 3
HEADING = "| case | inputs/s | tokens/s | batches | padding | TFLOP/s | share of peak |\n|---|---|---|---|---|---|---|"


def measure(models: Sequence[tuple[str, str | None]], *, quick: bool, disabled: frozenset[str]) -> None:
    """`models`: shapes and the dtype of their weights, None for that of the published ones. `quick`: few inputs."""
    load_blas()
    avoid_cudnn_attention()
    if importlib.util.find_spec("huggingface_hub") is None:  # which mlx-lm imports for downloads
        hub: Any = ModuleType("huggingface_hub")
        hub.snapshot_download = None
        sys.modules[hub.__name__] = hub
    import mlx.core as mx

    from millstream.backend import mlx_lm_import  # noqa: F401  before all that imports mlx-lm
    from millstream.backend.device import current_device

    device = current_device()
    print(f"device: {device.kind} ({device.name}), mlx {mx.__version__}", flush=True)
    # bfloat16 is emulated on the CPU, where everything is computed in float32.
    names = ("float32",) if device.is_cpu else ("bfloat16", "float32")
    peaks = {name: _peak(name, 1024 if quick else 2048 if device.is_cpu else 8192) for name in names}
    for name, peak in peaks.items():
        print(f"peak in {name}, a matmul of large squares: {peak / 1e12:.3g} TFLOP/s", flush=True)
    for shape, dtype in models:
        cases = QUICK_CASES if quick else CPU_CASES if device.is_cpu else CASES
        _measure_model(shape, dtype, peaks, cases, disabled)


def _measure_model(
    shape: str,
    dtype: str | None,
    peaks: dict[str, float],
    cases: Sequence[tuple[str, int, str]],
    disabled: frozenset[str],
) -> None:
    from millstream.backend.encoders.backend import EncoderSettings, MlxEncoderBackend
    from millstream.engine.jobs.messages import Encode
    from millstream.engine.jobs.scheduler import JobScheduler
    from millstream.models.encoder_layout import read_layout

    folder = encoder_shapes.make_encoder(shape, dtype)
    backend = MlxEncoderBackend(EncoderSettings(folder, read_layout(folder), disabled=disabled))
    started = time.perf_counter()
    facts = backend.load()
    peak = peaks.get(facts.dtype, max(peaks.values()))
    print(
        f"\n{shape} in {facts.dtype}: loaded in {time.perf_counter() - started:.1f} s, batches of {facts.batch_tokens} "
        f"tokens, {facts.free_tokens} are as cheap as a step",
        flush=True,
    )
    tokens = facts.batch_tokens
    linear = _linear_rate(shape, tokens, facts.dtype)
    print(f"its linear layers alone, {tokens} tokens at once: {_rate(linear, peak)}", flush=True)
    print(HEADING, flush=True)
    vocabulary = min(30_000, encoder_shapes.SHAPES[shape]["vocab_size"])
    for mix, count, way in cases:
        sizes = [length + 2 for length in lengths(mix, count, 0)]  # with the special tokens around a text
        draw = np.random.default_rng(0)
        texts = tuple(draw.integers(4, vocabulary, size, np.int32).tobytes() for size in sizes)
        requests = [(text,) for text in texts] if way == ONE_BY_ONE else [texts]
        batches: list[int] = []

        def run(requests: Sequence[tuple[bytes, ...]] = requests, batches: list[int] = batches) -> None:
            batches.clear()
            scheduler = JobScheduler(facts)
            for request in requests:
                scheduler.submit(Encode(0, request))
                while not scheduler.idle:
                    plan = scheduler.plan()
                    batches.append(len(plan.inputs) * plan.length)
                    scheduler.advance(plan, backend.step(plan))

        seconds = _best(run)
        padding = 1 - sum(sizes) / sum(batches)
        flops = sum(encoder_shapes.input_flops(shape, size) for size in sizes)
        figures = f"{count / seconds:,.0f} | {sum(sizes) / seconds:,.0f} | {len(batches)} | {padding:.0%}"
        print(f"| {f'{count} {mix} {way}'.strip()} | {figures} | {_rate(flops / seconds, peak, ' | ')} |", flush=True)
    backend.close()


def _rate(flops: float, peak: float, between: str = " TFLOP/s, of the peak ") -> str:
    return f"{flops / 1e12:.3g}{between}{flops / peak:.0%}"


def _peak(dtype: str, size: int) -> float:
    import mlx.core as mx

    left, right = (mx.random.normal((size, size)).astype(getattr(mx, dtype)) for _ in range(2))
    mx.eval(left, right)
    count = 16
    return count * 2.0 * size**3 / _best(lambda: mx.eval([left @ right for _ in range(count)]))


def _linear_rate(shape: str, tokens: int, dtype: str) -> float:
    """FLOP/s of the matmuls of two layers."""
    import mlx.core as mx

    kind = getattr(mx, dtype)
    sizes = encoder_shapes.linear_sizes(shape) * 2
    weights = [mx.random.normal(size).astype(kind) for size in sizes]
    sources = {into: mx.random.normal((tokens, into)).astype(kind) for _, into in sizes}
    mx.eval(weights, sources)
    flops = 2.0 * tokens * sum(out * into for out, into in sizes)
    return flops / _best(lambda: mx.eval([sources[weight.shape[1]] @ weight.T for weight in weights]))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round; the first one, which compiles kernels, does not count."""
    work()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
