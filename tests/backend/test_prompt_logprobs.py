"""Prompt log-probabilities against a single forward pass, however the prompt is split into chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from millstream.backend.generation.prefill import logprobs as prompt_logprobs
from millstream.engine.generation.messages import Generate, PromptLogprobs
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Event, Finished
from millstream.engine.process_link import ProcessLink
from millstream.types import FinishReason, TokenLogprob
from support.engines import Driver, engine
from support.guided import guided_backend
from support.processes import children_find_us
from support.tiny import VOCAB

PROMPT = tuple((7 * index * index + 3) % VOCAB for index in range(60))


class Listening(Driver):
    """Also records prompt log-probabilities."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}

    def _collect(self, event: Event) -> None:
        if isinstance(event, PromptLogprobs):
            assert event.request_id not in self.tokens, "the prompt comes before the output"
            self.prompt_logprobs.setdefault(event.request_id, []).extend(event.logprobs)
        super()._collect(event)


def expected(folder: Path, prompt: tuple[int, ...]) -> list[list[float]]:
    model, _ = load_model(folder)
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    values: list[list[float]] = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()  # type: ignore[assignment]
    return values


def check(found: list[TokenLogprob], wanted: list[list[float]], prompt: tuple[int, ...], top: int) -> None:
    assert [entry.token for entry in found] == list(prompt[1:])
    for entry, row in zip(found, wanted, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-3)
        assert entry.rank == 1 + sum(value > row[entry.token] for value in row)
        best = sorted(row, reverse=True)[:top]
        assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-3)
        assert all(row[token] == pytest.approx(value, abs=1e-3) for token, value in entry.top)


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.engines.Driver", Listening)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", ThreadLink), ("gemma3_text", ThreadLink), ("lfm2", ThreadLink), ("llama", ProcessLink)],
)
def test_they_equal_those_of_a_single_pass(
    family: str,
    kind: type[ThreadLink | ProcessLink],
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children_find_us(monkeypatch)
    monkeypatch.setattr(prompt_logprobs, "TOKENS_PER_PASS", 5)
    folder = tiny_model(family)
    wanted = expected(folder, PROMPT)
    with engine(functools.partial(guided_backend, folder, {}), prefill_tokens=17, kind=kind) as driver:
        assert isinstance(driver, Listening)
        plain = Generate(1, PROMPT, 8)
        [output] = driver.run(plain)
        asked = [
            Generate(2, PROMPT, 8, prompt_logprobs=3),
            Generate(3, PROMPT[:20], 0, prompt_logprobs=0),
            Generate(4, PROMPT[:1], 0, prompt_logprobs=2),
            Generate(5, PROMPT, 8),
        ]
        both = driver.run(*asked)
        assert both[0] == both[3] == output, "the output is the same"
        check(driver.prompt_logprobs[2], wanted, PROMPT, 3)
        check(driver.prompt_logprobs[3], wanted, PROMPT[:20], 0)
        assert set(driver.prompt_logprobs) == {2, 3}
        for number in (3, 4):
            [end] = driver.ends[number]
            assert isinstance(end, Finished)
            assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 0)


@pytest.mark.usefixtures("listening")
def test_a_cached_prefix_is_computed_again(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    factory = functools.partial(guided_backend, folder, {})
    driver = Listening(
        ThreadLink("test", factory, functools.partial(make_scheduler, SchedulerSettings(64, None, 2**24)))
    )
    driver.start()
    driver.run(Generate(1, PROMPT, 4), Generate(2, PROMPT, 4))
    [output] = driver.run(Generate(3, PROMPT, 4))
    [again] = driver.run(Generate(4, PROMPT, 4, prompt_logprobs=1))
    hits = [driver.ends[number][0].usage.cached_tokens for number in (3, 4)]  # type: ignore[union-attr]
    driver.stop()
    assert hits[0] > 0
    assert hits[1] == 0
    assert output == again
    check(driver.prompt_logprobs[4], expected(folder, PROMPT), PROMPT, 1)
