"""Encoding images: in slices while rows are decoding, once per image, and within a budget."""

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
from millstream.backend.generation.media.encoder import MediaEncoder
from millstream.backend.generation.media.features import FeatureCache, Features
from millstream.backend.generation.media.mrope import grid_spans, mrope_positions
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


class Recording(MlxGenerationBackend):
    """Records every step, the bytes of cached features after it, and every run of the tower."""

    def __init__(self, settings: GenerationSettings) -> None:
        super().__init__(settings)
        self.steps: list[tuple[Plan, StepResult]] = []
        self.cached_bytes: list[int] = []
        self.tower_runs = 0

    def load(self, *args: Any) -> GenerationFacts:
        facts = super().load(*args)
        tower = self.encoder._tower
        run = tower.encode

        def encode(call: Callable[[], Features]) -> Any:
            self.tower_runs += 1
            return run(call)

        tower.encode = encode  # type: ignore[method-assign]
        return facts

    def step(self, plan: Plan) -> StepResult:
        result = super().step(plan)
        self.steps.append((plan, result))
        self.cached_bytes.append(self.encoder.nbytes)
        return result

    @property
    def encoder(self) -> MediaEncoder:
        assert self._loaded is not None and self._loaded.encoder is not None
        return self._loaded.encoder


def recording(folder: Path, **changes: Any) -> tuple[list[Recording], Callable[[], Recording]]:
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording(GenerationSettings("folder", folder, max_rows=5, **changes)))
        return made[0]

    return made, make


def features(size: int) -> Features:
    return Features(mx.zeros((size, 1), dtype=mx.uint8))


def test_the_least_recently_used_features_are_evicted_first() -> None:
    cache = FeatureCache(100)
    for name, size in (("a", 40), ("b", 40), ("c", 101)):
        cache.put(name, features(size))
    assert cache.get("c") is None, "larger than the whole budget"
    assert cache.get("a") is not None
    cache.put("d", features(30))
    assert [cache.get(name) is not None for name in "abd"] == [True, False, True]
    assert cache.nbytes == 70
    cache.clear()
    assert (cache.nbytes, len(cache)) == (0, 0)


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_an_image_is_encoded_once(family: str, vision_model: Callable[[str], Path]) -> None:
    made, make = recording(vision_model(family))
    with engine(make) as driver:
        driver.run(*(Case(family, n, [1], words=3, count=3).submit(n) for n in range(3)))
        driver.run(Case(family, 9, [1, 2, 1], words=3, count=3).submit(9))
        assert made[0].tower_runs == 2


@pytest.mark.parametrize("budget", [0, 8_000])
def test_features_stay_within_their_budget(budget: int, vision_model: Callable[[str], Path]) -> None:
    folder = vision_model("qwen3_vl")
    made, make = recording(folder, feature_bytes=budget)
    wanted = [Case("qwen3_vl", n, [n, n + 1], words=2, count=4) for n in range(6)]
    model = load_model(folder)
    with engine(make) as driver:
        outputs = driver.run(*(case.submit(number) for number, case in enumerate(wanted)))
        assert outputs == [reference(model, case) for case in wanted]
        assert max(made[0].cached_bytes) <= budget
        assert made[0].tower_runs >= 7


def smallest_chunks(facts: GenerationFacts) -> GenerationScheduler:
    return GenerationScheduler(
        max_rows=facts.max_rows, prefill_tokens=50, chunk_sizer=ChunkSizer(most=1, least=1, max_gap=1e-6)
    )


def test_running_rows_get_a_token_in_every_slice(vision_model: Callable[[str], Path]) -> None:
    """A tower is evaluated by layers and slices of attention; a running row gets a token in each of these steps."""
    large = next(seed for seed in range(100) if len(picture("qwen2_5_vl", seed)[1]) == 16)
    made, make = recording(vision_model("qwen2_5_vl"))
    driver = Driver(ThreadLink("slices", make, smallest_chunks))
    driver.start()
    try:
        driver.post(Generate(1, (5, 6, 7), 200))
        driver.wait(lambda: len(driver.tokens.get(1, [])) > 3)
        driver.run(Case("qwen2_5_vl", 3, [large], words=2, count=3).submit(2))
    finally:
        driver.stop()
    encode_steps = [(plan, result) for plan, result in made[0].steps if plan.encode]
    assert 10 <= len(encode_steps) <= 60
    assert [result.encoded for _, result in encode_steps] == [*[((2, 0),)] * (len(encode_steps) - 1), ((2, 1),)]
    assert all([row.request_id for row in result.rows] == [1] for _, result in encode_steps)


def test_only_requests_with_mismatched_media_fail(vision_model: Callable[[str], Path]) -> None:
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
            assert "do not match the model or the prompt" in end.message
        assert isinstance(driver.ends[5][0], Finished)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_video_has_a_grid_per_frame(family: str, vision_model: Callable[[str], Path]) -> None:
    """Qwen2.5-VL has consecutive frames, Qwen3-VL has text between them."""
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


def test_positions_in_three_dimensions() -> None:
    positions, rope_delta = mrope_positions(9, [(2, (1, 2, 2)), (7, (1, 1, 1))])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]
    assert rope_delta == -2
    assert grid_spans(np.array([4, 5, 8, 9]), (2, 1, 2)) == [(4, (1, 1, 2)), (8, (1, 1, 2))]
    assert grid_spans(np.array([4, 5, 6, 7]), (2, 1, 2)) == [(4, (2, 1, 2))]
    with pytest.raises(ValueError, match="a grid of 2 x 1 x 2 has 3 tokens"):
        grid_spans(np.array([4, 5, 6]), (2, 1, 2))


@pytest.mark.parametrize("masked", [False, True])
def test_sliced_attention_gives_the_same_result(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_attention, "MAX_PAIRS", 100)
    mx.random.seed(1)
    q, k, v = (mx.random.normal((1, 2, 23, 8)) for _ in range(3))
    mask = mx.random.normal((1, 1, 23, 23)) if masked else None
    slices: list[mx.array] = []
    sliced = tower_attention.in_slices(mx.fast.scaled_dot_product_attention, lambda out, cost: slices.append(out))
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    assert mx.allclose(sliced(q, k, v, scale=0.3, mask=mask), expected, atol=1e-6)
    assert len(slices) == 12


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen2_5_vl", 3), ("qwen3_vl", 3), ("gemma3", 3), ("idefics3", 3), ("llava", 3), ("pixtral", 3)],
)
def test_towers_call_sliced_attention(family: str, layers: int, vision_model: Callable[[str], Path]) -> None:
    """Gemma 4's tower imports its attention inside the call, where it cannot be patched."""
    vlm = load_model(vision_model(family))
    towers = [child for name, child in vlm.children().items() if name != "language_model"]
    assert sum(tower_attention.slice_attention(tower, lambda out, cost: None) for tower in towers) == layers


def test_a_text_only_model_refuses_media(tiny_model: Callable[[str], Path]) -> None:
    """Instead of prefilling the media tokens as text."""
    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", tiny_model("llama"), max_rows=5))) as driver:
        driver.run(Case("llava", 1, [1], words=2, count=3).submit(1), Generate(2, (5, 6, 7), 4))
        assert driver.ends[1] == [Failed(1, "this model takes text only")]
        assert len(driver.tokens[2]) == 4
