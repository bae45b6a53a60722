"""A thousand requests with all drafters, cancelled while passes verify: no wrong token, and nothing stays."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.drafters.grammar import GrammarDrafter
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.messages import Cancel, Failed
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import GrammarCompiler, compiler_of
from millstream.types import FinishReason, Grammar, Sampling, TokenLogprob
from support.drafting import DraftingScheduler, drafting
from support.engines import Driver, engine
from support.mixed_requests import Near
from support.tiers import is_whole
from support.tiny import write_servable

REQUESTS, KINDS = 1_000 if is_whole() else 400, 125
"""Each kind of request comes several times, and is cancelled at other tokens."""
ROWS = 8
VOCAB, END = 259, 258

KEYS = '{"type":"object","properties":{"amount_of_pieces":{"type":"integer","maximum":99},"colour":{"enum":["red",\
"green"]}},"required":["amount_of_pieces","colour"],"additionalProperties":false}'
GRAMMARS = (
    Grammar("json_schema", KEYS),
    Grammar("regex", "(yes|no), (because of the weather|because it was late)[.!]"),
    Grammar("lark", 'start: "<call>" ("find_the_station" | "find_the_harbour") "</call>"'),
)


def kinds(seed: int) -> list[Generate]:
    """Greedy and sampled, penalties, bias, log-probabilities, minimum lengths, stop tokens, grammars."""
    draw = random.Random(seed)
    found = []
    for number in range(KINDS):
        grammar = draw.choice([None, None, *GRAMMARS])
        stops = {END} if grammar is not None else set(draw.sample(range(VOCAB), draw.choice([0, 8])))
        loop = tuple(draw.randrange(VOCAB) for _ in range(draw.choice([2, 3, 5])))
        found.append(
            Generate(
                number,
                (*(draw.randrange(VOCAB) for _ in range(draw.choice([1, 4, 20]))), *loop * draw.choice([0, 1, 3])),
                48 if grammar is not None else draw.choice([1, 4, 12, 24]),
                Sampling(
                    temperature=draw.choice([0.0, 0.0, 0.8]),
                    top_p=draw.choice([1.0, 0.9]),
                    seed=draw.randrange(2**40),
                    repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
                    frequency_penalty=draw.choice([0.0, 0.0, 0.6]),
                    logit_bias=draw.choice([(), ((5, 2.0), (7, -100.0))]),
                ),
                stop_tokens=frozenset(stops),
                min_tokens=draw.choice([0, 0, 6]) if grammar is None else 0,
                logprobs=draw.choice([None, None, 0, 2]),
                grammar=grammar,
            )
        )
    return found


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[tuple[int, float]]
    reason: FinishReason


def answers(driver: Driver, wanted: Sequence[Generate]) -> dict[int, Answer]:
    driver.complete(*wanted)
    return {submit.request_id: answer(driver, submit.request_id) for submit in wanted}


def answer(driver: Driver, request_id: int) -> Answer:
    [end] = driver.ends[request_id]
    assert isinstance(end, Generated), end
    scores = [score for score in driver.logprobs.get(request_id, []) if isinstance(score, TokenLogprob)]
    numbers = [(score.token, Near(score.logprob)) for score in scores]
    return Answer(driver.tokens.get(request_id, []), numbers, end.reason)


def predicted(submit: Generate, known: Answer, draw: random.Random) -> tuple[int, ...]:
    """The answer as a client might expect it: right, with changes, or something else."""
    tokens = [draw.randrange(VOCAB) if draw.random() < 0.1 else token for token in known.tokens]
    return draw.choice([(), (), tuple(known.tokens), tuple(tokens), submit.prompt])


@dataclass
class Storm:
    """Sends requests, some at a time, and cancels half of them after a random number of tokens."""

    driver: Driver
    draw: random.Random
    known: dict[int, Answer]
    limits: dict[int, int] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)

    def run(self, wanted: Sequence[Generate]) -> None:
        waiting = list(reversed(wanted))
        flying: set[int] = set()
        while waiting or flying:
            while waiting and len(flying) < 2 * ROWS:
                submit = waiting.pop()
                flying.add(submit.request_id)
                if self.draw.random() < 0.5:
                    self.limits[submit.request_id] = self.draw.randrange(12)
                self.driver.post(submit)
            before = len(flying)
            self.driver.wait(functools.partial(self._moved, flying, before))

    def _moved(self, flying: set[int], before: int) -> bool:
        """After each batch of events: the owner is in its next step meanwhile."""
        for request_id in list(flying):
            if request_id in self.driver.ends:
                flying.discard(request_id)
            elif request_id not in self.cancelled and self._is_due(request_id):
                self.cancelled.add(request_id)
                self.driver.post(Cancel(request_id))
        return len(flying) < before

    def _is_due(self, request_id: int) -> bool:
        limit = self.limits.get(request_id)
        return limit is not None and len(self.driver.tokens.get(request_id, ())) >= limit


class Kept:
    """Makes the backend and the scheduler of the engine, and remembers them."""

    backend: MlxGenerationBackend
    scheduler: GenerationScheduler

    def __init__(self, folder: Path, compiler: GrammarCompiler) -> None:
        self._settings = GenerationSettings("folder", folder, max_rows=ROWS, grammars=compiler)

    def make_backend(self) -> MlxGenerationBackend:
        self.backend = MlxGenerationBackend(self._settings)
        return self.backend

    def make_scheduler(self, facts: GenerationFacts) -> GenerationScheduler:
        self.scheduler = drafting(11, facts, chance=0.8, preempt=0.005)
        return self.scheduler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_servable(tmp_path_factory.mktemp("storm") / "tiny")


def held_bytes(kept: Kept) -> int:
    """Of an idle engine. What it measures by itself may be of its last busy second."""
    backend = kept.backend
    assert backend._batch is not None and backend._prefiller is not None
    return backend._batch.nbytes + backend._prefiller.nbytes + backend._store.nbytes


def check_nothing_stays(kept: Kept) -> None:
    backend, scheduler = kept.backend, kept.scheduler
    assert scheduler.idle and scheduler.kv_tokens() == 0
    assert backend._batch is not None and not backend._batch.ids and not backend._batch.guided
    assert backend._speculating.rows == 0
    for drafter in backend._speculating.drafts.drafters:
        tables = [table for name, table in vars(drafter).items() if isinstance(table, dict | set | list)]
        assert not any(tables), f"{drafter.name} remembers rows: {tables}"
    assert any(isinstance(drafter, GrammarDrafter) for drafter in backend._speculating.drafts.drafters)


def test_hundreds_of_requests_cancelled_in_the_middle(folder: Path) -> None:
    compiler = compiler_of(ModelSource("tiny", "folder", folder))
    plain = [replace(submit, speculate=False) for submit in kinds(3)]
    settings = GenerationSettings("folder", folder, max_rows=ROWS, grammars=compiler)
    with engine(lambda: MlxGenerationBackend(settings), prefill_tokens=16) as driver:
        known = answers(driver, plain)
    draw = random.Random(4)
    wanted = [
        replace(submit, request_id=number, speculate=draw.random() < 0.95, prediction=predicted(submit, right, draw))
        for number in range(REQUESTS)
        for submit, right in [(plain[number % KINDS], known[number % KINDS])]
    ]
    draw.shuffle(wanted)
    DraftingScheduler.passes = 0
    kept = Kept(folder, compiler)
    with engine(kept.make_backend, make_scheduler=kept.make_scheduler) as driver:
        storm = Storm(driver, draw, known)
        storm.run(wanted[: REQUESTS // 4])
        driver.wait(lambda: kept.scheduler.idle)
        early = held_bytes(kept)
        storm.run(wanted[REQUESTS // 4 :])
        driver.wait(lambda: kept.scheduler.idle)
        accepted = rejected = 0
        for submit in wanted:
            [end] = driver.ends[submit.request_id]
            assert not isinstance(end, Failed), end
            got, right = answer(driver, submit.request_id), known[submit.request_id % KINDS]
            if got.reason is FinishReason.CANCELLED:
                assert submit.request_id in storm.cancelled
                assert got.tokens == right.tokens[: len(got.tokens)]
                assert got.logprobs == right.logprobs[: len(got.logprobs)]
            else:
                assert got == right
            assert isinstance(end, Generated)
            accepted += end.usage.accepted_prediction_tokens
            rejected += end.usage.rejected_prediction_tokens
        check_nothing_stays(kept)
        assert accepted > REQUESTS and rejected > REQUESTS / 2 and DraftingScheduler.passes > REQUESTS / 4
        assert len(storm.cancelled) > REQUESTS / 5
        assert held_bytes(kept) <= early
