"""Tokens with drafts equal tokens without, for every kind of KV cache and every way to run it; with prefixes saved and
matched after passes that rows kept in part, and rows preempted between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import Generate
from support.drafting import drafting
from support.engines import engine
from support.known_drafter import KnownDrafter
from support.mixed_requests import mixed, seen
from support.pointer_kernels import PointerKernels
from support.rare import RARE, write_rare
from support.tiers import some
from support.tiny import VOCAB, write_model


def check(folder: Path, wanted: list[Generate], *, share: int | None = None, **settings: Any) -> None:
    """Without drafts; then with drafts, a small prefix cache and preemption."""
    given = GenerationSettings("folder", folder, **{"max_rows": 4, "share_tokens": share, **settings})
    with engine(lambda: MlxGenerationBackend(given, []), prefill_tokens=16) as driver:
        expected = seen(driver, wanted, cached=False)
        known = {each.request_id: list(driver.tokens.get(each.request_id, [])) for each in wanted}
    for cache, preempt in ((None, 0.05), (40, 0.02)):
        drafter = KnownDrafter(known, 0.75, seed=4, ragged=True)
        scheduler = functools.partial(drafting, 7, cache=cache, preempt=preempt)
        with engine(lambda drafter=drafter: MlxGenerationBackend(given, [drafter]), make_scheduler=scheduler) as driver:
            assert driver.facts is not None and driver.facts.drafters == ("known",), driver.facts and driver.facts.notes
            assert seen(driver, wanted, cached=False) == expected, f"with a cache of {cache} blocks"
        assert drafter.proposals > 10


@pytest.mark.parametrize("like_gpu", some([False, True], [True]))
@pytest.mark.parametrize(
    "family",
    some(
        ["lfm2", "mamba2", "falcon_h1", "gemma3_text", "gemma4_text", "qwen3_next", "nemotron_h", "jamba", "gpt_oss"],
        ["lfm2", "mamba2", "qwen3_next", "gemma3_text"],
    ),
)
def test_layers_of_several_kinds(
    family: str, like_gpu: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_rare(tmp_path / family, family) if family in RARE else tiny_model(family)
    check(folder, mixed(len(family), 8), like_gpu=like_gpu)


@pytest.mark.parametrize("family", some(["llama", "lfm2", "gemma3_text"], ["llama"]))
def test_kernels_that_write_in_place(family: str, kernels: PointerKernels, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model(family), mixed(3, 8), like_gpu=True)
    assert {"decode", "parted decode"} & set(kernels.calls)


@pytest.mark.parametrize("bits", some([8, 4], [8]))
def test_a_quantised_cache(bits: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "wide", "llama", head_dim=64)
    check(folder, mixed(5, 8), kv_bits=bits)


@pytest.mark.parametrize("like_gpu", some([False, True], [False]))
def test_rows_that_read_a_shared_prefix(like_gpu: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    start = tuple(place * 7 % VOCAB for place in range(40))
    wanted = [Generate(number, (*start, number, 3 * number % VOCAB), 20) for number in range(8)]
    check(folder, wanted, share=16, like_gpu=like_gpu)


def test_one_row_on_caches_of_its_own(tmp_path: Path) -> None:
    """Where rows cannot share slabs, a row that runs alone still verifies drafts."""
    folder = write_model(tmp_path / "llama", "llama")
    check(folder, mixed(6, 6), max_rows=1, disabled=frozenset({"slots"}))
