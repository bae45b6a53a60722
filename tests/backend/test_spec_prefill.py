"""SpecPrefill: spans of a prompt are read at their true positions, and rows that skip tokens decode as they should."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.settings import DraftSettings
from millstream.backend.generation.spec_prefill.folding import read_spans
from millstream.backend.generation.spec_prefill.scorer import PromptScorer, pooled
from millstream.backend.generation.spec_prefill.spec_prefill import SpecPrefillSettings
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.generation.plan import Prefill
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.sparse_prompt import GRID, Spans, choose, length
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Cancel
from millstream.model_facts import GenerationFacts
from millstream.types import Sampling
from support.engines import Driver, engine
from support.preempting import PreemptingScheduler
from support.tiny import VOCAB, write_model

TOKENS = 400


def prompt(seed: int, tokens: int = TOKENS) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(tokens))


def some_spans(seed: int, end: int) -> Spans:
    """Of any length, with the last tokens."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(end), 2 * draw.randrange(1, 6)))
    spans = [(first, beyond) for first, beyond in zip(cuts[::2], cuts[1::2], strict=True) if beyond < end - 9]
    return (*spans, (end - 9, end))


class Sparse:
    """What a model computes if some keys of its prompt are hidden from all queries: another way to skip tokens."""

    def __init__(self, folder: Path) -> None:
        self._model, _ = load_model(folder)
        self._seen: mx.array | None = None
        adopt_attention(self._model, self._attend)

    def logits(self, tokens: tuple[int, ...], kept: Spans, prompt_tokens: int) -> Any:
        """After each token from the last one of the prompt on."""
        held = np.zeros(len(tokens), dtype=bool)
        for first, beyond in kept:
            held[first:beyond] = True
        held[prompt_tokens - 1 :] = True
        causal = np.tril(np.ones((len(tokens), len(tokens)), dtype=bool))
        # A skipped token sees itself, so that its numbers are finite; nobody sees it.
        self._seen = mx.array(causal & (held[None, :] | np.eye(len(tokens), dtype=bool)))
        return np.array(self._model(mx.array([tokens]), cache=new_row_caches(self._model))[0, prompt_tokens - 1 :])

    def _attend(self, queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, *rest: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=self._seen)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("seed", range(4))
def test_spans_are_read_at_their_positions(tiny_model: Callable[[str], Path], family: str, seed: int) -> None:
    """Chunk by chunk, as if all other tokens were hidden."""
    folder = tiny_model(family)
    model, _ = load_model(folder)
    adopt_attention(model, attention)
    tokens, kept = prompt(seed), some_spans(seed, TOKENS - 1)
    caches = new_row_caches(model)
    middle = len(kept) // 2
    for spans in (kept[:middle], kept[middle:]):
        if spans:
            read_spans(model, tokens, spans, caches)
    assert caches[0].offset == length(kept)
    # The last token has a position of its own, which these caches do not know: read it as a span too.
    wanted = Sparse(folder).logits(tokens, kept, TOKENS)[-1]
    logits = _logits_of_span(model, tokens, caches)
    assert np.abs(logits - wanted).max() < 1e-3 * np.abs(wanted).max()


def _logits_of_span(model: Any, tokens: tuple[int, ...], caches: Any) -> Any:
    from millstream.backend.generation.spec_prefill.folding import Fold, FoldedLayer

    fold = Fold([(len(tokens) - 1, len(tokens))])
    return np.array(model(fold.tokens_of(tokens), cache=[FoldedLayer(cache, fold) for cache in caches])[0, -1])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 199), max_size=5, unique=True))
def test_pieces_of_a_whole_prompt_are_the_prompt(tiny_model: Callable[[str], Path], seed: int, cuts: list[int]) -> None:
    """However it is cut into chunks and spans."""
    model, _ = load_model(tiny_model("llama"))
    adopt_attention(model, attention)
    tokens = prompt(seed, 200)
    plain, pieces = new_row_caches(model), new_row_caches(model)
    model(mx.array([tokens]), cache=plain)
    ends = sorted({*cuts, 200})
    starts = [0, *ends[:-1]]
    draw = random.Random(seed)
    chunk: list[tuple[int, int]] = []
    for span in zip(starts, ends, strict=True):
        chunk.append(span)
        if draw.random() < 0.5 or span[1] == 200:
            read_spans(model, tokens, chunk, pieces)
            chunk = []
    for one, other in zip(plain, pieces, strict=True):
        for part, wanted in zip(other.keys_and_values(), one.keys_and_values(), strict=True):
            assert part.shape == wanted.shape
            assert mx.allclose(part, wanted, rtol=1e-3, atol=1e-4)


def test_what_the_end_of_a_prompt_looks_up_is_important(tiny_model: Callable[[str], Path]) -> None:
    """Scores are the attention of the last tokens, whatever the chunks are."""
    draft, _ = load_model(tiny_model("llama"))
    adopt_attention(draft, attention)
    submit = Generate(1, prompt(5), 1)

    def scores(*cuts: int) -> Any:
        scorer = PromptScorer(draft)
        for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
            mx.eval(scorer.read([Prefill(submit, start, end, scores=True)]))
            assert bool(scorer.nbytes) == (end < TOKENS)
        [(request_id, found)] = scorer.take()
        assert request_id == 1
        return np.array(found)

    whole = scores()
    assert whole.shape == (-(-TOKENS // GRID),)
    assert (whole > 0).all()
    np.testing.assert_allclose(scores(64, 200, 384), whole, rtol=1e-3, atol=1e-6)


def test_pooling_finds_a_lone_token() -> None:
    importance = np.full(320, 1e-4, dtype=np.float32)
    importance[200] = 0.5
    found = np.array(pooled(mx.array(importance)))
    assert found.argmax() == 200 // GRID
    assert found.shape == (10,)


def backend(folder: Path, draft: Path | None, share: float = 0.4, **changes: Any) -> Callable[[], MlxGenerationBackend]:
    asked = SpecPrefillSettings(share, 200)
    drafting = DraftSettings("folder", draft) if draft is not None else None
    made = GenerationSettings("folder", folder, max_rows=4, draft=drafting, spec_prefill=asked, **changes)
    return lambda: MlxGenerationBackend(made)


def serve(make: Callable[[], MlxGenerationBackend]) -> Any:
    settings = SchedulerSettings(prefill_chunk=64, prefix_cache_bytes=2**24)
    return engine(make, make_scheduler=functools.partial(make_scheduler, settings))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    draft = write_model(folder / "draft", "llama", seed=3, num_hidden_layers=1)
    return write_model(folder / "target", "llama", max_position_embeddings=4096), draft


def usage(driver: Driver, request_id: int) -> Any:
    [end] = driver.ends[request_id]
    assert isinstance(end, Generated)
    return end.usage


def near(logprob: Any, wanted: Any) -> bool:
    row = wanted - wanted.max()
    expected = row - np.log(np.exp(row).sum())
    return bool(abs(logprob.logprob - expected[logprob.token]) < 2e-3)


@pytest.mark.parametrize("gpu", [False, True])
def test_rows_that_skip_tokens_decode_beside_others(models: tuple[Path, Path], gpu: bool) -> None:
    """Each token has the probability that it has if the tokens that were skipped are hidden."""
    folder, draft = models
    submits = [
        Generate(1, prompt(1), 40, Sampling(temperature=1.0, seed=4), logprobs=0, spec_prefill=True),
        Generate(2, prompt(2, 30), 60, logprobs=0),
        Generate(3, prompt(3, 700), 30, logprobs=0, spec_prefill=True),
        Generate(4, prompt(4), 30, logprobs=0),
    ]
    with serve(backend(folder, draft, like_gpu=gpu)) as driver:
        driver.complete(*submits)
        assert [usage(driver, number).skipped_tokens > 0 for number in (1, 2, 3, 4)] == [True, False, True, False]
        skipped = {number: usage(driver, number).skipped_tokens for number in (1, 3)}
        tokens, logprobs = driver.tokens, driver.logprobs
    reference = Sparse(folder)
    for submit in submits:
        kept = spans_of(draft, submit, 0.4) if submit.spec_prefill else ((0, len(submit.prompt) - 1),)
        assert len(submit.prompt) - 1 - length(kept) == skipped.get(submit.request_id, 0)
        answer = tuple(tokens[submit.request_id])
        wanted = reference.logits((*submit.prompt, *answer), kept, len(submit.prompt))
        found = logprobs[submit.request_id]
        assert all(near(each, row) for each, row in zip(found, wanted, strict=False))


def spans_of(folder: Path, submit: Generate, share: float) -> Spans:
    """What the draft model chooses of a prompt."""
    draft, _ = load_model(folder)
    adopt_attention(draft, attention)
    scorer = PromptScorer(draft)
    scorer.read([Prefill(submit, 0, len(submit.prompt), scores=True)])
    [(_, importance)] = scorer.take()
    return choose(importance, share, 0, len(submit.prompt) - 1)


def test_a_quantised_cache_skips_tokens_too(models: tuple[Path, Path], tmp_path: Path) -> None:
    """All pieces chosen, a prompt that is read in pieces answers as one that is read as a whole."""
    folder = write_model(tmp_path / "wide", "llama", head_dim=32)
    submit = Generate(1, prompt(1), 20)
    with serve(backend(folder, models[1], share=1.0, kv_bits=8)) as driver:
        [pieces] = driver.run(replace(submit, spec_prefill=True))
        [whole] = driver.run(replace(submit, request_id=2))
    assert pieces == whole


def test_rows_answer_the_same_with_and_without_drafts(models: tuple[Path, Path]) -> None:
    """Speculation follows a row that has skipped tokens, whatever its length."""
    folder, draft = models
    looping = (*prompt(6, 300), *prompt(7, 20), *prompt(7, 20), *prompt(7, 20), *prompt(7, 12))
    submits = [
        Generate(1, looping, 40, spec_prefill=True),
        Generate(2, prompt(2, 30), 40),
        Generate(3, looping[:-3], 40, Sampling(temperature=0.7, seed=5), spec_prefill=True, prediction=looping[300:]),
    ]
    found = []
    for speculation in (True, False):
        with serve(backend(folder, draft, speculation=speculation)) as driver:
            found.append(driver.run(*submits))
            assert usage(driver, 1).skipped_tokens > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", [1])
def test_a_preempted_row_goes_on_as_if_nothing_had_happened(models: tuple[Path, Path], seed: int) -> None:
    folder, draft = models
    submits = [
        Generate(number, prompt(10 * seed + number, 300), 12, spec_prefill=number != 2) for number in range(1, 3)
    ]

    def scheduler(facts: GenerationFacts) -> GenerationScheduler:
        return PreemptingScheduler(
            seed=seed, max_rows=facts.max_rows, prefill_tokens=64, spec_prefill=facts.spec_prefill
        )

    with serve(backend(folder, draft)) as driver:
        wanted = driver.run(*submits)
    before = PreemptingScheduler.preemptions
    with engine(backend(folder, draft), make_scheduler=scheduler) as driver:
        assert driver.run(*submits) == wanted
        assert usage(driver, 1).completion_tokens == 12
    assert PreemptingScheduler.preemptions > before


def test_what_was_read_in_part_is_not_in_the_prefix_cache(models: tuple[Path, Path]) -> None:
    folder, draft = models
    whole = Generate(1, prompt(8), 20)
    with serve(backend(folder, draft)) as driver:
        [wanted] = driver.run(whole)
    with serve(backend(folder, draft)) as driver:
        driver.complete(replace(whole, request_id=2, spec_prefill=True))
        assert usage(driver, 2).skipped_tokens > 0
        [answer] = driver.run(replace(whole, request_id=3))
        assert usage(driver, 3).cached_tokens == 0
        assert answer == wanted
        # Now all of it is cached, and a cached prefix is exact.
        [again] = driver.run(replace(whole, request_id=4, spec_prefill=True))
        assert usage(driver, 4).skipped_tokens == 0
        assert again == wanted


@pytest.mark.parametrize(
    ("family", "with_draft", "reason"),
    [
        ("llama", False, "no SpecPrefill: there is no draft model"),
        ("gemma3_text", True, "no SpecPrefill: only text models with full attention"),
    ],
)
def test_models_that_cannot_say_why(
    tiny_model: Callable[[str], Path], models: tuple[Path, Path], family: str, with_draft: bool, reason: str
) -> None:
    with serve(backend(tiny_model(family), models[1] if with_draft else None)) as driver:
        assert driver.facts is not None
        assert any(note.startswith(reason) for note in driver.facts.notes)
        driver.complete(Generate(1, prompt(1), 5, spec_prefill=True))
        assert usage(driver, 1).skipped_tokens == 0


def test_a_model_that_does_it_says_so(models: tuple[Path, Path]) -> None:
    with serve(backend(*models)) as driver:
        assert driver.facts is not None and driver.facts.spec_prefill is not None
        assert any("answers may miss what it has not read" in note for note in driver.facts.notes)
        driver.complete(Generate(1, prompt(1), 5, spec_prefill=True))
        driver.complete(Generate(2, prompt(1), 5))
        assert usage(driver, 1).prompt_tokens == usage(driver, 2).prompt_tokens == TOKENS


def test_one_that_is_cancelled_while_the_draft_reads_leaves_nothing(models: tuple[Path, Path]) -> None:
    folder, draft = models
    with serve(backend(folder, draft)) as driver:
        for number in range(3):
            driver.post(Generate(number, prompt(number, 1500), 5, spec_prefill=True))
            driver.post(Generate(100 + number, prompt(number, 20), 3))
            driver.wait_ended(100 + number)
            driver.post(Cancel(number))
        driver.wait_ended(*range(3))
        [answer] = driver.run(Generate(50, prompt(9), 10, spec_prefill=True))
    with serve(backend(folder, draft)) as driver:
        assert driver.run(Generate(50, prompt(9), 10, spec_prefill=True)) == [answer]
