"""Rows that read their first tokens in the prefix cache: one copy for all of them, and the same tokens as without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.link import ThreadLink
from support.engines import Driver, engine
from support.pointer_kernels import backend_with_kernels
from support.prefix_caches import caching_scheduler
from support.tiers import some
from support.tiny import VOCAB, write_model

PREFIXES = [tuple((seed * 7 + place * (seed + 3)) % VOCAB for place in range(60)) for seed in range(3)]


def prompts() -> list[tuple[int, ...]]:
    """Turns of conversations that branch: several prefixes, each continued in many ways."""
    found: list[tuple[int, ...]] = []
    for turn in range(24):
        prefix = PREFIXES[turn % 3][: 20 + turn * 5 % 41]
        found.append((*prefix, *((turn * 5 + place) % VOCAB for place in range(1 + turn % 7))))
    return [*found, *found[:6]]


@pytest.fixture(params=["MLX", "as on a GPU", "kernels"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a backend."""
    if request.param == "kernels":
        backend_with_kernels(monkeypatch, blocks=False)
        return {"like_gpu": True, "disabled": frozenset({"fused-matmul"})}
    return {"like_gpu": request.param == "as on a GPU"}


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that rows were given to share."""
    found: list[int] = []
    original = PrefixStore.share

    def share(self: PrefixStore, handles: Any, most: int) -> Any:
        pieces = original(self, handles, most)
        found.append(sum(piece.tokens for piece in pieces))
        return pieces

    monkeypatch.setattr(PrefixStore, "share", share)
    return found


def run(make: Callable[[], MlxGenerationBackend], budget: int, rounds: list[list[Generate]]) -> list[list[list[int]]]:
    driver = Driver(ThreadLink("sharing", make, functools.partial(caching_scheduler, budget, None)))
    driver.start()
    try:
        return [driver.run(*submits) for submits in rounds]
    finally:
        driver.stop()


@pytest.mark.parametrize("budget", some([10_000, 12], [12]))
def test_rows_that_share_give_the_same(budget: int, how: dict[str, Any], shares: list[int], tmp_path: Path) -> None:
    """Also with a cache that is too small for all of it, so that blocks go while rows end and others begin."""
    folder = write_model(tmp_path / "model", "llama")
    plain = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=5))
    ours = functools.partial(
        MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=5, share_tokens=4, **how)
    )
    submits = [Generate(number, prompt, 2 + number * 5 % 17) for number, prompt in enumerate(prompts())]
    again = [Generate(100 + submit.request_id, submit.prompt, submit.max_tokens) for submit in submits]
    with engine(plain) as driver:
        expected = driver.run(*submits)
    assert run(ours, budget, [submits, again]) == [expected, expected]
    assert len(shares) > 30 and max(shares) >= 16


def test_a_prefix_of_many_rows_is_there_once(tmp_path: Path) -> None:
    """Sixteen rows with the same 800 tokens: their memory, and the prefix cache's, together."""
    folder = write_model(tmp_path / "model", "llama", max_position_embeddings=2000)
    prefix = tuple(place * 11 % VOCAB for place in range(800))
    backend = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=16, share_tokens=256))
    facts = backend.load()
    scheduler = caching_scheduler(10**6, None, facts, functools.partial(_wide, GenerationScheduler))
    for number in range(16):
        scheduler.submit(Generate(number, (*prefix, number, 1, 2), 20))
    held = 0
    while not scheduler.idle:
        plan = scheduler.plan()
        scheduler.advance(plan, backend.step(plan))
        if len(plan.decode) == 16 and not plan.prefill and not plan.drop:
            held = max(held, backend.memory_bytes() - facts.weight_bytes)
    backend.close()
    in_tokens = held / facts.kv_bytes_per_token
    assert in_tokens < 800 + 16 * 256 + 1024 + 16 * 20, "a copy for each row would be 12,800 tokens more"


def _wide(make: Callable[..., GenerationScheduler], **settings: Any) -> GenerationScheduler:
    return make(**{**settings, "prefill_tokens": 4000})


def test_blocks_that_rows_read_are_freed_after_the_last_of_them() -> None:
    store = PrefixStore()
    parts = (mx.random.normal((1, 2, 12, 4)), mx.random.normal((1, 2, 12, 4)))
    mx.eval(store.save([1, 2, 3], [parts]))
    whole = store.nbytes
    first, second = store.share([1, 2, 3], 9), store.share([1], 9)
    assert [(piece.start, piece.tokens) for piece in (*first, *second)] == [(0, 12), (0, 4)]
    store.evict([3])
    assert (store.compactable, store.nbytes) == (0, whole), "moved while rows read it"
    store.evict([1, 2])
    assert store.nbytes == whole
    first[0].release()
    assert store.nbytes == whole
    second[0].release()
    assert (store.nbytes, store.compactable) == (0, 0)


def test_a_run_that_was_read_is_compacted_later() -> None:
    store = PrefixStore()
    parts = (mx.random.normal((1, 2, 12, 4)), mx.random.normal((1, 2, 12, 4)))
    mx.eval(store.save([1, 2, 3], [parts]))
    whole = store.nbytes
    (piece,) = store.share([1], 9)
    store.evict([2, 3])
    assert store.compactable == 0
    piece.release()
    assert store.compactable == 1
    mx.eval(store.compact())
    assert store.nbytes == whole // 3


def test_a_row_shares_no_more_runs_than_attention_may_be_called_for() -> None:
    store = PrefixStore()
    for handle in range(4):
        mx.eval(store.save([handle], [(mx.zeros((1, 1, 4, 2)), mx.zeros((1, 1, 4, 2)))]))
    assert len(store.share([0, 1, 2, 3], 2)) == 2
