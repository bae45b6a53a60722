"""Audio, images and text in one changing batch give, token for token, the output of mlx-vlm for each request alone."""

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
from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Finished
from millstream.model_facts import GenerationFacts
from support.engines import Driver, engine
from support.prefix_caches import BLOCK, caching_scheduler
from support.tiers import some
from support.tiny_audio import AudioCase, OneByOne, reference
from support.tiny_vision import AUDIO

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
"""Audio by its seconds, images by their numbers."""


def cases(family: str, seed: int) -> list[AudioCase]:
    draw = random.Random(seed)
    return [
        AudioCase(
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
def mlx_vlm_model(folder: Path) -> Any:
    return load_model(folder)


@functools.cache
def unpadded_model(folder: Path) -> Any:
    """For prompts with several audio items: see `OneByOne`."""
    model = load_model(folder)
    model.audio_tower = OneByOne(model.audio_tower)
    return model


def expected(folder: Path, wanted: Sequence[AudioCase]) -> list[list[int]]:
    models = [unpadded_model(folder) if len(case.samples) > 1 else mlx_vlm_model(folder) for case in wanted]
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
def test_rows_alone_and_in_a_changing_batch(
    family: str, prefill_tokens: int, vision_model: Callable[[str], Path]
) -> None:
    folder = vision_model(family)
    wanted = cases(family, prefill_tokens)
    outputs = expected(folder, wanted)
    assert len({token for output in outputs for token in output}) > 8, (
        "the model's outputs are too uniform to tell rows apart"
    )
    with engine(backend(folder), prefill_tokens=prefill_tokens) as driver:
        assert driver.facts is not None
        assert driver.facts.media == ("image", "audio")
        batch = driver.run(*(case.submit(number) for number, case in enumerate(wanted)))
        assert batch == outputs
    with engine(backend(folder), prefill_tokens=prefill_tokens) as driver:
        assert [driver.run(case.submit(number))[0] for number, case in enumerate(wanted)] == outputs


def test_several_audio_items_of_one_length_equal_mlx_vlm(vision_model: Callable[[str], Path]) -> None:
    """Nothing is padded here, so mlx-vlm is right as it is."""
    folder = vision_model("gemma4-audio")
    wanted = [AudioCase("gemma4-audio", n, [0.4, 0.4, 0.4], words=3, count=9, voice=n) for n in range(3)]
    with engine(backend(folder)) as driver:
        outputs = driver.run(*(case.submit(number) for number, case in enumerate(wanted)))
    assert outputs == [reference(mlx_vlm_model(folder), case) for case in wanted]


@pytest.mark.parametrize("length", [0.011, 0.04, 0.05, 0.0501, 0.061, 0.3, 0.301, 0.33, 0.34, 0.344])
def test_the_tower_gives_one_feature_per_audio_token(length: float, vision_model: Callable[[str], Path]) -> None:
    case = AudioCase("gemma4-audio", 1, [length], words=1, count=1)
    tensor = case.media[0].tensors[0][1]
    features = mx.array(np.frombuffer(tensor.data, np.float32).reshape(tensor.shape))
    out, _ = mlx_vlm_model(vision_model("gemma4-audio")).audio_tower(
        features, mx.zeros(features.shape[:2], dtype=mx.bool_)
    )
    assert out.shape[:2] == (1, case.media[0].length)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_prefixes_change_no_token(family: str, vision_model: Callable[[str], Path]) -> None:
    """Cold, then warm; then every prompt again with other audio at the same positions."""
    folder = vision_model(family)
    wanted = [AudioCase(family, n, [0.3, n, 0.4][: 1 + n % 3], words=6, count=6) for n in range(5)]
    others = [AudioCase(family, n, [0.3, n, 0.4][: 1 + n % 3], words=6, count=6, voice=7) for n in range(5)]
    assert [case.prompt for case in wanted] == [case.prompt for case in others], "equal prompts"
    outputs, changed = expected(folder, wanted), expected(folder, others)
    assert outputs != changed, "the audio makes no difference"
    driver = Driver(ThreadLink("cached", backend(folder), functools.partial(caching_scheduler, 1000, None)))
    driver.start()
    try:
        for begin, asked, right in ((0, wanted, outputs), (100, wanted, outputs), (200, others, changed)):
            submits = [case.submit(begin + number) for number, case in enumerate(asked)]
            assert driver.run(*submits) == right
            cached = [cached_tokens(driver, submit) for submit in submits]
            if begin == 100:
                most = [(len(case.prompt) - 1) // BLOCK * BLOCK for case in asked]
                full = [found >= blocks for found, blocks in zip(cached, most, strict=True)]
                assert any(full) if family == "gemma4-audio-blocks" else all(full), "all earlier prompts are hits"
            if begin == 200:
                assert all(found <= case.media[0].start for found, case in zip(cached, asked, strict=True))
    finally:
        driver.stop()


def cached_tokens(driver: Driver, submit: Generate) -> int:
    end = driver.ends[submit.request_id][0]
    assert isinstance(end, Finished)
    return end.usage.cached_tokens


def test_one_prompt_and_much_audio(vision_model: Callable[[str], Path]) -> None:
    """All in one batch and of one length: each output depends on its own audio."""
    folder = vision_model("gemma4-audio")
    wanted = [AudioCase("gemma4-audio", 1, [0.5], words=5, count=8, voice=voice) for voice in range(10)]
    assert len({case.prompt for case in wanted}) == 1
    outputs = expected(folder, wanted)
    assert len({tuple(output) for output in outputs}) > 2, "the audio makes no difference"
    with engine(backend(folder)) as driver:
        assert driver.run(*(case.submit(number) for number, case in enumerate(wanted))) == outputs


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


class Recording(MlxGenerationBackend):
    """Records every step."""

    def __init__(self, settings: GenerationSettings) -> None:
        super().__init__(settings)
        self.steps: list[tuple[Plan, StepResult]] = []

    def step(self, plan: Plan) -> StepResult:
        self.steps.append((plan, super().step(plan)))
        return self.steps[-1][1]


def smallest_chunks(facts: GenerationFacts) -> GenerationScheduler:
    sizer = ChunkSizer(most=1, least=1, max_gap=1e-6)
    return GenerationScheduler(max_rows=facts.max_rows, prefill_tokens=50, chunk_sizer=sizer)


def test_running_rows_get_a_token_in_every_slice(vision_model: Callable[[str], Path]) -> None:
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording(GenerationSettings("folder", vision_model("gemma4-audio"), max_rows=5)))
        return made[0]

    driver = Driver(ThreadLink("slices", make, smallest_chunks))
    driver.start()
    try:
        driver.post(Generate(1, (5, 6, 7), 200))
        driver.wait(lambda: len(driver.tokens.get(1, [])) > 3)
        driver.run(AudioCase("gemma4-audio", 3, [2.0], words=2, count=3).submit(2))
    finally:
        driver.stop()
    encode_steps = [(plan, result) for plan, result in made[0].steps if plan.encode]
    assert len(encode_steps) > 10
    assert [result.encoded for _, result in encode_steps] == [*[((2, 0),)] * (len(encode_steps) - 1), ((2, 1),)]
    assert all([row.request_id for row in result.rows] == [1] for _, result in encode_steps)


def test_every_layer_of_the_tower_is_recorded_once(vision_model: Callable[[str], Path]) -> None:
    """One of them has two names."""
    model = load_model(vision_model("gemma4-audio"))
    tower = Tower(model)
    tokens, features = mx.array([[AUDIO] * 5]), mx.zeros((1, 20, 128))
    run = tower.encode(lambda: Features(model.get_input_embeddings(tokens, input_features=features).inputs_embeds[0]))
    before = 2 + 1  # convolutions and their projection
    each = 2 * 2 + 4 + 1 + 2  # two feed-forwards, attention and its positions, the light convolution
    assert len(run._stages) == before + 2 * each + 1 + 1


def test_audio_is_encoded_once(vision_model: Callable[[str], Path]) -> None:
    made: list[MlxGenerationBackend] = []

    def make() -> MlxGenerationBackend:
        made.append(backend(vision_model("gemma4-audio"))())
        return made[0]

    with engine(make) as driver:
        same = [AudioCase("gemma4-audio", n, [0.3], words=3, count=3) for n in range(3)]
        driver.run(*(case.submit(number) for number, case in enumerate(same)))
        loaded = made[0]._loaded
        assert loaded is not None and loaded.encoder is not None
        encoder = loaded.encoder
        assert encoder.cached_items == 1
        driver.run(AudioCase("gemma4-audio", 9, [0.3, 0.3], words=3, count=3).submit(9))
        assert encoder.cached_items == 2
