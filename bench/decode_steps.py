"""What a decode step costs without HTTP, by rows, and how much of it the matmuls take.

    python bench/decode_steps.py demo --rows 1,4,16,32
    python bench/decode_steps.py demo --top-p 0.9 --temperature 0.7

Prints the median of some steps with prompts of 130 tokens, and their CPU time. `matmuls`: the products of one step with
all weights, one after the other and nothing between them. `operations`: those of MLX in a step, views included.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.backend.environment import load_blas

load_blas()  # before MLX is imported

import mlx.core as mx  # noqa: E402

from millstream.backend.generation.backend import MlxGenerationBackend  # noqa: E402
from millstream.backend.generation.layers.block_parts import weight_of  # noqa: E402
from millstream.backend.generation.settings import GenerationSettings  # noqa: E402
from millstream.backend.layers.cpu_linear import MklEmbedding  # noqa: E402
from millstream.backend.layers.projections import joined_layers  # noqa: E402
from millstream.engine.generation.messages import Generate  # noqa: E402
from millstream.engine.generation.plan import Plan, Prefill  # noqa: E402
from millstream.types import Sampling  # noqa: E402
from models import find  # noqa: E402

PROMPT, WARM_STEPS = 130, 5


def start(backend: MlxGenerationBackend, first: int, rows: int, vocabulary: int, sampling: Sampling) -> list[int]:
    """Rows that decode."""
    requests = [
        Generate(
            first + row,
            tuple((row * 7919 + place * 31 + 5) % vocabulary for place in range(PROMPT)),
            100_000,
            sampling=sampling.with_seed(row),
        )
        for row in range(rows)
    ]
    for request in requests:
        backend.step(Plan(prefill=(Prefill(request, 0, PROMPT - 1),)))
    return [request.request_id for request in requests]


def steps(backend: MlxGenerationBackend, ids: Sequence[int], count: int) -> tuple[float, float]:
    """The median of their times, and CPU time per step."""
    for _ in range(WARM_STEPS):
        backend.step(Plan(decode=tuple(ids)))
    times, cpu = [], time.process_time()
    for _ in range(count):
        began = time.perf_counter()
        backend.step(Plan(decode=tuple(ids)))
        times.append(time.perf_counter() - began)
    return statistics.median(times), (time.process_time() - cpu) / count


def operations(backend: MlxGenerationBackend) -> int:
    """Of the next step's logits. Its rows are lost."""
    batch = backend._batch
    assert batch is not None
    with tempfile.NamedTemporaryFile(suffix=".dot") as file:
        mx.export_to_dot(file.name, batch.forward())
        return len(re.findall(r"shape=rectangle", Path(file.name).read_text()))


def matmuls(model: Any, rows: int, repeats: int = 8) -> float:
    """The fastest run."""
    layers = [module for _, module in model.named_modules() if weight_of(module) is not None]
    calls: list[Any] = [*layers, *joined_layers(model)]
    inputs = [weight_of(layer).inputs for layer in calls]  # type: ignore[union-attr]
    if not any("lm_head" in name for name, _ in model.named_modules()):
        heads = [module.as_linear for _, module in model.named_modules() if isinstance(module, MklEmbedding)]
        inputs += [model.model.embed_tokens.weight.shape[1] for _ in heads]
        calls += heads
    given = {size: mx.random.normal((rows, 1, size)) for size in set(inputs)}
    mx.eval(given)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        mx.eval([call(given[size]) for call, size in zip(calls, inputs, strict=True)])
        times.append(time.perf_counter() - began)
    return min(times)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    settings = GenerationSettings("folder", find(arguments.model), max_rows=max(arguments.rows))
    backend = MlxGenerationBackend(settings)
    facts = backend.load()
    print(f"{facts.device}, {facts.weight_bytes / 1e6:.0f} MB of weights; {'; '.join(facts.notes)}")
    sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k)
    loaded = backend._loaded
    assert loaded is not None
    first = 1
    for rows in arguments.rows:
        ids = start(backend, first, rows, facts.vocab_size, sampling)
        first += rows
        seconds, cpu = steps(backend, ids, arguments.steps)
        alone = matmuls(loaded.assembly.model, rows)
        pace = f"{1e3 * seconds:6.1f} ms per step, {rows / seconds:6.1f} tokens/s, {1e3 * cpu:.1f} ms of CPU time"
        print(f"{rows:3} rows: {pace}; matmuls {1e3 * alone:.2f} ms; {operations(backend)} operations", flush=True)
        backend.reset()
    return 0


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of bench/models.py, or a folder")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4, 16, 32))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
