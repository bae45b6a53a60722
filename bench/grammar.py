"""Measure the cost of structured output: decode with and without a grammar, and the share of a step spent on masks.

python bench/grammar.py --model demo --rows 1,8,32

Runs the backend without HTTP. `masks` is the time that Python and llguidance spend on the masks of a step. A GPU
computes the logits meanwhile, so masks slow a step down only if they take longer than that. On the CPU, MLX has done
most of the work when it returns, so the masks add to the step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.backend.environment import avoid_cudnn_attention, load_blas
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.plan import RowOutput
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.messages import expanded
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import GrammarCompiler, compiler_of
from millstream.types import Grammar, Sampling
from models import find

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mail": {"type": "string", "pattern": "^[a-z.]{1,12}@[a-z]{1,12}\\.(com|org)$"},
        "role": {"enum": ["admin", "user", "guest"]},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
    },
    "required": ["name", "age", "mail", "role", "scores"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1000}
"""Never complete before max_tokens, so that all runs generate the same number of tokens."""

GRAMMARS = {
    "none": None,
    "any JSON": Grammar("json_schema", json.dumps({"type": "array", "minItems": 1000})),
    "schema": Grammar("json_schema", json.dumps(ENDLESS)),
    "regex": Grammar("regex", "([A-Z][a-z]{1,12}( [a-z]{1,12}){2,9}[.] ){1000}"),
}


@dataclass(frozen=True)
class Run:
    seconds: float
    """Seconds per step."""
    tokens: dict[int, list[int]]


def run(backend: MlxGenerationBackend, grammar: Grammar | None, rows: int, count: int) -> Run:
    """Time the steps from the first one in which all rows decode."""
    backend.reset()
    scheduler = GenerationScheduler(max_rows=rows, prefill_tokens=4096)
    for number in range(rows):
        prompt = tuple(range(50 + number, 82 + number))
        scheduler.submit(Generate(number, prompt, count, Sampling(temperature=1.0, seed=number), grammar=grammar))
    tokens: dict[int, list[int]] = {number: [] for number in range(rows)}
    started, steps = 0.0, 0
    while not scheduler.idle:
        plan = scheduler.plan()
        for event in expanded(scheduler.advance(plan, backend.step(plan))):
            if isinstance(event, Tokens):
                tokens[event.request_id] += event.tokens
        steps += bool(started)
        started = started or (time.perf_counter() if plan.decode else 0.0)
    return Run((time.perf_counter() - started) / steps, tokens)


def masks(compiler: GrammarCompiler, grammar: Grammar, done: Run, vocab_size: int) -> float:
    """The same answers again without a model: seconds of a step."""
    guides = Guides(compiler, vocab_size)
    places = {number: number for number in done.tokens}
    for number in done.tokens:
        guides.add(Generate(number, (0,), 1, grammar=grammar))
    guides.advance([], places)
    length = min(map(len, done.tokens.values()))
    started = time.perf_counter()
    for place in range(length):
        guides.advance([RowOutput(number, (line[place],)) for number, line in done.tokens.items()], places)
    return (time.perf_counter() - started) / length


def measure(folder: ModelSource, rows: int, count: int, repeat: int, names: Sequence[str]) -> None:
    compiler = compiler_of(folder)
    backend = MlxGenerationBackend(GenerationSettings(folder.kind, folder.path, max_rows=rows, grammars=compiler))
    facts = backend.load()
    best: dict[str, Run] = {}
    for _ in range(repeat):
        # Interleaved, so that other load on the machine affects all of them.
        for name in names:
            done = run(backend, GRAMMARS[name], rows, count)
            if name not in best or done.seconds < best[name].seconds:
                best[name] = done
    for name, done in best.items():
        grammar = GRAMMARS[name]
        spent = 0.0
        if grammar is not None:
            spent = min(masks(compiler, grammar, done, facts.vocab_size) for _ in range(repeat))
        slower = done.seconds / best["none"].seconds - 1
        print(
            f"| {rows} | {name} | {rows / done.seconds:,.0f} | {done.seconds * 1e3:.2f} | {slower:+.1%} "
            f"| {spent * 1e3:.2f} | {spent / done.seconds:.1%} |",
            flush=True,
        )
    backend.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--grammars", type=lambda text: text.split(","), default=list(GRAMMARS))
    arguments = parser.parse_args()
    folder = ModelSource(arguments.model, "folder", find(arguments.model))
    print("| rows | grammar | tokens/s | ms per step | against none | ms of masks | share |")
    print("|---|---|---|---|---|---|---|")
    for rows in arguments.rows:
        measure(folder, rows, arguments.tokens, arguments.repeat, ["none", *arguments.grammars[1:]])
    return 0


if __name__ == "__main__":
    load_blas()
    avoid_cudnn_attention()
    from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
    from millstream.backend.generation.sampling.guides import Guides

    sys.exit(main())
