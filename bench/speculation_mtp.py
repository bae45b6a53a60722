"""What a prediction head (MTP) gains in time, on the CPU or a GPU, with a small model that is trained here.

python bench/speculation_mtp.py [layers=6] [hidden=256] [steps=120] [rows=1,4] [out=160] [rounds=5]

A model and its head learn made-up sentences (`tests/support/mtp_models.py`), so that acceptance is real: words are
certain, the next word is not. Then the same prompts are answered with the head and without, in turns, by the
scheduler's own choice and with depths that are forced. All answers must be equal.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from millstream.backend.generation.backend import MlxGenerationBackend
from millstream.backend.generation.settings import GenerationSettings
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Finished, expanded
from support.mtp_models import mtp_config, published_names, sentences, train, write_folder

DEPTHS = (0, 1, 2, 4, None)
"""0: without drafts. None: what the scheduler chooses."""


class Subject:
    def __init__(self, folder: Path, rows: int) -> None:
        self.backend = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=rows, share_tokens=0))
        self.facts = self.backend.load()
        self._learning = make_scheduler(SchedulerSettings(), self.facts)
        self._number = 0

    def run(self, prompts: list[list[int]], out: int, depth: int | None) -> tuple[list[list[int]], float, int, int]:
        """The answers, seconds after all prompts were read, tokens proposed and accepted."""
        scheduler = self._learning if depth is None else make_scheduler(SchedulerSettings(), self.facts)
        found: dict[int, list[int]] = {}
        for prompt in prompts:
            self._number += 1
            found[self._number] = []
            scheduler.submit(Generate(self._number, tuple(prompt), out, speculate=depth != 0))
        ended = proposed = accepted = 0
        began = None
        while ended < len(prompts):
            plan = scheduler.plan()
            list(scheduler.started())
            began = time.perf_counter() if began is None and len(plan.decode) == len(prompts) else began
            if depth is not None:
                drafts = tuple((row, min(depth, out - len(found[row]) - 2)) for row in plan.decode)
                plan = replace(plan, drafts=tuple(each for each in drafts if each[1] > 0), guess=(), odds=None)
            step = time.perf_counter()
            result = self.backend.step(plan)
            for event in expanded(scheduler.advance(plan, result, time.perf_counter() - step)):
                if isinstance(event, Tokens):
                    found[event.request_id] += event.tokens
                ended += isinstance(event, Finished)
            proposed += sum(row.proposed for row in result.rows)
            accepted += sum(row.accepted for row in result.rows)
        seconds = time.perf_counter() - (began or time.perf_counter())
        plan = scheduler.plan()
        scheduler.advance(plan, self.backend.step(plan))  # drops the rows
        return list(found.values()), seconds, proposed, accepted


def main(arguments: list[str]) -> None:
    given = dict(each.split("=", 1) for each in arguments)
    layers, hidden, steps = (int(given.get(*each)) for each in (("layers", 6), ("hidden", 256), ("steps", 120)))
    out, rounds = int(given.get("out", 160)), int(given.get("rounds", 5))
    config = mtp_config(
        "mimo", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden, head_dim=hidden // 4
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        folder = write_folder(
            Path(root) / "mimo", config, published_names(config, *train(config, steps, batch=8, length=32))
        )
        counts = [int(each) for each in given.get("rows", "1,4").split(",")]
        subject = Subject(folder, max(counts))
        print(f"trained and loaded in {time.perf_counter() - began:.0f} s; {subject.facts.drafters}", flush=True)
        for rows in counts:
            prompts = sentences(77, rows, 24)
            seconds: dict[int | None, list[float]] = {depth: [] for depth in DEPTHS}
            right: dict[int | None, str] = {}
            for turn in range(-1, rounds):
                answers = []
                for depth in DEPTHS:
                    answer, took, proposed, accepted = subject.run(prompts, out, depth)
                    answers.append(answer)
                    right[depth] = f"{accepted} of {proposed} right"
                    if turn >= 0:
                        seconds[depth].append(took)
                if any(answer != answers[0] for answer in answers):
                    print(f"rows {rows}: answers differ", flush=True)
            plain = median(seconds[0])
            for depth in DEPTHS:
                name = "plain" if depth == 0 else "auto" if depth is None else f"depth {depth}"
                rate = rows * out / median(seconds[depth])
                gain = plain / median(seconds[depth])
                print(f"rows {rows} {name}: {rate:.0f} tokens/s, gain {gain:.2f}; {right[depth]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
