"""Every text model type of mlx-lm, tiny and with random weights: does a changing batch give what mlx-lm gives alone?

    python bench/equality.py [TYPE ...] [--disable NAME ...]

Tokens are compared, and the log-probability of each: a row that lost a part of its state often goes on to choose the
same tokens. The batch changes all the time: prompts of one token up to several windows arrive while others decode, rows
end, one is cancelled, and later prompts continue earlier ones, so that they begin in the prefix cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # the driver of an engine

from millstream.backend.environment import load_blas
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.kernels.cpu_kernels import keep_cpu_kernels
from millstream.engine.generation.messages import Generate
from millstream.engine.messages import Cancel
from model_types import SIZES, NotMade, model_types, write_model
from support.engines import Driver, engine

ROWS = 5
LENGTHS = (1, 2, 5, 17, 33, 40, 70, 130)
OUTPUTS = (1, 4, 12, 20)
NEAR = 2e-3
"""How far log-probabilities may lie from mlx-lm's: float32 in another order of summing."""
CANCELLED = 1000

Answer = tuple[list[int], list[float]]
"""Tokens, and the log-probability of each."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    model_type: str
    reason: str = ""
    """Why there is nothing to compare with: no model of this type can be made, or mlx-lm itself cannot run it here."""
    refused: str = ""
    """Why the engine did not load it."""
    rows: int = 0
    """How many rows the engine runs together."""
    different: int = 0
    """Answers with another token than mlx-lm's."""
    deviation: float = 0.0
    """The largest one of a log-probability."""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.reason and not self.refused and not self.different and self.deviation < NEAR

    def __str__(self) -> str:
        if self.reason:
            return f"{self.model_type:22} -       {self.reason}"
        if self.refused:
            return f"{self.model_type:22} -       REFUSED: {self.refused}"
        what = "equal" if self.equal else f"DIFFERENT: {self.different} answers"
        return f"{self.model_type:22} {self.rows} rows  {what}, deviation {self.deviation:.0e}, {self.seconds:.1f} s"


def check(model_type: str, folder: Path, **settings: Any) -> Verdict:
    """The verdict on one type. Its model is written to `folder`."""
    start = time.perf_counter()
    try:
        write_model(folder, model_type)
        reference = Reference(folder)
        if not reference.is_stable():
            return Verdict(model_type, "mlx-lm alone answers otherwise if it reads a prompt in other chunks")
    except NotMade as error:
        return Verdict(model_type, str(error))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # mlx-lm itself cannot run it here
        return Verdict(model_type, f"mlx-lm alone: {type(error).__name__}: {error}")
    make = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=ROWS, **settings))
    try:
        with engine(make, prefill_tokens=64) as driver:
            assert driver.facts is not None
            rows, notes = driver.facts.max_rows, driver.facts.notes
            pairs = changing_batch(driver, reference, random.Random(model_type))
    except AssertionError as error:
        return Verdict(model_type, refused=str(error))
    different = sum(ours[0] != alone[0] for ours, alone in pairs)
    deviation = max(
        abs(x - y) for ours, alone in pairs if ours[0] == alone[0] for x, y in zip(ours[1], alone[1], strict=True)
    )
    return Verdict(
        model_type,
        rows=rows,
        different=different,
        deviation=deviation,
        seconds=time.perf_counter() - start,
        notes=notes,
    )


class Reference:
    """mlx-lm alone: one row, greedy."""

    def __init__(self, folder: Path) -> None:
        from mlx_lm.utils import load_model

        self._model, _ = load_model(folder)

    def is_stable(self) -> bool:
        """Whether its answers do not depend on the chunks in which it reads a prompt."""
        draw = random.Random(0)
        prompt = tuple(draw.randrange(1, SIZES["tiny"].vocab) for _ in range(max(LENGTHS)))
        (tokens, logprobs), *others = (self.answer(prompt, 8, chunk) for chunk in (512, 48, 7))
        return all(
            tokens == each and all(abs(x - y) < NEAR for x, y in zip(logprobs, found, strict=True))
            for each, found in others
        )

    def answer(self, prompt: tuple[int, ...], count: int, chunk: int = 32) -> Answer:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        steps = generate_step(mx.array(prompt), self._model, max_tokens=count, prefill_step_size=chunk)
        found = [(int(token), logprobs[int(token)].item()) for token, logprobs in steps]
        return [token for token, _ in found], [logprob for _, logprob in found]


def changing_batch(driver: Driver, reference: Reference, draw: random.Random) -> list[tuple[Answer, Answer]]:
    """Each answer of the engine beside mlx-lm's."""
    vocab = SIZES["tiny"].vocab
    prompts = [tuple(draw.randrange(1, vocab) for _ in range(draw.choice(LENGTHS))) for _ in range(8)]
    wanted = [(prompt, draw.choice(OUTPUTS)) for prompt in prompts]
    driver.post(Generate(CANCELLED, (5, 6, 7, 8, 9), 400))
    driver.wait(lambda: bool(driver.tokens.get(CANCELLED)))
    first = _answers(driver, wanted, 0, after=lambda: driver.post(Cancel(CANCELLED)))
    # The longest prompts go on: their beginning, and what was answered, may be in the prefix cache.
    longest = sorted(range(len(wanted)), key=lambda index: -len(prompts[index]))[:3]
    onwards = [(prompts[index] + tuple(first[index][0]) + (3, 1, 4), 6) for index in longest]
    second = _answers(driver, onwards, len(wanted))
    alone = [reference.answer(prompt, count) for prompt, count in [*wanted, *onwards]]
    return list(zip([*first, *second], alone, strict=True))


def _answers(driver: Driver, wanted: list[tuple[tuple[int, ...], int]], begin: int, after: Any = None) -> list[Answer]:
    submits = [Generate(begin + index, prompt, count, logprobs=0) for index, (prompt, count) in enumerate(wanted)]
    for submit in submits:
        driver.post(submit)
    if after is not None:
        after()
    numbers = [submit.request_id for submit in submits]
    driver.wait_ended(*numbers)
    return [
        (driver.tokens.get(number, []), [entry.logprob for entry in driver.logprobs.get(number, [])])  # type: ignore[attr-defined]
        for number in numbers
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; else all that mlx-lm has")
    parser.add_argument("--disable", nargs="+", default=[], help="fast paths to leave out")
    parser.add_argument("--like-gpu", action="store_true", help="the layout of a GPU")
    parser.add_argument("--layout", default="auto", help="of the KV caches")
    arguments = parser.parse_args()
    settings = {
        "disabled": frozenset({"calibration", *arguments.disable}),
        "like_gpu": arguments.like_gpu,
        "layout": arguments.layout,
    }
    keep_cpu_kernels(Path(tempfile.gettempdir()) / "millstream-bench-kernels")
    load_blas()
    wrong = 0
    for model_type in arguments.types or model_types():
        with tempfile.TemporaryDirectory() as folder:
            verdict = check(model_type, Path(folder), **settings)
        print(verdict, flush=True)
        wrong += not verdict.equal and not verdict.reason
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
