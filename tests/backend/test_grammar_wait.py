"""Requests that wait for the grammar vocabulary, which another thread builds, while all others continue."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.background import CLOSE_SECONDS
from millstream.engine.generation.messages import Generate
from millstream.engine.messages import Cancel, Failed, Finished
from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import GrammarCompiler
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.types import FinishReason, Grammar, ReasoningLimit
from support.engines import Driver, engine
from support.fake import Gate
from support.tiny import write_model, write_tokenizer
from support.wrapped import Gated

END = 258
DATE = Grammar("regex", "20[0-9]{2}-(0[1-9]|1[0-2])")
LAZY = frozenset({"warmup"})


class SlowLoad:
    """Loads a tokenizer when `go` is set, or raises `error`."""

    def __init__(self, folder: Path) -> None:
        self._source = ModelSource("tiny", "folder", folder)
        self.started, self.go = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.threads: list[str] = []

    def __call__(self) -> Tokenizer:
        self.threads.append(threading.current_thread().name)
        self.started.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return load_tokenizer(self._source)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("waiting") / "llama"
    write_model(root, "llama", vocab_size=300)
    write_tokenizer(root)
    return root


@pytest.fixture
def slow(folder: Path) -> Iterator[SlowLoad]:
    loading = SlowLoad(folder)
    yield loading
    loading.go.set()


Make = Callable[..., MlxGenerationBackend]


@pytest.fixture
def make(folder: Path, slow: SlowLoad) -> Make:
    def backend(disabled: frozenset[str] = LAZY, compiler: GrammarCompiler | None = None) -> MlxGenerationBackend:
        grammars = compiler or GrammarCompiler(slow)
        return MlxGenerationBackend(
            GenerationSettings("folder", folder, max_rows=4, grammars=grammars, disabled=disabled)
        )

    return backend


def text(number: int, count: int = 20) -> Generate:
    return Generate(number, (1, 2, 3, number), count)


def guided(number: int, grammar: Grammar = DATE) -> Generate:
    return Generate(number, (1, 2, 3), 40, stop_tokens=frozenset({END}), grammar=grammar)


def output(driver: Driver, folder: Path, number: int) -> str:
    [end] = driver.ends[number]
    assert isinstance(end, Finished), end
    return load_tokenizer(ModelSource("tiny", "folder", folder)).decode(driver.tokens[number])


def is_date(text: str) -> bool:
    return len(text) == 7 and text.startswith("20") and text[4] == "-" and 1 <= int(text[5:]) <= 12


@pytest.mark.parametrize("disabled", [LAZY, frozenset()], ids=["first request", "at load"])
def test_rows_continue_while_a_request_waits_for_the_vocabulary(
    make: Make, slow: SlowLoad, folder: Path, disabled: frozenset[str]
) -> None:
    with engine(functools.partial(make, disabled)) as driver:
        assert driver.run(text(1)) != [[]], "the load does not wait for the vocabulary"
        driver.post(guided(2))
        assert slow.started.wait(60)
        assert [len(tokens) for tokens in driver.run(text(3), text(4, 30), text(5))] == [20, 30, 20]
        assert 2 not in driver.tokens and 2 not in driver.ends
        slow.go.set()
        driver.wait_ended(2)
        assert is_date(output(driver, folder, 2))
        driver.run(guided(6))
        assert is_date(output(driver, folder, 6))
    assert slow.threads == ["background"], "it is built once, and not by the owner"


@pytest.mark.parametrize("supported", [True, False])
def test_a_request_with_a_limited_reasoning_waits_for_the_tokenizer(
    make: Make, slow: SlowLoad, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which it reads the text, whether or not llguidance supports it."""
    if not supported:
        monkeypatch.setattr("millstream.text.grammars.grammar.vocabulary", refuse)
    limit = ReasoningLimit(6, (40, 41, 42), ("none", "think"), opened=True, tools=False)
    with engine(make) as driver:
        driver.post(replace(text(1), reasoning=limit))
        assert slow.started.wait(60)
        free = driver.run(replace(text(2), prompt=text(1).prompt))
        assert 1 not in driver.ends
        slow.go.set()
        driver.wait_ended(1)
        assert driver.tokens[1][:9] == [*free[0][:6], 40, 41, 42]
        if not supported:
            driver.run(guided(3))
            assert "not supported" in driver.ends[3][0].message  # type: ignore[union-attr]
    assert slow.threads == ["background"]


def refuse(tokenizer: Tokenizer) -> None:
    raise ModelError("not supported")


def test_a_request_is_cancelled_while_it_waits(make: Make, slow: SlowLoad, folder: Path) -> None:
    with engine(make) as driver:
        driver.post(guided(1))
        assert slow.started.wait(60)
        driver.post(Cancel(1))
        driver.wait_ended(1)
        [end] = driver.ends[1]
        assert isinstance(end, Finished) and end.reason is FinishReason.CANCELLED
        driver.post(guided(2))
        slow.go.set()
        driver.wait_ended(2)
        assert is_date(output(driver, folder, 2))
        assert 1 not in driver.tokens


@pytest.mark.parametrize(
    "error", [ModelError("no such vocabulary"), RuntimeError("no such vocabulary"), SystemExit("no such vocabulary")]
)
def test_a_vocabulary_that_cannot_be_built_fails_the_requests_that_need_it(
    make: Make, slow: SlowLoad, error: BaseException
) -> None:
    slow.error = error
    with engine(make) as driver:
        driver.post(guided(1))
        driver.post(guided(2))
        assert slow.started.wait(60)
        driver.post(text(3))
        slow.go.set()
        driver.wait_ended(1, 2, 3)
        for number in (1, 2):
            [failed] = driver.ends[number]
            assert isinstance(failed, Failed) and not failed.gone
            assert "no such vocabulary" in failed.message
        assert len(driver.tokens[3]) == 20
        assert len(driver.run(text(4))[0]) == 20


def test_a_vocabulary_that_failed_to_build_is_not_built_again(make: Make, slow: SlowLoad) -> None:
    slow.error = ModelError("no such vocabulary")
    slow.go.set()
    with engine(functools.partial(make, frozenset())) as driver:
        for number in (1, 2):
            driver.run(guided(number))
            [failed] = driver.ends[number]
            assert isinstance(failed, Failed)
            assert failed.message == "the output cannot follow its grammar: no such vocabulary"
    assert len(slow.threads) == 1


def test_an_engine_stops_while_the_vocabulary_is_built(make: Make, slow: SlowLoad) -> None:
    with engine(make) as driver:
        driver.post(guided(1))
        assert slow.started.wait(60)
        started = time.monotonic()
        driver.stop()
        assert time.monotonic() - started < CLOSE_SECONDS + 5
        [failed] = driver.ends[1]
        assert isinstance(failed, Failed) and failed.gone


def test_a_failed_step_does_not_fail_requests_without_a_row(make: Make, slow: SlowLoad, folder: Path) -> None:
    gate = Gate()
    made: list[Gated] = []

    def gated() -> Gated:
        made.append(Gated(make(), gate))
        return made[0]

    with engine(gated) as driver:
        driver.post(text(1))
        gate.wait_entered()
        driver.post(guided(2))
        gate.let_one()
        assert slow.started.wait(60)
        made[0].fail_next = RuntimeError("the device is gone")
        gate.open()
        driver.wait_ended(1)
        assert isinstance(driver.ends[1][0], Failed)
        assert 2 not in driver.ends
        slow.go.set()
        driver.wait_ended(2)
        assert is_date(output(driver, folder, 2))


def test_grammars_are_compiled_outside_the_owner_thread(make: Make, slow: SlowLoad, folder: Path) -> None:
    class Recording(GrammarCompiler):
        def prepare(self, grammar: Grammar | None = None) -> None:
            prepared.append((threading.current_thread().name, grammar))
            super().prepare(grammar)

    slow.go.set()
    prepared: list[tuple[str, Grammar | None]] = []
    with engine(functools.partial(make, frozenset(), Recording(slow))) as driver:
        driver.run(guided(1), guided(2, Grammar("regex", "[ab]{3}")))
        driver.run(guided(3))
        assert is_date(output(driver, folder, 3))
    # The shorter grammar comes first if both wait for the vocabulary.
    assert prepared[0] == ("background", None)
    assert len(prepared) == 3
    assert set(prepared[1:]) == {("background", DATE), ("background", Grammar("regex", "[ab]{3}"))}
