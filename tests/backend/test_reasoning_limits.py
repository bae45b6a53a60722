"""A reasoning that reaches its limit is closed in its row: all that follows is what the model would have written after
these tokens, with the row's random numbers, penalties, grammar and log-probabilities, however the row is disturbed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.process_link import ProcessLink
from millstream.models.source import ModelSource
from millstream.text.chat_format import REASONING
from millstream.text.grammars.grammar import compiler_of
from millstream.text.grammars.tools import tool_grammar
from millstream.text.tool_formats import hermes
from millstream.types import Grammar, ReasoningLimit, Sampling, ToolUse
from support.drafting import DraftingScheduler, drafting
from support.engines import Driver, engine
from support.guided import guided_backend
from support.known_drafter import KnownDrafter
from support.preempting import PreemptingScheduler, preempting
from support.processes import children_find_us
from support.tiers import some
from support.tiny import write_model, write_tokenizer

OPEN, CLOSE = 259, 260
LETTERS = range(94)
"""Printable characters, of which the model writes nearly all."""
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": NOTHING}}
PROMPT = (7, 8, 9, 7, 8, 9, 7, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models of a family, whose tokenizer has the markers of a reasoning as tokens."""

    @functools.cache
    def write(family: str) -> Path:
        path = write_model(tmp_path_factory.mktemp("limits") / family, family, vocab_size=262)
        write_tokenizer(path)
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.add_special_tokens(["<think>"])
        tokenizer.add_tokens(["</think>"])
        tokenizer.save(str(path / "tokenizer.json"))
        return path

    return write


def encode(folder: Path, text: str) -> tuple[int, ...]:
    return tuple(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def requests(folder: Path, count: int) -> list[Generate]:
    """Rows that are greedy or draw, with penalties and log-probabilities; their reasoning opens and closes at will."""
    closing = encode(folder, "\n</think>\n\n")
    assert closing[1] == CLOSE
    newline = closing[0]
    made = []
    for number in range(count):
        marks = ((OPEN, 53.0 + number % 3), (CLOSE, 49.0 + number % 4), (newline, 51.0))
        sampling = Sampling(
            temperature=(0.0, 1.0, 2.0)[number % 3],
            seed=number,
            top_p=0.95 if number % 2 else 1.0,
            presence_penalty=2.0 * (number % 2),
            frequency_penalty=0.5 * (number % 4 == 1),
            repetition_penalty=1.3 if number % 5 == 2 else 1.0,
            logit_bias=(*((letter, 50.0) for letter in LETTERS), *marks),
        )
        limit = ReasoningLimit(
            (1, 2, 6, 13, 0)[number % 5],
            closing,
            ("hermes" if number % 2 else "none", "think"),
            opened=number % 5 != 4 and number % 3 != 2,
            tools=number % 2 == 1,
            shown=frozenset({OPEN}),
        )
        logprobs = 1 if number % 4 == 3 else None
        made.append(Generate(number, PROMPT, 36, sampling, reasoning=limit, logprobs=logprobs))
    return made


def expected(driver: Driver, asked: Generate) -> list[int]:
    """By requests without a limit: each goes on after what the ones before have written, closed by hand."""
    limit, written = asked.reasoning, list[int]()
    assert limit is not None
    in_reasoning, may_open, count = limit.opened, True, 0
    while (left := asked.max_tokens - len(written)) > 0:
        driver.reset()
        begun = (*PROMPT, *written)
        [tokens] = driver.run(replace(asked, prompt=begun, resumed=len(written), max_tokens=left, reasoning=None))
        for token in tokens:
            written.append(token)
            if in_reasoning:
                count += 1
                in_reasoning, may_open = token != CLOSE, True
            elif token == OPEN and may_open:
                count += 1
                in_reasoning = True
            elif token not in (CLOSE, limit.closing[0]):
                may_open = False
            if in_reasoning and count >= limit.tokens:
                written += limit.closing
                in_reasoning = False
                break
    driver.reset()
    return written[: asked.max_tokens]


def closings(answers: Sequence[Sequence[int]], closing: tuple[int, ...]) -> int:
    return sum(tuple(answer[at : at + len(closing)]) == closing for answer in answers for at in range(len(answer)))


@pytest.fixture(scope="module")
def known(folder: Callable[[str], Path]) -> Callable[[str], tuple[list[Generate], list[list[int]]]]:
    """Requests to a model, and what it must answer."""

    @functools.cache
    def find(family: str) -> tuple[list[Generate], list[list[int]]]:
        asked = requests(folder(family), 15)
        with engine(functools.partial(guided_backend, folder(family), {})) as driver:
            answers = [expected(driver, each) for each in asked]
        assert asked[0].reasoning is not None
        assert closings(answers, asked[0].reasoning.closing) >= 20
        return asked, answers

    return find


Known = Callable[[str], tuple[list[Generate], list[list[int]]]]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *some([(family, {}) for family in ("llama", "gemma3_text", "lfm2", "mamba2")], [("llama", {})]),
        ("llama", {"like_gpu": True}),
    ],
)
def test_a_limited_reasoning_is_closed_in_its_row(
    family: str, changes: Mapping[str, Any], folder: Callable[[str], Path], known: Known
) -> None:
    asked, answers = known(family)
    with engine(functools.partial(guided_backend, folder(family), changes)) as driver:
        assert driver.run(*asked) == answers
        for each in asked:
            [end] = driver.ends[each.request_id]
            assert isinstance(end, Generated)
            assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(PROMPT), each.max_tokens)
            scored = [logprob.token for logprob in driver.logprobs[each.request_id]]  # type: ignore[attr-defined]
            assert scored == ([] if each.logprobs is None else answers[each.request_id])


def test_rows_that_are_preempted_go_on_with_what_closes_them(folder: Callable[[str], Path], known: Known) -> None:
    asked, answers = known("llama")
    make = functools.partial(guided_backend, folder("llama"), {})
    PreemptingScheduler.preemptions = 0
    for cache in (None, 30):
        with engine(make, make_scheduler=functools.partial(preempting, 3, cache=cache)) as driver:
            assert driver.run(*asked) == answers
    assert PreemptingScheduler.preemptions > 20


@pytest.mark.parametrize(("right", "shape"), [(1.0, {}), (0.8, {"ragged": True})])
def test_no_draft_goes_beyond_the_limit(
    right: float, shape: Mapping[str, Any], folder: Callable[[str], Path], known: Known
) -> None:
    """Whether a draft is what the row writes, with what closes it, or would go on with the reasoning."""
    asked, answers = known("llama")
    wanted = dict(enumerate(answers))
    with engine(functools.partial(guided_backend, folder("llama"), {})) as driver:
        free = driver.run(*(replace(each, reasoning=None) for each in asked))
    for drafts in (wanted, dict(enumerate(free))):
        drafter = _Unchecked(drafts, right, seed=2, **shape)
        before = DraftingScheduler.passes
        settings = GenerationSettings(
            "folder", folder("llama"), max_rows=6, grammars=compiler_of(ModelSource("tiny", "folder", folder("llama")))
        )
        make = functools.partial(MlxGenerationBackend, settings, [drafter])
        with engine(make, make_scheduler=functools.partial(drafting, 5, preempt=0.05)) as driver:
            assert driver.run(*asked) == answers
        assert DraftingScheduler.passes > before and drafter.proposals > 50


class _Unchecked(KnownDrafter):
    """Its answers need not be what rows write."""

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        if request_id in self.gained:
            self.gained[request_id] += len(tokens)


def test_a_grammar_goes_on_behind_the_reasoning_and_may_forbid_to_close_it(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    closing = encode(path, "\n</think>\n\n")
    tokens = {"<think>": OPEN, "</think>": CLOSE}
    call = tool_grammar(
        hermes.FORMAT, ToolUse((WEATHER,), "required"), tokens, reasoning=REASONING["think"], in_reasoning=True
    )
    words = Grammar("regex", "[a-z ]{30}")
    limit = ReasoningLimit(5, closing, ("hermes", "think"), opened=True, tools=True, shown=frozenset({OPEN}))
    hot = Sampling(temperature=1.0, seed=4, logit_bias=((CLOSE, -50.0),))
    stops = frozenset({258})
    asked = [
        Generate(number, PROMPT, 120, replace(hot, seed=number), stops, grammar=grammar, reasoning=limit)
        for number, grammar in enumerate([call, words, call, None])
    ]
    answers = None
    for scheduler in (None, functools.partial(drafting, 5), functools.partial(preempting, 4, cache=None)):
        with engine(functools.partial(guided_backend, path, {}), make_scheduler=scheduler) as driver:
            found = driver.run(*asked)
            assert all(isinstance(driver.ends[each.request_id][0], Generated) for each in asked)
        answers = found if answers is None else answers
        assert found == answers
    assert answers is not None
    for number in (0, 2):
        assert tuple(answers[number][5 : 5 + len(closing)]) == closing
        text = backend.decode(answers[number][5 + len(closing) :])
        assert text.startswith('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    assert len(answers[1]) == 30 and CLOSE not in answers[1]


def test_in_a_process(folder: Callable[[str], Path], known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    children_find_us(monkeypatch)
    asked, answers = known("llama")
    with engine(functools.partial(guided_backend, folder("llama"), {}), kind=ProcessLink) as driver:
        assert driver.run(*asked[:6]) == answers[:6]
