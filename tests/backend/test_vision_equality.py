"""Text and images in one changing batch give, token for token, the output of mlx-vlm for each request alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlx_vlm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.config import FAST_PATHS
from millstream.engine.generation.messages import Generate
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Cancel, Finished
from support.engines import Driver, engine
from support.prefix_caches import BLOCK, caching_scheduler
from support.tiers import some
from support.tiny_vision import FAMILIES, Case, reference, write_vision_model


def cases(family: str, seed: int, count: int) -> list[Case]:
    """No image, one or two, some of them shared by several prompts, with little and much text around them."""
    draw = random.Random(seed)
    return [
        Case(
            family,
            draw.randrange(1000),
            [draw.randrange(5) for _ in range(number % 3)],
            words=draw.choice([0, 3, 12]),
            count=draw.choice([1, 5, 12]),
        )
        for number in range(count)
    ]


@functools.cache
def mlx_vlm_model(folder: Path) -> Any:
    return load_model(folder)


def expected(folder: Path, wanted: Sequence[Case]) -> list[list[int]]:
    outputs = [reference(mlx_vlm_model(folder), case) for case in wanted]
    assert len({token for output in outputs for token in output}) > 8, (
        "the model's outputs are too uniform to tell rows apart"
    )
    return outputs


def backend(folder: Path, **changes: Any) -> Callable[[], MlxGenerationBackend]:
    return lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=5, **changes))


@pytest.mark.parametrize(
    "family",
    some(FAMILIES, ["qwen2_5_vl", "qwen3_vl_moe", "gemma4", "idefics3", "pixtral", "ministral3"]),
)
def test_rows_alone_and_in_a_changing_batch(family: str, vision_model: Callable[[str], Path]) -> None:
    folder = vision_model(family)
    wanted = cases(family, len(family), 9)
    outputs = expected(folder, wanted)
    with engine(backend(folder)) as driver:
        assert driver.facts is not None
        assert driver.facts.max_rows == 5
        usual = ("fast paths: ", "no speculative decoding: its positions depend on media")
        assert [note for note in driver.facts.notes if not note.startswith(usual)] == []
        assert "image" in driver.facts.media
        batch = driver.run(*(case.submit(number) for number, case in enumerate(wanted)))
        assert batch == outputs
    with engine(backend(folder), prefill_tokens=200) as driver:
        alone = [driver.run(case.submit(number))[0] for number, case in enumerate(wanted[:4])]
        assert alone == outputs[:4]


@pytest.mark.parametrize(
    "family",
    some(["qwen2_5_vl", "qwen3_vl", "idefics3", "pixtral", "gemma3", "gemma4"], ["qwen3_vl", "gemma4"]),
)
def test_cached_prefixes_change_no_token(family: str, vision_model: Callable[[str], Path]) -> None:
    """Cold, then warm; then every prompt again with its first image replaced."""
    folder = vision_model(family)
    wanted = [case for case in cases(family, 7, 7) if case.images]
    others = [other_image(case, 1000 * number) for number, case in enumerate(wanted, 1)]
    driver = Driver(ThreadLink("cached", backend(folder), functools.partial(caching_scheduler, 1000, None)))
    driver.start()
    try:
        for begin, asked in ((0, wanted), (100, wanted), (200, others), (300, others)):
            submits = [case.submit(begin + number) for number, case in enumerate(asked)]
            assert driver.run(*submits) == [reference(mlx_vlm_model(folder), case) for case in asked]
            cached = [cached_tokens(driver, submit) for submit in submits]
            if begin in (100, 300):
                most = [(len(case.prompt) - 1) // BLOCK * BLOCK for case in asked]
                full = [hit >= full_blocks for hit, full_blocks in zip(cached, most, strict=True)]
                # If a chunk must not split an image, no checkpoint is saved inside one, even at the last block border.
                assert any(full) if family == "gemma4" else all(full), "all earlier prompts are hits"
            elif begin == 200:
                assert all(found <= case.starts[0] for found, case in zip(cached, asked, strict=True))
    finally:
        driver.stop()


def other_image(case: Case, seed: int) -> Case:
    """The same tokens, with the first image replaced by another one of the same size."""
    while True:
        images = [seed, *case.images[1:]]
        other = Case(case.family, case.seed, images, words=case.words, count=case.count)
        if other.prompt == case.prompt:
            return other
        seed += 1


def cached_tokens(driver: Driver, submit: Generate) -> int:
    end = driver.ends[submit.request_id][0]
    assert isinstance(end, Finished)
    return end.usage.cached_tokens


PATHS: dict[str, dict[str, Any]] = {
    "none": {"disabled": frozenset(FAST_PATHS)},
    "slots as on a GPU": {"disabled": frozenset(FAST_PATHS) - {"slots"}, "like_gpu": True},
    "all as on a GPU": {"like_gpu": True},
}


@pytest.mark.parametrize(
    ("family", "path"),
    some(
        [(family, path) for family in ("qwen3_vl", "gemma4-small", "ministral3") for path in PATHS],
        [("qwen3_vl", "none"), ("gemma4-small", "slots as on a GPU"), ("ministral3", "all as on a GPU")],
    ),
)
def test_every_fast_path_on_and_off_gives_the_same(family: str, path: str, vision_model: Callable[[str], Path]) -> None:
    folder = vision_model(family)
    wanted = cases(family, 3, 9)
    with engine(backend(folder, **PATHS[path]), prefill_tokens=40) as driver:
        submits = [case.submit(number) for number, case in enumerate(wanted)]
        assert driver.run(*submits) == expected(folder, wanted)


@pytest.mark.parametrize("family", some(["qwen3_vl", "gemma4"], ["gemma4"]))
def test_rows_that_leave_do_not_change_the_others(family: str, vision_model: Callable[[str], Path]) -> None:
    folder = vision_model(family)
    wanted = cases(family, 5, 8)
    with engine(backend(folder)) as driver:
        for number, case in enumerate(wanted):
            driver.post(wanted[-1 - number].submit(1000 + number, 300))
            driver.post(case.submit(number))
            if number % 2:
                driver.post(Cancel(1000 + number))
        driver.wait(lambda: any(key < 1000 for key in driver.ends))
        for number in range(len(wanted)):
            driver.post(Cancel(1000 + number))
        driver.wait_ended(*range(len(wanted)))
        assert [driver.tokens.get(number, []) for number in range(len(wanted))] == expected(folder, wanted)


@pytest.mark.parametrize("family", some(["qwen2_5_vl", "llava"], ["qwen2_5_vl"]))
def test_one_prompt_and_many_images(family: str, vision_model: Callable[[str], Path]) -> None:
    """All in one batch and of one size: each output depends on its own image."""
    folder = vision_model(family)
    drawn = [Case(family, 1, [image], words=5, count=8) for image in range(60)]
    wanted = [case for case in drawn if case.prompt == drawn[0].prompt][:8]
    outputs = [reference(mlx_vlm_model(folder), case) for case in wanted]
    assert len({tuple(output) for output in outputs}) > 2, "the images make no difference"
    with engine(backend(folder)) as driver:
        assert driver.run(*(case.submit(number) for number, case in enumerate(wanted))) == outputs


def test_no_state_of_a_request_is_left_on_the_model(vision_model: Callable[[str], Path]) -> None:
    made: list[MlxGenerationBackend] = []

    def make() -> MlxGenerationBackend:
        made.append(MlxGenerationBackend(GenerationSettings("folder", vision_model("qwen3_vl"), max_rows=5)))
        return made[0]

    with engine(make) as driver:
        driver.run(*(case.submit(number) for number, case in enumerate(cases("qwen3_vl", 2, 6))))
        loaded = made[0]._loaded
        assert loaded is not None
        language = loaded.assembly.model.language
        assert (language._rope_deltas, language._position_ids) == (None, None)


@pytest.mark.parametrize("unpack", [True, False])
def test_a_quantised_model_takes_images(unpack: bool, tmp_path: Path) -> None:
    """4-bit weights in the file: dequantised for the CPU, and as they are."""
    folder = write_vision_model(tmp_path / "packed", "qwen3_vl", bits=4)
    wanted = cases("qwen3_vl", 4, 5)
    with engine(backend(folder, unpack=unpack)) as driver:
        assert driver.facts is not None
        assert driver.facts.dtype == ("float32" if unpack else "4-bit")
        assert driver.run(*(case.submit(number) for number, case in enumerate(wanted))) == expected(folder, wanted)
