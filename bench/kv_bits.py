"""Measure a quantised KV cache: bytes per token, and the speed of prefill and decode.

python bench/kv_bits.py [FOLDER | FILE.gguf] [--rows 4] [--prompt 512] [--tokens 32] [--rounds 3]

Without a model: the demo model. Prints rates by wall and by CPU time: on a shared machine CPU time is more reliable.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from millstream.backend.environment import load_blas
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, Prefill
from millstream.models.source import resolve

Seconds = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    load_blas()
    from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend

    source = resolve(arguments.model, report=print)
    print("bits, bytes per token, bytes of the rows, prefill tokens/s (wall, CPU), decode tokens/s (wall, CPU)")
    for bits in (0, 8, 4):
        backend = MlxGenerationBackend(
            GenerationSettings(source.kind, source.path, max_rows=arguments.rows, kv_bits=bits, disabled=frozenset())
        )
        facts = backend.load()
        rounds = [measure(backend, arguments, facts.vocab_size, number) for number in range(arguments.rounds)]
        used = rounds[0][2] - facts.weight_bytes
        prefilled = rate(arguments.rows * (arguments.prompt - 1), [prompt for prompt, _, _ in rounds])
        decoded = rate(arguments.rows * arguments.tokens, [decode for _, decode, _ in rounds])
        print(f"{bits or 'none'}, {facts.kv_bytes_per_token}, {used}, {prefilled}, {decoded}", flush=True)
        backend.reset()
        del backend


def measure(backend: object, arguments: argparse.Namespace, vocabulary: int, seed: int) -> tuple[Seconds, Seconds, int]:
    """Prefill all prompts, then decode all rows. Returns both times and the memory in use at the end."""
    from millstream.backend.generation.backend import MlxGenerationBackend

    assert isinstance(backend, MlxGenerationBackend)
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(vocabulary) for _ in range(arguments.prompt)) for _ in range(arguments.rows)]
    submits = [Generate(number, prompt, arguments.tokens) for number, prompt in enumerate(prompts)]
    begun = now()
    for submit in submits:
        backend.step(Plan(prefill=(Prefill(submit, 0, arguments.prompt - 1),)))
    prefilled = now()
    ids = tuple(range(arguments.rows))
    for _ in range(arguments.tokens + 1):  # the tokens of a step arrive with the next step
        backend.step(Plan(decode=ids))
    ended = now()
    memory = backend.memory_bytes()
    backend.step(Plan(drop=ids))
    return since(begun, prefilled), since(prefilled, ended), memory


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(begun: Seconds, ended: Seconds) -> Seconds:
    return ended[0] - begun[0], ended[1] - begun[1]


def rate(tokens: int, times: list[Seconds]) -> str:
    """Tokens per second of the median round."""
    wall, cpu = (tokens / statistics.median(time[kind] for time in times) for kind in (0, 1))
    return f"{wall:.1f}, {cpu:.1f}"


if __name__ == "__main__":
    main()
