"""Structured output: the masks of rows with a grammar, and other rows of the batch, whose tokens do not change."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.sampling.guides import PARALLEL_ROWS, Guides, TokenMask
from millstream.config import FAST_PATHS
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import RowOutput
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Failed, Finished
from millstream.engine.process_link import ProcessLink
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import GrammarCompiler, compiler_of
from millstream.text.loading import load_tokenizer
from millstream.types import FinishReason, Grammar, Sampling, TokenLogprob
from support.engines import Driver, engine
from support.guided import guided_backend
from support.processes import children_find_us
from support.tiny import byte_source, write_model, write_tokenizer

END = 258
"""The byte tokenizer's <|im_end|>."""

DATE = Grammar("regex", "20[0-9]{2}-(0[1-9]|1[0-2])")
WORDS = Grammar("lark", 'start: ("ab" | "c")+ "."')
PAIR = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
HOT = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return byte_source(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def compiler(source: ModelSource) -> GrammarCompiler:
    return compiler_of(source)


def allowed(mask: TokenMask | None, rows: int, vocab_size: int) -> list[set[int]]:
    assert mask is not None
    shaped = np.array(mask.apply(mx.zeros((rows, vocab_size))))
    return [set(np.nonzero(np.isfinite(row))[0].tolist()) for row in shaped]


def code(text: str) -> set[int]:
    """Ids of the byte tokenizer, whose alphabet is sorted: printable ASCII comes first."""
    return {ord(letter) - ord("!") for letter in text}


def submit(number: int, grammar: Grammar | None, **changes: Any) -> Generate:
    return Generate(number, (1, 2, 3), 12, stop_tokens=frozenset({END}), grammar=grammar, **changes)


@pytest.mark.parametrize("vocab_size", [259, 300, 512])
def test_masks_follow_the_grammar_and_restrict_no_other_row(compiler: GrammarCompiler, vocab_size: int) -> None:
    """Logits may be longer than the vocabulary: ids beyond it are forbidden."""
    guides = Guides(compiler, vocab_size)
    guides.add(submit(1, None))
    assert not guides
    guides.add(submit(7, Grammar("regex", "[ab]c")))
    assert guides
    indices = {1: 0, 7: 2}
    everything = set(range(vocab_size))
    mask, failed = guides.advance([], indices)
    assert failed == []
    assert allowed(mask, 3, vocab_size) == [everything, everything, code("ab")]
    mask, _ = guides.advance([RowOutput(1, (5,)), RowOutput(7, tuple(code("a")))], indices)
    assert allowed(mask, 3, vocab_size)[2] == code("c")
    mask, _ = guides.advance([RowOutput(7, tuple(code("c")))], indices)
    assert allowed(mask, 3, vocab_size)[2] == {END}
    mask, failed = guides.advance([RowOutput(7, (END,))], indices)
    assert (mask, failed) == (None, [])
    assert not guides


def test_logits_shorter_than_the_vocabulary(compiler: GrammarCompiler) -> None:
    guides = Guides(compiler, 70)
    guides.add(submit(1, Grammar("regex", "[a-z]")))
    guides.add(submit(2, Grammar("regex", "z")))
    mask, failed = guides.advance([], {1: 0, 2: 1})
    assert allowed(mask, 2, 70)[0] == {token for token in code("abcdefghijklmnopqrstuvwxyz") if token < 70}
    assert [failure.request_id for failure in failed] == [2]
    assert "the model has no token" in failed[0].message


def test_many_masks_are_computed_by_several_threads(compiler: GrammarCompiler) -> None:
    guides = Guides(compiler, 259)
    letters = "abcdefghijklmnop"[: PARALLEL_ROWS + 4]
    for number, letter in enumerate(letters):
        guides.add(submit(number, Grammar("regex", letter)))
    mask, _ = guides.advance([], {number: number for number in range(len(letters))})
    assert allowed(mask, len(letters), 259) == [code(letter) for letter in letters]


def test_a_forbidden_token_is_replaced_by_the_best_allowed_one() -> None:
    mask = TokenMask([1], np.array([[0b00101100]], dtype=np.uint8), 8)
    logits = mask.apply(mx.array([[0.0] * 8, [9.0, 9, 1, 5, 9, 2, 9, 9]]))
    assert mask.replace_forbidden(logits, mx.array([4, 4])).tolist() == [4, 3]
    assert mask.replace_forbidden(logits, mx.array([4, 5])).tolist() == [4, 5]


def test_a_row_that_breaks_its_grammar_fails_alone(compiler: GrammarCompiler) -> None:
    guides = Guides(compiler, 259)
    for number in (1, 2):
        guides.add(submit(number, Grammar("regex", "abc")))
    guides.advance([], {1: 0, 2: 1})
    mask, failed = guides.advance([RowOutput(1, tuple(code("z"))), RowOutput(2, tuple(code("a")))], {1: 0, 2: 1})
    assert [failure.request_id for failure in failed] == [1]
    assert "cannot follow its grammar" in failed[0].message
    assert "\n" not in failed[0].message
    assert allowed(mask, 2, 259) == [set(range(259)), code("b")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model with 300 logits and a tokenizer of 259 tokens."""
    root = tmp_path_factory.mktemp("guided")

    def get(family: str) -> Path:
        if not (root / family).exists():
            write_model(root / family, family, vocab_size=300)
            write_tokenizer(root / family)
        return root / family

    return get


def plain(count: int) -> list[Generate]:
    """Rows without a grammar, with every kind of sampling."""
    kinds = [Sampling(), HOT, Sampling(temperature=0.8, top_p=0.9, seed=5), Sampling(presence_penalty=1.0)]
    return [
        Generate(
            number, tuple(range(1, 3 + 5 * number)), 10 + 7 * number, kinds[number % 4], logprobs=number % 2 or None
        )
        for number in range(count)
    ]


def guided(first: int, count: int, **changes: Any) -> list[Generate]:
    grammars = [DATE, WORDS, PAIR]
    return [
        Generate(
            first + number,
            tuple(range(5, 9 + 4 * number)),
            60,
            Sampling(temperature=1.0, seed=number, logit_bias=((next(iter(code("."))), 3.0),)),
            stop_tokens=frozenset({END}),
            grammar=grammars[number % 3],
            **changes,
        )
        for number in range(count)
    ]


PATTERNS = {DATE: r"20\d\d-(0[1-9]|1[0-2])", WORDS: r"(ab|c)+\.", PAIR: r'\{"a": ?-?(0|[1-9]\d*)[^{]*\}'}


def check(driver: Driver, source: ModelSource, submits: Sequence[Generate]) -> int:
    """Every output with a stop token matches its grammar. Returns how many there are."""
    tokenizer = load_tokenizer(source)
    ended = 0
    for each in submits:
        assert each.grammar is not None
        [end] = driver.ends[each.request_id]
        assert isinstance(end, Finished), end
        text = tokenizer.decode(driver.tokens[each.request_id])
        if end.reason is FinishReason.STOP:
            ended += 1
            assert re.fullmatch(PATTERNS[each.grammar], text, re.DOTALL), text
    return ended


def likelihoods(driver: Driver, each: Generate) -> list[float]:
    return [entry.logprob for entry in driver.logprobs[each.request_id] if isinstance(entry, TokenLogprob)]


ALL_OFF = frozenset(FAST_PATHS)
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "slots": ("llama", {}),
    "merged caches": ("gemma3_text", {}),
    "recurrent": ("lfm2", {}),
    "nothing fast": ("llama", {"disabled": ALL_OFF}),
    "as on a GPU": ("llama", {"like_gpu": True}),
}


@pytest.mark.parametrize("path", PATHS)
def test_guided_rows_do_not_change_the_tokens_of_others(
    path: str, folder: Callable[[str], Path], source: ModelSource
) -> None:
    family, settings = PATHS[path]
    with engine(functools.partial(guided_backend, folder(family), settings), prefill_tokens=30) as driver:
        free = plain(6)
        expected = driver.run(*free)
        likely = [likelihoods(driver, each) for each in free]
        driver.reset()
        mixed = guided(100, 9)
        both = [each for pair in zip(free, mixed, strict=False) for each in pair] + mixed[len(free) :]
        driver.run(*both)
        assert [driver.tokens[each.request_id] for each in free] == expected
        assert [likelihoods(driver, each) for each in free] == [pytest.approx(each, abs=1e-4) for each in likely]
        assert check(driver, source, mixed) >= 5


@pytest.mark.parametrize("kind", [ThreadLink, ProcessLink])
def test_in_a_thread_and_in_a_process(
    kind: type[ThreadLink | ProcessLink],
    folder: Callable[[str], Path],
    source: ModelSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children_find_us(monkeypatch)
    with engine(functools.partial(guided_backend, folder("llama"), {}), prefill_tokens=30, kind=kind) as driver:
        mixed = guided(1, 6)
        first = driver.run(*mixed)
        assert check(driver, source, mixed) >= 3
        driver.reset()
        assert driver.run(*mixed) == first, "the same seed gives the same output"


def test_only_the_row_with_an_invalid_grammar_fails(folder: Callable[[str], Path], source: ModelSource) -> None:
    with engine(functools.partial(guided_backend, folder("llama"), {}), prefill_tokens=30) as driver:
        free, good = plain(2), guided(10, 1)
        expected = driver.run(*free, *good)
        driver.reset()
        bad = submit(20, Grammar("lark", "start: nothing"))
        assert driver.run(*free, *good, bad)[:3] == expected
        [failed] = driver.ends[20]
        assert isinstance(failed, Failed)
        assert "unknown name" in failed.message
        assert not failed.gone
        driver.reset()
        assert driver.run(*good) == expected[2:]


def test_an_engine_without_a_tokenizer_says_so(folder: Callable[[str], Path]) -> None:
    def bare() -> MlxGenerationBackend:
        return MlxGenerationBackend(GenerationSettings("folder", folder("llama"), max_rows=2))

    with engine(bare) as driver:
        driver.run(submit(1, DATE))
        [failed] = driver.ends[1]
        assert isinstance(failed, Failed)
        assert "no tokenizer" in failed.message
