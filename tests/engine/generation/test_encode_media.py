"""The scheduler and media: only encoded media are prefilled, one request encodes per step, and images stay whole."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import EncodeMedia, Plan, Prefill, RowFailure, RowOutput, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.messages import Failed, Finished
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.types import Media
from support.tiers import examples


def submit(number: int, length: int, *media: tuple[int, int], max_tokens: int = 3) -> Generate:
    images = tuple(Media("image", start, size, f"image {number} {start}") for start, size in media)
    contents = tuple((each.start, each.digest) for each in images)
    return Generate(number, tuple(range(length)), max_tokens, media=images, contents=contents)


def spans(plan: Plan) -> list[tuple[int, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.end) for chunk in plan.prefill]


def test_prefill_stops_before_media_that_are_not_encoded() -> None:
    subject = GenerationScheduler(max_rows=2, prefill_tokens=10)
    request = submit(1, 20, (4, 3), (9, 2))
    subject.submit(request)
    plan = subject.plan()
    assert (plan.prefill, plan.encode) == ((Prefill(request, 0, 4),), (EncodeMedia(request, 0, 10),))
    subject.advance(plan, StepResult(encoded=((1, 0),)))
    plan = subject.plan()
    assert (plan.prefill, plan.encode) == ((), (EncodeMedia(request, 0, 10),)), (
        "not encoded yet, so it is planned again"
    )
    subject.advance(plan, StepResult(encoded=((1, 1),)))
    plan = subject.plan()
    assert (plan.prefill, plan.encode) == ((Prefill(request, 4, 9),), (EncodeMedia(request, 1, 10),))
    subject.advance(plan, StepResult(encoded=((1, 2),)))
    plan = subject.plan()
    assert (plan.prefill, plan.encode) == ((Prefill(request, 9, 19),), ())


def test_a_prompt_that_starts_with_an_image_gets_a_row_at_once() -> None:
    subject = GenerationScheduler(max_rows=2, prefill_tokens=10)
    request = submit(1, 8, (0, 3))
    subject.submit(request)
    plan = subject.plan()
    assert (plan.prefill, plan.encode) == ((Prefill(request, 0, 0),), (EncodeMedia(request, 0, 10),))
    subject.advance(plan, StepResult(encoded=((1, 1),)))
    assert spans(subject.plan()) == [(1, 0, 7)]


def test_one_request_encodes_per_step_and_others_continue() -> None:
    subject = GenerationScheduler(max_rows=4, prefill_tokens=50, chunk_sizer=ChunkSizer(most=6, least=2))
    subject.submit(submit(1, 1, max_tokens=100))
    subject.advance(subject.plan(), StepResult())
    subject.submit(submit(2, 10, (1, 4)))
    subject.submit(submit(3, 10, (1, 4)))
    subject.submit(submit(4, 5))
    plan = subject.plan()
    assert [(order.request.request_id, order.tokens) for order in plan.encode] == [(2, 6)], (
        "as long as a chunk while rows decode"
    )
    assert spans(plan) == [(2, 0, 1), (3, 0, 1), (4, 0, 4)]
    assert plan.decode == (1,)
    subject.advance(plan, StepResult((RowOutput(1, (7,)),), encoded=((2, 1),)))
    plan = subject.plan()
    assert [order.request.request_id for order in plan.encode] == [3]
    assert spans(plan) == [(2, 1, 7)]


def test_media_that_cannot_be_encoded_fail_only_their_request() -> None:
    subject = GenerationScheduler(max_rows=2, prefill_tokens=10)
    subject.submit(submit(1, 9, (1, 4)))
    subject.submit(submit(2, 1, max_tokens=1))
    events = subject.advance(subject.plan(), StepResult(failed=(RowFailure(1, "damaged image"),)))
    assert events == [Failed(1, "damaged image")]
    plan = subject.plan()
    assert (plan.drop, plan.decode, plan.encode) == ((1,), (2,), ())
    [_, end] = subject.advance(plan, StepResult((RowOutput(2, (5,)),)))
    assert isinstance(end, Finished)


def test_media_that_are_rejected_late_leave_what_was_computed_before() -> None:
    """The chunk of the step that rejects them may not have run."""
    cache = BlockPrefixCache(PrefixIndex(block=4, block_bytes=1, budget=100))
    subject = GenerationScheduler(max_rows=2, prefill_tokens=10, prefix_cache=cache)
    subject.submit(submit(1, 30, (10, 3), (22, 3)))
    subject.advance(subject.plan(), StepResult(encoded=((1, 1),)))
    plan = subject.plan()
    assert spans(plan) == [(1, 10, 20)]
    subject.advance(plan, StepResult(failed=(RowFailure(1, "damaged image"),)))
    plan = subject.plan()
    assert plan.drop == (1,)
    [order] = plan.save
    assert (order.request_id, order.first, order.tokens, len(order.handles)) == (1, 0, 10, 2)


def test_cached_media_are_not_encoded_again() -> None:
    cache = BlockPrefixCache(PrefixIndex(block=4, block_bytes=1, budget=100))
    subject = GenerationScheduler(max_rows=2, prefill_tokens=50, prefix_cache=cache)
    first = submit(1, 20, (2, 4), max_tokens=1)
    subject.submit(first)
    for result in (StepResult(encoded=((1, 1),)), StepResult(), StepResult((RowOutput(1, (5,)),)), StepResult()):
        subject.advance(subject.plan(), result)
    again = Generate(2, first.prompt, 1, media=first.media, contents=first.contents)
    subject.submit(again)
    plan = subject.plan()
    assert spans(plan) == [(2, 16, 19)]
    assert plan.encode == ()


def test_a_partly_cached_image_is_encoded_again() -> None:
    cache = BlockPrefixCache(PrefixIndex(block=4, block_bytes=1, budget=1))
    subject = GenerationScheduler(max_rows=2, prefill_tokens=50, prefix_cache=cache, whole_media=True)
    first = submit(1, 20, (2, 9), max_tokens=1)
    subject.submit(first)
    for result in (StepResult(encoded=((1, 1),)), StepResult(), StepResult((RowOutput(1, (5,)),)), StepResult()):
        subject.advance(subject.plan(), result)
    subject.submit(Generate(2, first.prompt, 1, media=first.media, contents=first.contents))
    plan = subject.plan()
    assert (spans(plan), [order.first for order in plan.encode]) == ([(2, 4, 4)], [0])
    subject.advance(plan, StepResult(encoded=((2, 1),)))
    assert spans(subject.plan()) == [(2, 4, 19)]


def test_audio_may_be_cut_where_images_stay_whole() -> None:
    """Its tokens do not attend to later ones."""
    subject = GenerationScheduler(max_rows=1, prefill_tokens=6, whole_media=True)
    request = submit(1, 30, (2, 20))
    audio = dataclasses.replace(request.media[0], kind="audio")
    subject.submit(dataclasses.replace(request, media=(audio,)))
    plan = subject.plan()
    assert spans(plan) == [(1, 0, 2)]
    subject.advance(plan, StepResult(encoded=((1, 1),)))
    assert spans(subject.plan()) == [(1, 2, 8)]


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_every_prompt_is_prefilled_once_and_in_order(data: st.DataObject) -> None:
    """For any sizes: chunks are consecutive, none enters media that are not encoded, and none ends inside media that
    must stay whole."""
    whole = data.draw(st.booleans())
    budget = data.draw(st.integers(1, 12))
    media, position = [], 0
    for _ in range(data.draw(st.integers(0, 4))):
        start = position + data.draw(st.integers(0, 5))
        media.append((start, data.draw(st.integers(1, 9))))
        position = sum(media[-1])
    length = position + data.draw(st.integers(1, 8))
    subject = GenerationScheduler(max_rows=1, prefill_tokens=budget, whole_media=whole)
    subject.submit(submit(1, length, *media))
    done = encoded = 0
    for _ in range(200):
        plan = subject.plan()
        for _, start, end in spans(plan):
            assert start == done
            assert all(first >= end for first, _ in media[encoded:]), "prefilled media that are not encoded"
            if whole:
                assert not any(first < end < first + size for first, size in media)
            done = end
        slow = data.draw(st.booleans())
        for order in plan.encode:
            assert order.first == encoded
            encoded += 0 if slow else 1
        subject.advance(plan, StepResult(encoded=((1, encoded),) if plan.encode else ()))
        if done == length - 1:
            break
    assert done == length - 1
    assert subject.plan().decode == (1,)
