"""What speculation gains by how often drafts are right, beside what theory allows. Without HTTP.

python bench/speculation_oracle.py MODEL [rows=1,4,16,32] [accept=0.5,0.7,0.9,1.0] [out=96] [seconds=50]

MODEL is a name of bench/models.py or a model folder. First the target answers without speculation. Then a drafter that
costs nothing proposes what the target is going to say, each token wrong with a given probability. For each number of
rows, probability and depth: tokens/s, the gain over plain steps, tokens per pass, and two bounds: what so many right
drafts are worth if a pass took as long as it was measured to, and if it took as long as a plain step. "auto" lets the
scheduler choose the depth.

In half precision a pass of another shape rounds differently, so a near tie may fall the other way. Rows that differ
from the plain answer are counted, with the distance of the two choices in the plain model's logits; and each depth's
own answer is what its drafter knows, so that acceptance is as asked.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from millstream.backend.generation.backend import MlxGenerationBackend
from millstream.backend.generation.settings import GenerationSettings
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.plan import Plan
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Finished, expanded
from models import find

DEPTHS: dict[float, tuple[int, ...]] = {0.5: (1,), 0.7: (1, 2, 4), 0.9: (2, 4, 8), 1.0: (4, 8)}
"""Depths that are worth trying, by acceptance. Those whose passes would not give the numbers of plain steps are left
out."""

PROMPT = 100

Answers = dict[tuple[int, ...], tuple[int, ...]]
"""By prompt."""


class KnownDrafter:
    """Knows the answer to each prompt, and proposes it with errors."""

    name = "known"
    cheap = True

    def __init__(self) -> None:
        self.answers: Answers = {}
        self.accept = 1.0
        self._rows: dict[int, tuple[tuple[int, ...], int]] = {}
        self._draw = random.Random(0)

    def join(self, submit: Generate) -> None:
        asked = submit.prompt[: len(submit.prompt) - submit.resumed]
        self._rows[submit.request_id] = (self.answers.get(asked, ()), submit.resumed)

    def drop(self, ids: set[int]) -> None:
        for request_id in ids:
            self._rows.pop(request_id, None)

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        if request_id in self._rows:
            answer, at = self._rows[request_id]
            self._rows[request_id] = (answer, at + len(tokens))

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        found = {}
        for request_id, most in wanted.items():
            answer, at = self._rows.get(request_id, ((), 0))
            if draft := tuple(map(self._said, answer[at : at + most])):
                found[request_id] = draft
        return found

    def _said(self, token: int) -> int:
        return token if self._draw.random() < self.accept else token ^ 1


@dataclass
class Run:
    """What a run of some rows showed, over the steps in which all of them decoded and nothing else happened."""

    answers: Answers = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0
    passes: list[float] = field(default_factory=list)
    """Seconds of those steps."""
    proposed: int = 0
    accepted: int = 0
    verified: int = 0
    """Rows times passes that verified a draft."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Oracle:
    def __init__(self, folder: Path, rows: int, vocabulary: int = 30000) -> None:
        self.drafter = KnownDrafter()
        self.backend = MlxGenerationBackend(
            GenerationSettings("folder", folder, max_rows=rows, share_tokens=0), drafters=[self.drafter]
        )
        began = time.perf_counter()
        self.facts = self.backend.load()
        self.load_seconds = time.perf_counter() - began
        self._draw = random.Random(0)
        self._vocabulary = min(self.facts.vocab_size, vocabulary)
        self._ids = itertools.count(1)
        self._learning = make_scheduler(SchedulerSettings(), self.facts)
        self._all_began = False

    def prompts(self, rows: int) -> list[tuple[int, ...]]:
        return [tuple(self._draw.randrange(10, self._vocabulary) for _ in range(PROMPT)) for _ in range(rows)]

    def run(self, prompts: Sequence[tuple[int, ...]], out: int, depth: int | None) -> Run:
        """`depth`: 0 for plain steps, None for what the scheduler chooses."""
        # One that chooses by itself goes on to learn.
        scheduler = self._learning if depth is None else make_scheduler(SchedulerSettings(), self.facts)
        submits = [Generate(next(self._ids), prompt, out, speculate=depth != 0) for prompt in prompts]
        for submit in submits:
            scheduler.submit(submit)
        found: dict[int, list[int]] = {submit.request_id: [] for submit in submits}
        run, ended, settled = Run(), 0, 0
        self._all_began = False
        while ended < len(submits):
            began = time.perf_counter()
            plan = self._plan(scheduler, found, out, depth, len(submits))
            result = self.backend.step(plan)
            events = scheduler.advance(plan, result, time.perf_counter() - began)
            seconds = time.perf_counter() - began
            for event in expanded(events):
                if isinstance(event, Tokens):
                    found[event.request_id].extend(event.tokens)
                ended += isinstance(event, Finished)
            # Not where drafts get shorter because the answers end.
            left = out - max(map(len, found.values())) > (depth or 0) + 2
            alike = len(plan.decode) == len(submits) and not plan.prefill and left
            settled = settled + 1 if alike else 0
            if settled > 2:
                run.seconds += seconds
                run.passes.append(seconds)
                run.tokens += sum(len(row.tokens) for row in result.rows)
                run.proposed += sum(row.proposed for row in result.rows)
                run.accepted += sum(row.accepted for row in result.rows)
                run.verified += sum(row.proposed > 0 for row in result.rows)
        plan = scheduler.plan()
        scheduler.advance(plan, self.backend.step(plan))  # drops the rows
        run.answers = {submit.prompt: tuple(found[submit.request_id]) for submit in submits}
        return run

    def _plan(
        self, scheduler: GenerationScheduler, found: Mapping[int, Sequence[int]], out: int, depth: int | None, rows: int
    ) -> Plan:
        """Nobody drafts before all rows decode: the first would have ended when the last begin."""
        plan = scheduler.plan()
        list(scheduler.started())
        self._all_began = self._all_began or len(plan.decode) == rows
        if not self._all_began:
            return dataclasses.replace(plan, drafts=(), odds=None)
        if depth is None:
            return plan
        # A step that is not read yet has given one more.
        drafts = tuple((row, min(depth, out - len(found[row]) - 2)) for row in plan.decode)
        return dataclasses.replace(plan, drafts=tuple(each for each in drafts if each[1] > 0), guess=(), odds=None)

    def gap(self, prompt: tuple[int, ...], one: Sequence[int], other: Sequence[int]) -> float | None:
        """If two answers differ: how far their first different choices are apart, in standard deviations of logits."""
        import mlx.core as mx

        at = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if at is None:
            return None
        assert self.backend._loaded is not None
        model = self.backend._loaded.assembly.model
        logits = model(mx.array([[*prompt, *one[:at]]]))[0, -1].astype(mx.float32)
        distance = mx.abs(logits[one[at]] - logits[other[at]]) / mx.std(logits)
        return float(distance.item())  # type: ignore[arg-type]


def expected(accept: float, depth: int) -> float:
    """Tokens per pass if each draft token is right with that probability: those before the first wrong one, and one."""
    return float(sum(accept**number for number in range(depth + 1)))


def differences(oracle: Oracle, plain: Answers, other: Answers) -> str:
    gaps = [oracle.gap(prompt, plain[prompt], other[prompt]) for prompt in plain if plain[prompt] != other[prompt]]
    known = [gap for gap in gaps if gap is not None]
    return f"{len(gaps)} of {len(plain)} rows not as plain" + (f", by at most {max(known):.3f} std" if known else "")


def measure(oracle: Oracle, rows: int, accepts: Sequence[float], out: int) -> Iterator[str]:
    """The lines of some rows."""
    prompts = oracle.prompts(rows)
    oracle.run(prompts, 8, 0)
    plain = oracle.run(prompts, out, 0)
    again = oracle.run(prompts, out, 0)
    step = median(again.passes)
    yield (
        f"rows {rows}: plain {again.rate:.0f} tokens/s, step {1e3 * step:.2f} ms"
        f"{'' if plain.answers == again.answers else '; twice the same is not the same'}"
    )
    known: dict[int, Answers] = {}
    for accept in sorted(accepts, reverse=True):
        widest = oracle.facts.widest_pass(rows) or (0 if oracle.facts.exact_passes else sys.maxsize)
        for depth in (each for each in DEPTHS.get(accept, (2, 4)) if rows * (each + 1) <= widest):
            note = ""
            if depth not in known:
                # Compiles what this shape needs, and learns what it answers.
                oracle.drafter.accept, oracle.drafter.answers = 1.0, plain.answers
                known[depth] = oracle.run(prompts, out, depth).answers
                note = f"; {differences(oracle, plain.answers, known[depth])}"
            oracle.drafter.accept, oracle.drafter.answers = accept, known[depth]
            run = oracle.run(prompts, out, depth)
            told = line(f"accept {accept} depth {depth}", run, again.rate, step, expected(accept, depth), known[depth])
            yield told + note
        oracle.drafter.accept, oracle.drafter.answers = accept, plain.answers
        run = oracle.run(prompts, out, None)
        told = line(f"accept {accept} auto", run, again.rate, step, None, None)
        yield f"{told}; {differences(oracle, plain.answers, run.answers)}"


def line(name: str, run: Run, rate: float, step: float, tokens: float | None, answers: Answers | None) -> str:
    pass_seconds = median(run.passes) if run.passes else float("nan")
    told = (
        f"  {name}: {run.rate:.0f} tokens/s, gain {run.rate / rate:.2f}, pass {1e3 * pass_seconds:.2f} ms, "
        f"accepted {run.accepted / max(1, run.verified):.2f} of {run.proposed / max(1, run.verified):.2f}"
    )
    if tokens is not None:
        told += f"; theory {tokens * step / pass_seconds:.2f} at this pass, {tokens:.2f} if it were free"
    if answers is not None and run.answers != answers:
        told += f"; {sum(run.answers[each] != answers[each] for each in answers)} rows not as before"
    return told


def main(arguments: Sequence[str]) -> None:
    name, given = arguments[0], dict(each.split("=", 1) for each in arguments[1:])
    rows = [int(each) for each in given.get("rows", "1,4,16,32").split(",")]
    accepts = [float(each) for each in given.get("accept", "0.5,0.7,0.9,1.0").split(",")]
    out, limit = int(given.get("out", 96)), float(given.get("seconds", 50))
    if given.get("kernels"):
        from millstream.backend.device import use_device

        use_device(None, Path(given["kernels"]))
    folder = Path(name) if Path(name).is_dir() else find(name)
    oracle = Oracle(folder, max(rows))
    began = time.perf_counter()
    print(f"{name}: loaded in {oracle.load_seconds:.1f} s; {'; '.join(oracle.facts.notes)}"[:600], flush=True)
    if not oracle.facts.drafters:
        print("this model does not speculate", flush=True)
        return
    for number in rows:
        for told in measure(oracle, number, accepts, out):
            print(f"[{time.perf_counter() - began:5.1f}] {told}", flush=True)
            if time.perf_counter() - began > limit:
                print("out of time: the rest is left out", flush=True)
                return


if __name__ == "__main__":
    main(sys.argv[1:])
