"""Arenas with a position map give the tokens of mlx-lm's single-request generation, for every kind of KV cache."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from millstream.backend.generation.arena.columns import NOTHING
from millstream.backend.generation.arena.prefiller import ArenaPrefiller
from millstream.backend.generation.arena.rows import Rows
from millstream.backend.generation.arena.trial import tried
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.prefill.prefiller import SinglePrefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.prefix_cache.orders import SavePrefix
from support.drafting import drafting
from support.engines import engine
from support.rare import RARE, write_rare
from support.tiers import some
from support.tiny import BATCHABLE, VOCAB

KINDS = ["llama", "gemma3_text", "lfm2", "mamba2", "falcon_h1", "gemma4_text", "deepseek_v3", "gpt_oss", "jamba"]
"""Full attention, windows, states with attention and without, both in a layer, shared keys and values, latent
attention, sinks, states that take no padding."""
DRAFTLESS: tuple[str, ...] = ("llama4",)
"""Families that do not verify drafts."""
FAMILIES = list(dict.fromkeys([*KINDS, *BATCHABLE, *RARE]))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("arenas")

    def get(family: str) -> Path:
        return root / family if (root / family).exists() else write_rare(root / family, family)

    return get


def requests(seed: int, count: int) -> list[Generate]:
    """Prompts of one token to several windows and chunks; some continue the beginning of others."""
    draw = random.Random(seed)
    tokens = lambda most: tuple(draw.randrange(VOCAB) for _ in range(most))  # noqa: E731
    known = [tokens(40)]
    found = []
    for number in range(count):
        if draw.random() < 0.4:
            prompt = draw.choice(known)[: draw.randrange(1, 60)] + tokens(draw.choice([1, 5, 30]))
        else:
            prompt = tokens(draw.choice([1, 2, 3, 8, 17, 33, 70, 130]))
        known.append(prompt)
        found.append(Generate(number, prompt, draw.choice([1, 2, 5, 20, 40])))
    return found


@functools.cache
def alone(folder: Path, seed: int, count: int) -> list[list[int]]:
    model, _ = load_model(folder)
    return [
        [int(token) for token, _ in generate_step(mx.array(each.prompt), model, max_tokens=each.max_tokens)]
        for each in requests(seed, count)
    ]


def backend(folder: Path, **changes: Any) -> MlxGenerationBackend:
    return MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=9, **{"layout": "arena", **changes}))


def in_arenas(driver: Any) -> bool:
    return driver.facts is not None and any("slots (arenas)" in note for note in driver.facts.notes)


@pytest.mark.parametrize("family", some(FAMILIES, KINDS))
def test_a_changing_batch_equals_single_requests(family: str, folder_of: Callable[[str], Path]) -> None:
    folder, count = folder_of(family), 24
    with engine(functools.partial(backend, folder, like_gpu=True), prefill_tokens=200) as driver:
        assert in_arenas(driver)
        assert driver.run(*requests(5, count)) == alone(folder, 5, count)


@pytest.mark.parametrize("family", some(FAMILIES, ["llama", "lfm2"]))
def test_steps_that_are_built_ahead(family: str, folder_of: Callable[[str], Path]) -> None:
    folder, count = folder_of(family), 12
    with engine(functools.partial(backend, folder, layout="arena-built"), prefill_tokens=60) as driver:
        assert in_arenas(driver)
        assert driver.run(*requests(6, count)) == alone(folder, 6, count)


@pytest.mark.parametrize("family", some(FAMILIES, ["llama", "gemma3_text", "lfm2", "qwen3_next"]))
def test_prefixes_drafts_and_preemption(family: str, folder_of: Callable[[str], Path]) -> None:
    """Rows are preempted at random, and go on from what the prefix cache has of them; drafts are wrong at random."""
    folder, count = folder_of(family), 20
    schedule = functools.partial(drafting, 5, preempt=0.1, cache=300)
    with engine(functools.partial(backend, folder, like_gpu=True), make_scheduler=schedule) as driver:
        assert driver.facts is not None and bool(driver.facts.drafters) is (family not in DRAFTLESS)
        assert driver.run(*requests(7, count)) == alone(folder, 7, count)


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_prompts_share_passes_from_any_offset(family: str, folder_of: Callable[[str], Path]) -> None:
    """Two that were read in part, by different lengths, and one that begins: one pass for all three."""
    model, _ = load_model(folder_of(family))
    store = PrefixStore()
    single = SinglePrefiller(model, store)
    prefiller = ArenaPrefiller(model, lambda: Rows(new_row_caches(model)), single, store, pads=True, fill=0.5)
    prompts = [Generate(number, tuple(range(1, length)), 1) for number, length in enumerate((31, 35, 21))]
    mx.eval(prefiller.prefill([Prefill(prompts[0], 0, 11), Prefill(prompts[1], 0, 18)]))
    assert prefiller.passes == 1
    mx.eval(prefiller.prefill([Prefill(each, (11, 18, 0)[n], len(each.prompt) - 1) for n, each in enumerate(prompts)]))
    assert prefiller.passes == 2
    rows = Rows(new_row_caches(model))
    submits, joining = prefiller.take([0, 1, 2])
    for each in joining:
        each.rows.close_gaps()
        rows.join(each.rows, each.chosen)
    logits = rows.run(model, mx.array([[each.prompt[-1]] for each in submits]), [1, 1, 1])
    for row, each in enumerate(submits):
        own = model(mx.array([each.prompt]), cache=new_row_caches(model))[0, -1]
        assert mx.abs(logits[row, 0] - own).max().item() < 1e-4
        assert rows.tokens[row] == len(each.prompt)
    for columns in rows.kinds.values():
        held = (columns.positions != NOTHING).sum(axis=1).tolist()
        assert all(
            count >= min(len(each.prompt), columns.window or 99) for count, each in zip(held, submits, strict=True)
        )


def test_windows_that_arenas_save_continue_alone(folder_of: Callable[[str], Path]) -> None:
    """As prompts with images do: in mlx-lm's caches."""
    model, _ = load_model(folder_of("gemma3_text"))
    store, prompt = PrefixStore(), tuple(range(1, 33))
    rows = Rows(new_row_caches(model))
    rows.add()
    rows.run(model, mx.array([prompt[:24]]), [24])
    mx.eval(rows.save(0, SavePrefix(0, 0, 8, (1, 2, 3), checkpoint=4, tokens=24), store))
    caches = new_row_caches(model)
    store.fill_caches((1, 2, 3), 4, caches)
    steps = [model(mx.array([[token]]), cache=caches)[0, -1] for token in prompt[24:]]
    assert mx.abs(steps[-1] - model(mx.array([prompt]))[0, -1]).max().item() < 1e-4


class Mistaken:
    """A model that takes the position of a row's next token from how wide its keys are, as afm7 does."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = model.layers

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        for each in cache:
            each._running.offset = mx.full((tokens.shape[0],), each.size(), dtype=mx.int32)
        logits: mx.array = self._model(tokens, cache=cache)
        return logits


def test_a_trial_finds_states_that_padding_changes_and_wrong_positions(folder_of: Callable[[str], Path]) -> None:
    models = {family: load_model(folder_of(family))[0] for family in ("llama", "lfm2", "jamba")}
    found = {family: tried(model, VOCAB) for family, model in models.items()}
    assert found == {"llama": "padded", "lfm2": "padded", "jamba": "unpadded"}
    assert tried(Mistaken(models["llama"]), VOCAB) == "wrong"


def test_a_model_that_does_not_fit_runs_as_before(folder_of: Callable[[str], Path]) -> None:
    with engine(functools.partial(backend, folder_of("llama4"))) as driver:
        assert driver.facts is not None and not in_arenas(driver)


@pytest.mark.parametrize("family", ["llama"])
def test_what_prompts_cost_together_is_measured_and_plans_their_passes(
    family: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.backend.generation.preparation.MIN_WEIGHT_BYTES", 0)
    make = functools.partial(
        make_scheduler, SchedulerSettings(memory=None, prefix_cache_bytes=2**22, max_token_gap=0.2)
    )
    with engine(functools.partial(backend, folder_of(family)), make_scheduler=make) as driver:
        assert driver.facts is not None and driver.facts.shares_passes
        measured = driver.facts.calibration
        assert measured is not None and measured.together is not None
        prompts, tokens, seconds = measured.together
        assert prompts == 8 and tokens >= 16 and seconds > 0
        assert driver.run(*requests(4, 30)) == alone(folder_of(family), 4, 30)
