"""Rows that are preempted at random steps give, token for token, what undisturbed rows give."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.generation.tuning import SchedulerSettings, limit_context, make_scheduler
from millstream.types import Grammar, Sampling
from support.engines import engine
from support.guided import guided_backend
from support.mixed_requests import mixed, seen
from support.preempting import PreemptingScheduler, preempting
from support.tiers import some
from support.tiny import FAMILIES, VOCAB, write_model, write_tokenizer
from support.tiny_vision import Case

END = 258
"""The byte tokenizer's <|im_end|>."""


def backend(folder: Path, **changes: Any) -> Callable[[], MlxGenerationBackend]:
    return lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=5, **changes))


@pytest.fixture(autouse=True)
def _preempts() -> None:
    PreemptingScheduler.preemptions = 0


@pytest.mark.parametrize(
    ("family", "path"),
    [
        *some([(family, "") for family in FAMILIES], [("gemma3_text", ""), ("mamba2", ""), ("falcon_h1", "")]),
        ("llama", "like_gpu"),
        *some([("llama", "merged")], []),
    ],
)
def test_preempted_rows_go_on_as_if_nothing_had_happened(
    family: str, path: str, tiny_model: Callable[[str], Path], whole: bool
) -> None:
    changes = {"like_gpu": path == "like_gpu", "disabled": frozenset({"slots"} if path == "merged" else ())}
    make = backend(tiny_model(family), **changes)
    wanted = mixed(len(family), 30 if whole else 10)
    with engine(make, prefill_tokens=16) as driver:
        expected = seen(driver, wanted, cached=False)
    for cache in (None, 10_000, 30) if whole else (None, 30):
        with engine(make, make_scheduler=functools.partial(preempting, 5, cache=cache)) as driver:
            assert seen(driver, wanted, cached=False) == expected, f"with a cache of {cache} blocks"
    assert PreemptingScheduler.preemptions > 5


def test_a_quantised_cache(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "wide", "llama", head_dim=64)
    draw = random.Random(4)
    wanted = [Generate(number, tuple(draw.randrange(VOCAB) for _ in range(12)), 25) for number in range(8)]
    make = backend(folder, kv_bits=8)
    with engine(make) as driver:
        expected = seen(driver, wanted)
    with engine(make, make_scheduler=functools.partial(preempting, 5)) as driver:
        assert seen(driver, wanted) == expected
    assert PreemptingScheduler.preemptions > 5


def test_grammars_go_on_where_they_were(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "guided", "llama", vocab_size=259)
    write_tokenizer(folder)
    make = functools.partial(guided_backend, folder, {})
    grammars = [
        Grammar("regex", "20[0-9]{2}-(0[1-9]|1[0-2])-[0-9]{2}T[0-9]{2}:[0-9]{2}"),
        Grammar("lark", 'start: ("ab" | "c")+ "."'),
        Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'),
        None,
    ]
    wanted = [
        Generate(
            number,
            (1, 2, 3),
            24,
            Sampling(temperature=1.0, seed=number, presence_penalty=0.1 * (number % 2)),
            stop_tokens=frozenset({END}),
            grammar=grammars[number % 4],
            logprobs=1,
        )
        for number in range(12)
    ]
    with engine(make) as driver:
        expected = seen(driver, wanted)
    with engine(make, make_scheduler=functools.partial(preempting, 6)) as driver:
        assert seen(driver, wanted) == expected
    assert PreemptingScheduler.preemptions > 5


@pytest.mark.parametrize(
    "family", some(["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "pixtral"], ["qwen3_vl", "gemma4"])
)
def test_rows_with_images(family: str, vision_model: Callable[[str], Path]) -> None:
    """M-RoPE shifts positions for each request, and in Gemma no chunk may end inside an image."""
    draw = random.Random(family)
    wanted = [
        Case(family, draw.randrange(1000), [draw.randrange(5) for _ in range(number % 3)], words=3, count=12).submit(
            number
        )
        for number in range(8)
    ]
    make = backend(vision_model(family), feature_bytes=1)
    with engine(make) as driver:
        expected = seen(driver, wanted)
    with engine(make, make_scheduler=functools.partial(preempting, 7)) as driver:
        assert seen(driver, wanted) == expected
    with engine(make, make_scheduler=functools.partial(preempting, 7, cache=1000)) as driver:
        assert seen(driver, wanted, cached=False) == [(*each[:-1], each[-1][:2]) for each in expected]  # type: ignore[index, misc]
    assert PreemptingScheduler.preemptions > 5


@pytest.mark.parametrize(("family", "tokens", "prompt"), [("llama", 6000, 180), ("gemma3_text", 2500, 180)])
def test_memory_stays_below_its_budget_at_every_step(family: str, tokens: int, prompt: int, tmp_path: Path) -> None:
    """Weights, rows, prompts and the prefix cache, in memory for a few of many rows."""
    folder = write_model(tmp_path / family, family, num_hidden_layers=2, max_position_embeddings=4096)
    subject = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=12))
    facts = subject.load()
    memory = facts.weight_bytes + tokens * facts.kv_bytes_per_token
    settings = SchedulerSettings(memory=memory, prefix_cache_bytes=2**30)
    context = limit_context(facts, memory, settings.prefix_cache_bytes).context_length
    assert 256 <= context < 4096
    scheduler, draw, starts, ends = make_scheduler(settings, facts), random.Random(1), 0, 0
    for number in range(10):
        length = draw.choice([prompt // 2, prompt - 20, prompt])
        text = tuple(draw.randrange(VOCAB) for _ in range(length))
        scheduler.submit(Generate(number, text, min(130, context - length)))
    while not scheduler.idle:
        plan = scheduler.plan()
        result = subject.step(plan)
        starts += sum(chunk.request.resumed > 0 and chunk.joins for chunk in plan.prefill)
        ends += sum(isinstance(event, Generated) for event in scheduler.advance(plan, result))
        assert subject.memory_bytes() <= memory
    assert ends == 10
    assert starts > 0 or facts.windows, "some were preempted; rows of windows hardly grow"
    subject.close()
