"""Encoding images: in slices beside running rows, once for each image, and within a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.media import tower_attention
from millstream.backend.generation.media.features import FeatureCache, Features
from millstream.backend.generation.media.mrope import lay_out, spans_of
from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Failed, Finished
from millstream.model_facts import GenerationFacts
from millstream.types import Media
from support.engines import Driver, engine
from support.tiny_vision import END, START, VIDEO, Case, picture, reference, tensors


class Watched(MlxGenerationBackend):
    """Notes every step, what the features took after it, and every run of the tower."""

    def __init__(self, settings: GenerationSettings) -> None:
        super().__init__(settings)
        self.steps: list[tuple[Plan, StepResult]] = []
        self.kept: list[int] = []
        self.encoded = 0

    def load(self, *args: Any) -> GenerationFacts:
        facts = super().load(*args)
        assert self._encoder is not None
        tower = self._encoder._tower
        run = tower.encode

        def encode(work: Callable[[], Features]) -> Any:
            self.encoded += 1
            return run(work)

        tower.encode = encode  # type: ignore[method-assign]
        return facts

    def step(self, plan: Plan) -> StepResult:
        result = super().step(plan)
        assert self._encoder is not None
        self.steps.append((plan, result))
        self.kept.append(self._encoder.nbytes)
        return result


def watched(folder: Path, **changes: Any) -> tuple[list[Watched], Callable[[], Watched]]:
    made: list[Watched] = []

    def make() -> Watched:
        made.append(Watched(GenerationSettings("folder", folder, max_rows=5, **changes)))
        return made[0]

    return made, make


def features(size: int) -> Features:
    return Features(mx.zeros((size, 1), dtype=mx.uint8))


def test_the_least_recently_used_features_leave_first() -> None:
    cache = FeatureCache(100)
    for name, size in (("a", 40), ("b", 40), ("c", 101)):
        cache.put(name, features(size))
    assert cache.get("c") is None, "too large for all of it"
    assert cache.get("a") is not None
    cache.put("d", features(30))
    assert [cache.get(name) is not None for name in "abd"] == [True, False, True]
    assert cache.nbytes == 70
    cache.clear()
    assert (cache.nbytes, len(cache)) == (0, 0)


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_an_image_is_encoded_once(family: str, vision_model: Callable[[str], Path]) -> None:
    made, make = watched(vision_model(family))
    with engine(make) as driver:
        driver.run(*(Case(family, n, [1], words=3, count=3).submit(n) for n in range(3)))
        driver.run(Case(family, 9, [1, 2, 1], words=3, count=3).submit(9))
        assert made[0].encoded == 2


@pytest.mark.parametrize("budget", [0, 8_000])
def test_features_stay_within_their_budget(budget: int, vision_model: Callable[[str], Path]) -> None:
    folder = vision_model("qwen3_vl")
    made, make = watched(folder, feature_bytes=budget)
    wanted = [Case("qwen3_vl", n, [n, n + 1], words=2, count=4) for n in range(6)]
    model = load_model(folder)
    with engine(make) as driver:
        answers = driver.run(*(case.submit(number) for number, case in enumerate(wanted)))
        assert answers == [reference(model, case) for case in wanted]
        assert max(made[0].kept) <= budget
        assert made[0].encoded >= 7


def cut_finely(facts: GenerationFacts) -> GenerationScheduler:
    return GenerationScheduler(max_rows=facts.max_rows, prefill_tokens=50, chunk_sizer=ChunkSizer(most=1, least=1))


def test_running_rows_get_a_token_in_every_slice(vision_model: Callable[[str], Path]) -> None:
    """Layers and attention of a tower are slices; a running row gets a token in each step of that."""
    large = next(seed for seed in range(100) if len(picture("qwen2_5_vl", seed)[1]) == 16)
    made, make = watched(vision_model("qwen2_5_vl"))
    driver = Driver(ThreadLink("slices", make, cut_finely))
    driver.start()
    try:
        driver.post(Generate(1, (5, 6, 7), 200))
        driver.wait(lambda: len(driver.tokens.get(1, [])) > 3)
        driver.run(Case("qwen2_5_vl", 3, [large], words=2, count=3).submit(2))
    finally:
        driver.stop()
    looks = [(plan, result) for plan, result in made[0].steps if plan.encode]
    assert 10 <= len(looks) <= 60
    assert [result.encoded for _, result in looks] == [*[((2, 0),)] * (len(looks) - 1), ((2, 1),)]
    assert all([row.request_id for row in result.rows] == [1] for _, result in looks)


def test_media_that_do_not_fit_fail_alone(vision_model: Callable[[str], Path]) -> None:
    folder = vision_model("qwen2_5_vl")
    good = Case("qwen2_5_vl", 3, [3], words=2, count=6)
    submit = good.submit(2)
    grid = tensors({"image_grid_thw": np.array([[1, 2, 2]], dtype=np.int64)})
    wrong = {
        2: dataclasses.replace(submit.media[0], tensors=(submit.media[0].tensors[0], *grid)),
        3: dataclasses.replace(submit.media[0], digest="cut", tensors=submit.media[0].tensors[1:]),
        4: dataclasses.replace(submit.media[0], start=len(submit.prompt) - 2, length=1),
    }
    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=5))) as driver:
        driver.run(
            good.submit(1),
            *(dataclasses.replace(submit, request_id=number, media=(each,)) for number, each in wrong.items()),
            Generate(5, (5, 6, 7), 8),
        )
        assert driver.tokens[1] == reference(load_model(folder), good)
        for number in wrong:
            end = driver.ends[number][0]
            assert isinstance(end, Failed) and not end.gone
            assert "its media do not fit the model" in end.message
        assert isinstance(driver.ends[5][0], Finished)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_video_is_read_frame_by_frame(family: str, vision_model: Callable[[str], Path]) -> None:
    """Qwen2.5-VL has its frames side by side, Qwen3-VL has text between them."""
    folder = vision_model(family)
    frames, rows, columns = 3, 4, 6
    each = [VIDEO] * (rows * columns // 4)
    between = [END, 17, START] if family == "qwen3_vl" else []
    inner = [token for _ in range(frames) for token in [*each, *between]]
    inner = inner[: len(inner) - len(between)]
    pixels = np.random.default_rng(4).normal(size=(frames * rows * columns, 3 * 2 * 4 * 4)).astype(np.float32)
    arrays = {"pixel_values_videos": pixels, "video_grid_thw": np.array([[frames, rows, columns]], dtype=np.int64)}
    case = Case(family, 1, [], words=4, count=10)
    case.prompt = (8, 9, START, *inner, END, *case.prompt)
    case.extra = arrays
    video = Media("video", 3, len(inner), "video", tensors(arrays))
    submit = dataclasses.replace(case.submit(1), media=(video,), contents=((3, "video"),))
    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=5))) as driver:
        assert driver.run(submit, Generate(2, (5, 6, 7), 8))[0] == reference(load_model(folder), case)


def test_places_in_three_dimensions() -> None:
    places, shift = lay_out(9, [(2, (1, 2, 2)), (7, (1, 1, 1))])
    assert places.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]
    assert shift == -2
    assert spans_of(np.array([4, 5, 8, 9]), (2, 1, 2)) == [(4, (1, 1, 2)), (8, (1, 1, 2))]
    assert spans_of(np.array([4, 5, 6, 7]), (2, 1, 2)) == [(4, (2, 1, 2))]
    with pytest.raises(ValueError, match="a grid of 2 x 1 x 2 has 3 tokens"):
        spans_of(np.array([4, 5, 6]), (2, 1, 2))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_pieces_is_the_same(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_attention, "PAIRS", 100)
    mx.random.seed(1)
    q, k, v = (mx.random.normal((1, 2, 23, 8)) for _ in range(3))
    mask = mx.random.normal((1, 1, 23, 23)) if masked else None
    pieces: list[mx.array] = []
    cut = tower_attention.in_pieces(mx.fast.scaled_dot_product_attention, lambda out, work: pieces.append(out))
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    assert mx.allclose(cut(q, k, v, scale=0.3, mask=mask), expected, atol=1e-6)
    assert len(pieces) == 12


@pytest.mark.parametrize(
    ("family", "found"),
    [("qwen2_5_vl", 3), ("qwen3_vl", 3), ("gemma3", 3), ("idefics3", 3), ("llava", 3), ("pixtral", 3)],
)
def test_towers_call_attention_in_pieces(family: str, found: int, vision_model: Callable[[str], Path]) -> None:
    """Gemma 4's tower imports its attention inside of the call, where it cannot be exchanged."""
    whole = load_model(vision_model(family))
    towers = [child for name, child in whole.children().items() if name != "language_model"]
    assert sum(tower_attention.cut_attention(tower, lambda out, work: None) for tower in towers) == found


def test_a_model_without_eyes_refuses_media(tiny_model: Callable[[str], Path]) -> None:
    """Rather than to read the tokens that stand for them."""
    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", tiny_model("llama"), max_rows=5))) as driver:
        driver.run(Case("llava", 1, [1], words=2, count=3).submit(1), Generate(2, (5, 6, 7), 4))
        assert driver.ends[1] == [Failed(1, "this model takes text only")]
        assert len(driver.tokens[2]) == 4
