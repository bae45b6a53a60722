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

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.media.features import Features, Tower
from millstream.config import FAST_PATHS
from millstream.engine.generation.backend import Plan, StepResult
from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.scheduler import Scheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Finished, Submit
from millstream.types import ModelFacts
from support.engines import Driver, engine
from support.prefix_caches import BLOCK, keeping_scheduler
from support.tiers import some
from support.tiny_audio import HeardCase, OneByOne, reference
from support.tiny_vision import SOUND

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


def backend(folder: Path, **changes: Any) -> Callable[[], MlxGenerationBackend]:
    return lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=5, **changes))


@pytest.mark.parametrize(
    ("family", "prefill_tokens"),
    some(
        [(family, tokens) for family in FAMILIES for tokens in (7, 200)],
        [("gemma4-audio", 7), ("gemma4-audio-blocks", 200)],
    ),
)
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


class Noted(MlxGenerationBackend):
    """Notes every step."""

    def __init__(self, settings: GenerationSettings) -> None:
        super().__init__(settings)
        self.steps: list[tuple[Plan, StepResult]] = []

    def step(self, plan: Plan) -> StepResult:
        self.steps.append((plan, super().step(plan)))
        return self.steps[-1][1]


def cut_finely(facts: ModelFacts) -> Scheduler:
    return Scheduler(max_rows=facts.max_rows, prefill_tokens=50, pace=ChunkSizer(most=1, least=1))


def test_running_rows_get_a_token_in_every_slice(vision_model: Callable[[str], Path]) -> None:
    made: list[Noted] = []

    def make() -> Noted:
        made.append(Noted(GenerationSettings("folder", vision_model("gemma4-audio"), max_rows=5)))
        return made[0]

    driver = Driver(ThreadLink("slices", make, cut_finely))
    driver.start()
    try:
        driver.post(Submit(1, (5, 6, 7), 200))
        driver.wait(lambda: len(driver.tokens.get(1, [])) > 3)
        driver.run(HeardCase("gemma4-audio", 3, [2.0], words=2, count=3).submit(2))
    finally:
        driver.stop()
    looks = [(plan, result) for plan, result in made[0].steps if plan.encode]
    assert len(looks) > 10
    assert [result.encoded for _, result in looks] == [*[((2, 0),)] * (len(looks) - 1), ((2, 1),)]
    assert all([row.request_id for row in result.rows] == [1] for _, result in looks)


def test_every_layer_of_the_tower_is_a_slice_once(vision_model: Callable[[str], Path]) -> None:
    """One of them has two names."""
    model = load_model(vision_model("gemma4-audio"))
    tower = Tower(model)
    tokens, features = mx.array([[SOUND] * 5]), mx.zeros((1, 20, 128))
    run = tower.encode(lambda: Features(model.get_input_embeddings(tokens, input_features=features).inputs_embeds[0]))
    before = 2 + 1  # convolutions and what follows them
    each = 2 * 2 + 4 + 1 + 2  # two feed-forwards, attention and its places, the light convolution
    assert len(run._stages) == before + 2 * each + 1 + 1


def test_a_sound_is_encoded_once(vision_model: Callable[[str], Path]) -> None:
    made: list[MlxGenerationBackend] = []

    def make() -> MlxGenerationBackend:
        made.append(backend(vision_model("gemma4-audio"))())
        return made[0]

    with engine(make) as driver:
        same = [HeardCase("gemma4-audio", n, [0.3], words=3, count=3) for n in range(3)]
        driver.run(*(case.submit(number) for number, case in enumerate(same)))
        encoder = made[0]._encoder
        assert encoder is not None
        assert encoder.kept == 1
        driver.run(HeardCase("gemma4-audio", 9, [0.3, 0.3], words=3, count=3).submit(9))
        assert encoder.kept == 2
