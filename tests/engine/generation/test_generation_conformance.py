"""What a generation engine guarantees, over both links, with the fake backend and with MLX on the CPU, so that the fake
stays close to the real one. For the guarantees of every kind see `tests/engine/test_conformance.py`."""

from __future__ import annotations

import threading
from pathlib import Path

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Failed
from millstream.types import FinishReason, TokenLogprob
from support.engines import Driver


def finish_reason(driver: Driver, request_id: int) -> FinishReason:
    end = driver.ends[request_id][0]
    assert isinstance(end, Generated)
    return end.reason


def test_generation_stops_at_max_tokens(driver: Driver) -> None:
    [tokens] = driver.run(Generate(1, (1, 2, 3), 10))
    assert len(tokens) == 10
    end = driver.ends[1][0]
    assert isinstance(end, Generated)
    assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == (FinishReason.LENGTH, 3, 10)


def test_equal_prompts_have_equal_answers(driver: Driver) -> None:
    first = driver.run(Generate(1, (5, 6, 7), 8))
    assert driver.run(Generate(2, (5, 6, 7), 8)) == first
    assert driver.run(Generate(3, (5, 6, 7), 8), Generate(4, (5, 6, 7), 8)) == first * 2


def test_an_earlier_prompt_does_not_change_the_answer(driver: Driver) -> None:
    """Its prefix may be cached, but the answer is the same."""
    [fresh] = driver.run(Generate(1, (5, 6, 7, 8, 9), 6))
    driver.run(Generate(2, (5, 6, 7), 6))
    assert driver.run(Generate(3, (5, 6, 7, 8, 9), 6)) == [fresh]


def test_a_one_token_prompt_and_a_one_token_answer(driver: Driver) -> None:
    [long] = driver.run(Generate(1, (42,), 5))
    [short] = driver.run(Generate(2, (42,), 1))
    assert len(long) == 5
    assert short == long[:1]
    assert finish_reason(driver, 2) is FinishReason.LENGTH


def test_a_stop_token_ends_the_answer_before_it(driver: Driver) -> None:
    [tokens] = driver.run(Generate(1, (3, 1, 4), 20))
    stop = tokens[4]
    first = tokens.index(stop)
    assert driver.run(Generate(2, (3, 1, 4), 20, stop_tokens=frozenset({stop}))) == [tokens[:first]]
    assert finish_reason(driver, 2) is FinishReason.STOP


def test_no_stop_token_ends_the_answer_before_its_minimum(driver: Driver) -> None:
    [tokens] = driver.run(Generate(1, (3, 1, 4), 20))
    stop = frozenset({tokens[0]})
    assert driver.run(Generate(2, (3, 1, 4), 20, stop_tokens=stop)) == [[]]
    [bounded] = driver.run(Generate(3, (3, 1, 4), 20, stop_tokens=stop, min_tokens=6))
    assert len(bounded) >= 6


def test_only_rows_that_request_logprobs_get_them(driver: Driver) -> None:
    driver.run(Generate(1, (1, 2), 4, logprobs=2), Generate(2, (1, 2), 4), Generate(3, (9, 9), 4, logprobs=0))
    assert driver.logprobs[2] == []
    for request_id, top in ((1, 2), (3, 0)):
        logprobs = driver.logprobs[request_id]
        assert [each.token for each in logprobs if isinstance(each, TokenLogprob)] == driver.tokens[request_id]
        assert all(len(each.top) == top and each.logprob <= 0 for each in logprobs if isinstance(each, TokenLogprob))


def test_a_model_that_cannot_be_loaded_is_reported_and_the_thread_ends(tmp_path: Path) -> None:
    def factory() -> MlxGenerationBackend:
        return MlxGenerationBackend(GenerationSettings("folder", tmp_path / "nothing", max_rows=1))

    before = threading.active_count()
    driver = Driver(ThreadLink("x", factory, lambda _: GenerationScheduler(max_rows=1, prefill_tokens=1)))
    driver.post(Generate(1, (1,), 1))
    driver.link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert driver.load_error is not None
    assert "nothing" in driver.load_error
    assert isinstance(driver.ends[1][0], Failed)
    assert driver.link.join(10)
    assert threading.active_count() == before
