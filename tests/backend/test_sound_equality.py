"""Sounds, images and text in one churning batch give, token for token, what mlx-vlm gives for each request alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.utils import load_model

from millstream.backend.text_model import MlxTextBackend, TextModelSettings
from millstream.config import FAST_PATHS
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Finished, Submit
from support.engines import Driver, engine
from support.keepers import BLOCK, keeping_scheduler
from support.tiny_sound import HeardCase, OneByOne, reference

FAMILIES = ["gemma4-audio", "gemma4-audio-blocks"]
MEDIA: list[list[int | float]] = [
    [],
    [0.3],
    [0.21, 3],
    [],
    [4, 0.55],
    [0.42, 0.42],
    [0.1, 5, 0.37, 0.6],
    [0.011],
    [2],
]
"""Sounds by their seconds, images by their numbers."""


def cases(family: str, seed: int) -> list[HeardCase]:
    draw = random.Random(seed)
    return [
        HeardCase(
            family,
            draw.randrange(1000),
            media,
            words=draw.choice([0, 3, 12]),
            count=draw.choice([1, 5, 12]),
            voice=draw.randrange(3),
        )
        for media in MEDIA
    ]


@functools.cache
def whole(folder: Path) -> Any:
    return load_model(folder)


@functools.cache
def careful(folder: Path) -> Any:
    """For prompts with several sounds: see `OneByOne`."""
    model = load_model(folder)
    model.audio_tower = OneByOne(model.audio_tower)
    return model


def expected(folder: Path, wanted: Sequence[HeardCase]) -> list[list[int]]:
    models = [careful(folder) if len(case.samples) > 1 else whole(folder) for case in wanted]
    return [reference(model, case) for model, case in zip(models, wanted, strict=True)]


def backend(folder: Path, **changes: Any) -> Callable[[], MlxTextBackend]:
    return lambda: MlxTextBackend(TextModelSettings("folder", folder, max_rows=5, **changes))


@pytest.mark.parametrize("prefill_tokens", [7, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_alone_and_in_a_churning_batch(
    family: str, prefill_tokens: int, vision_model: Callable[[str], Path]
) -> None:
    folder = vision_model(family)
    wanted = cases(family, prefill_tokens)
    answers = expected(folder, wanted)
    assert len({token for answer in answers for token in answer}) > 8, "the model says too little to tell rows apart"
    with engine(backend(folder), prefill_tokens=prefill_tokens) as driver:
        assert driver.facts is not None
        assert driver.facts.media == ("image", "audio")
        batch = driver.run(*(case.submit(number) for number, case in enumerate(wanted)))
        assert batch == answers
    with engine(backend(folder), prefill_tokens=prefill_tokens) as driver:
        assert [driver.run(case.submit(number))[0] for number, case in enumerate(wanted)] == answers


def test_several_sounds_of_one_length_are_as_mlx_vlm_has_them(vision_model: Callable[[str], Path]) -> None:
    """Here nothing is padded, and mlx-vlm is right as it is."""
    folder = vision_model("gemma4-audio")
    wanted = [HeardCase("gemma4-audio", n, [0.4, 0.4, 0.4], words=3, count=9, voice=n) for n in range(3)]
    with engine(backend(folder)) as driver:
        answers = driver.run(*(case.submit(number) for number, case in enumerate(wanted)))
    assert answers == [reference(whole(folder), case) for case in wanted]


@pytest.mark.parametrize("length", [0.011, 0.04, 0.05, 0.0501, 0.061, 0.3, 0.301, 0.33, 0.34, 0.344])
def test_the_tower_gives_as_many_features_as_there_are_places(
    length: float, vision_model: Callable[[str], Path]
) -> None:
    case = HeardCase("gemma4-audio", 1, [length], words=1, count=1)
    tensor = case.media[0].tensors[0][1]
    features = mx.array(np.frombuffer(tensor.data, np.float32).reshape(tensor.shape))
    out, _ = whole(vision_model("gemma4-audio")).audio_tower(features, mx.zeros(features.shape[:2], dtype=mx.bool_))
    assert out.shape[:2] == (1, case.media[0].length)


@pytest.mark.parametrize("family", FAMILIES)
def test_beginnings_that_are_kept_change_no_token(family: str, vision_model: Callable[[str], Path]) -> None:
    """Cold, then warm; and every prompt once more with other sounds in the same places."""
    folder = vision_model(family)
    wanted = [HeardCase(family, n, [0.3, n, 0.4][: 1 + n % 3], words=6, count=6) for n in range(5)]
    others = [HeardCase(family, n, [0.3, n, 0.4][: 1 + n % 3], words=6, count=6, voice=7) for n in range(5)]
    assert [case.prompt for case in wanted] == [case.prompt for case in others], "equal texts"
    answers, changed = expected(folder, wanted), expected(folder, others)
    assert answers != changed, "sounds make no difference here"
    driver = Driver(ThreadLink("kept", backend(folder), functools.partial(keeping_scheduler, 1000, None)))
    driver.start()
    try:
        for begin, asked, right in ((0, wanted, answers), (100, wanted, answers), (200, others, changed)):
            submits = [case.submit(begin + number) for number, case in enumerate(asked)]
            assert driver.run(*submits) == right
            cached = [cached_tokens(driver, submit) for submit in submits]
            if begin == 100:
                most = [(len(case.prompt) - 1) // BLOCK * BLOCK for case in asked]
                full = [found >= blocks for found, blocks in zip(cached, most, strict=True)]
                assert any(full) if family == "gemma4-audio-blocks" else all(full), "what was read once is found"
            if begin == 200:
                assert all(found <= case.media[0].start for found, case in zip(cached, asked, strict=True))
    finally:
        driver.stop()


def cached_tokens(driver: Driver, submit: Submit) -> int:
    end = driver.ends[submit.request_id][0]
    assert isinstance(end, Finished)
    return end.usage.cached_tokens


def test_one_question_and_many_sounds(vision_model: Callable[[str], Path]) -> None:
    """All in one batch and of one length: each answer is that of its own sound."""
    folder = vision_model("gemma4-audio")
    wanted = [HeardCase("gemma4-audio", 1, [0.5], words=5, count=8, voice=voice) for voice in range(10)]
    assert len({case.prompt for case in wanted}) == 1
    answers = expected(folder, wanted)
    assert len({tuple(answer) for answer in answers}) > 2, "sounds make no difference here"
    with engine(backend(folder)) as driver:
        assert driver.run(*(case.submit(number) for number, case in enumerate(wanted))) == answers


PATHS: dict[str, dict[str, Any]] = {
    "none": {"disabled": frozenset(FAST_PATHS)},
    "all as on a GPU": {"like_gpu": True},
}


@pytest.mark.parametrize("path", PATHS)
def test_every_fast_path_on_and_off_gives_the_same(path: str, vision_model: Callable[[str], Path]) -> None:
    folder = vision_model("gemma4-audio")
    wanted = cases("gemma4-audio", 3)
    with engine(backend(folder, **PATHS[path]), prefill_tokens=40) as driver:
        submits = [case.submit(number) for number, case in enumerate(wanted)]
        assert driver.run(*submits) == expected(folder, wanted)
