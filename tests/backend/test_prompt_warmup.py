"""A load runs passes over whole prompts in their shapes, as far as there is memory for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest

from millstream.backend.generation import prompt_warmup
from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.prompt_warmup import WarmRoom, warm_up_prompts
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill


def plenty() -> WarmRoom:
    return WarmRoom(lambda: 2**40)


def test_a_load_runs_padded_groups_in_their_usual_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def group(model: object, submits: list[Generate], *padded: object) -> SimpleNamespace:
        seen.append((len(submits), len(submits[0].prompt) - 1))
        return SimpleNamespace(arrays=[], take=lambda ids: ([each for each in submits if each.request_id in ids], rows))

    rows = object()
    inside: set[int] = set()

    def join(members: list[Generate], joining: list[object]) -> None:
        assert joining == [rows] and not inside, "one group after the other"
        inside.update(each.request_id for each in members)
        joined.append(len(members))

    joined: list[int] = []
    batch = SimpleNamespace(join=join, drop=inside.difference_update)
    monkeypatch.setattr(Assembly, "make", lambda self, layout, store: (batch, None))
    monkeypatch.setattr(prompt_warmup, "RightPaddedGroup", group)
    mixed = Layout("mixed", "kernels", group_fill=0.5, padded_chunks=True)
    subject = Assembly(object(), 8)
    warm_up_prompts(subject, mixed, 2048, 7, plenty())
    assert seen == [(rows, length) for length in (128, 64, 256) for rows in (2, 3, 4, 6, 8)]
    assert joined == [rows for rows, _ in seen], "and have their rows join"
    seen.clear()
    warm_up_prompts(subject, mixed, 100, 200, plenty())
    assert seen == [(rows, 64) for rows in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)], "at most 8,192 tokens"
    for other in (replace(mixed, padded_chunks=False), replace(mixed, group_fill=None), replace(mixed, caches="slots")):
        warm_up_prompts(subject, other, 2048, 8, plenty())
    assert len(seen) == 13


def test_a_load_runs_flat_passes_and_has_their_rows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[list[int]] = []
    inside: set[int] = set()

    def join(submits: list[Generate], rows: object) -> None:
        assert not inside, "one pass after the other"
        inside.update(each.request_id for each in submits)

    def prefill(chunks: list[Prefill]) -> list[mx.array]:
        assert all(chunk.joins and not chunk.start for chunk in chunks)
        passes.append([chunk.end for chunk in chunks])
        joining[:] = [chunk.request for chunk in chunks]
        return []

    joining: list[Generate] = []
    batch = SimpleNamespace(join=join, drop=inside.difference_update, forward=lambda: mx.zeros(1))
    prefiller = SimpleNamespace(prefill=prefill, take=lambda ids: (joining[: len(ids)], None))
    monkeypatch.setattr(Assembly, "make", lambda self, layout, store: (batch, prefiller))
    monkeypatch.setattr(Assembly, "flat_passes", lambda self, layout: object())
    subject, flat = Assembly(object(), 8), Layout("classes", "kernels", flat_prompts=True)
    warm_up_prompts(subject, flat, 1024, 4, plenty())
    assert [sum(each) for each in passes] == [64, 128, 256, 384, 512, 640, 768, 896, 1024], "every length"
    assert [len(each) for each in passes] == [1, 1, 2, 3, 4, 4, 4, 4, 4] and not inside
    passes.clear()
    warm_up_prompts(subject, flat, 4096, 1, plenty())
    assert passes == [[64], [128], [256], [384], [512]], "longer prompts have no such pass"


@pytest.mark.parametrize(
    ("available", "expected"), [(2**40, [64, 128, 256, 384, 512]), (0, [64]), (800_000, [64, 128])]
)
def test_passes_that_memory_might_not_hold_are_left_out(
    available: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token takes 2,000 bytes. With the margin, 128 of them need 512,000 and 256 of them 1,024,000."""
    passes: list[int] = []

    def prefill(chunks: list[Prefill]) -> list[mx.array]:
        passes.append(sum(chunk.end for chunk in chunks))
        return [mx.zeros(passes[-1] * 500, mx.float32)]

    batch = SimpleNamespace(join=lambda *rows: None, drop=lambda ids: None, forward=lambda: mx.zeros(1))
    prefiller = SimpleNamespace(prefill=prefill, take=lambda ids: ([], None))
    monkeypatch.setattr(Assembly, "make", lambda self, layout, store: (batch, prefiller))
    monkeypatch.setattr(Assembly, "flat_passes", lambda self, layout: object())
    layout = Layout("classes", "kernels", flat_prompts=True)
    warm_up_prompts(Assembly(object(), 8), layout, 512, 1, WarmRoom(lambda: available))
    assert passes == expected
