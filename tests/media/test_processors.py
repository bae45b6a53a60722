"""Each processor equals the family's reference processor: that of transformers (Pillow) or of mlx-vlm (NumPy)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.frame_sampling import FrameSampling
from millstream.media.frames import Frames
from millstream.media.port import PreparedMedia
from millstream.media.processors.base import ImageProcessor, ModelFiles
from millstream.media.processors.loading import FAMILIES
from millstream.media.processors.qwen_video import QwenVideoProcessor

SIZES = [(64, 64), (300, 200), (200, 300), (37, 41), (1000, 90), (61, 640), (1, 1)]
NAME = "<image>"


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def processor(family: str, settings: dict[str, Any], vision: dict[str, Any], **config: Any) -> ImageProcessor:
    config = {"model_type": family, "image_token_index": 7, "image_token_id": 7, "vision_config": vision, **config}
    return FAMILIES[family](ModelFiles(config, settings), NAME)


def equal(prepared: PreparedMedia, **expected: Any) -> None:
    assert prepared.tensors.keys() == expected.keys()
    for name, value in expected.items():
        theirs, ours = np.asarray(value), prepared.tensors[name]
        assert ours.shape == theirs.shape
        assert ours.flags.c_contiguous
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_llava_over_clip(size: tuple[int, int]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    settings = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    vision = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
    image = picture(*size)
    prepared = processor("llava", settings, vision).prepare(image)
    equal(prepared, pixel_values=CLIPImageProcessorPil(**settings)(image)["pixel_values"])
    assert (prepared.feature_tokens, prepared.text) == (16, NAME * 16)
    full = processor("llava", settings, vision, vision_feature_select_strategy="full").prepare(image)
    assert full.feature_tokens == 17


@pytest.mark.parametrize("size", SIZES)
def test_llava_over_siglip(size: tuple[int, int]) -> None:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    settings = {"size": {"height": 60, "width": 60}}
    vision = {"model_type": "siglip_vision_model", "image_size": 60, "patch_size": 10}
    image = picture(*size)
    prepared = processor("llava", settings, vision, vision_feature_select_strategy="full").prepare(image)
    equal(prepared, pixel_values=SiglipImageProcessorPil(**settings)(image)["pixel_values"])
    assert prepared.feature_tokens == 36


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bounds", [{}, {"min_pixels": 28 * 28 * 6, "max_pixels": 28 * 28 * 20}])
def test_qwen(size: tuple[int, int], bounds: dict[str, int]) -> None:
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

    settings = {"patch_size": 14, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], **bounds}
    image = picture(*size)
    prepared = processor("qwen2_5_vl", settings, {}).prepare(image)
    equal(prepared, **Qwen3VLImageProcessor(**settings)([image]))
    _, rows, columns = prepared.tensors["image_grid_thw"][0]
    assert prepared.feature_tokens == rows * columns // 4
    assert prepared.text == NAME * prepared.feature_tokens


def test_qwen_refuses_narrow_images() -> None:
    with pytest.raises(MediaRefused, match="201 x 1 pixels is too narrow"):
        processor("qwen3_vl", {}, {}).prepare(picture(201, 1))


@pytest.mark.parametrize("size", SIZES)
def test_gemma3(size: tuple[int, int]) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    settings = {"size": {"height": 56, "width": 56}, "resample": 2}
    image = picture(*size)
    prepared = processor("gemma3", settings, {"image_size": 56}, mm_tokens_per_image=4).prepare(image)
    equal(prepared, pixel_values=Gemma3ImageProcessorPil(**settings)(image)["pixel_values"])
    assert prepared.text == f"\n\n<start_of_image>{NAME * 4}<end_of_image>\n\n"


@pytest.mark.parametrize("size", SIZES)
def test_gemma4(size: tuple[int, int]) -> None:
    from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4ImageProcessor

    settings = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    image = picture(*size)
    data, tokens = Gemma4ImageProcessor(**settings)([image])
    prepared = processor("gemma4", settings, {}).prepare(image)
    equal(prepared, **data)
    assert prepared.feature_tokens == tokens[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("longest", [112, 28])
def test_idefics3(size: tuple[int, int], split: bool, longest: int) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    settings = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": split}
    image = picture(*size)
    theirs = Idefics3ImageProcessorPil(**settings)(image, return_row_col_info=True)
    prepared = processor("idefics3", settings, {"patch_size": 7}, scale_factor=2).prepare(image)
    equal(prepared, pixel_values=theirs["pixel_values"])
    assert np.asarray(theirs["pixel_attention_mask"]).all(), "a mask with zeros would have to be sent"
    rows, columns = theirs["rows"][0][0], theirs["cols"][0][0]
    assert prepared.text == expanded(rows, columns, 4)
    assert prepared.feature_tokens == (rows * columns + 1) * 4


def expanded(rows: int, columns: int, each: int) -> str:
    from mlx_vlm.models.idefics3.processing_idefics3 import get_image_prompt_string

    return get_image_prompt_string(rows, columns, each, "<fake_token_around_image>", NAME, "<global-img>")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("merge", [1, 2])
def test_pixtral_and_mistral3(size: tuple[int, int], merge: int) -> None:
    from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    settings = {"size": {"longest_edge": 256}}
    image = picture(*size)
    theirs = PixtralImageProcessor(**settings, patch_size=14 * merge)([image])
    prepared = processor("mistral3", settings, {"patch_size": 14}, spatial_merge_size=merge).prepare(image)
    equal(prepared, pixel_values=theirs["pixel_values"], image_sizes=theirs["image_sizes"])
    height, width = theirs["image_sizes"][0]
    rows, columns = height // (14 * merge), width // (14 * merge)
    assert prepared.feature_tokens == rows * columns
    assert prepared.text == "[IMG_BREAK]".join([NAME * columns] * rows) + "[IMG_END]"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("size", [(64, 64), (300, 200), (90, 410)])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_qwen_videos(family: str, size: tuple[int, int], count: int) -> None:
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
        Qwen3VLVideoProcessor,
        _timestamped_video_placeholder,
        _video_group_timestamps,
    )

    settings = {
        "patch_size": 14,
        "min_pixels": 100_000,
        "max_pixels": 200_000,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    images = [picture(*size).transpose(Image.Transpose.ROTATE_180) for _ in range(count)]
    tokens = {"video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10}
    files = ModelFiles({"model_type": family, "vision_config": {}, **tokens}, settings)
    prepared = QwenVideoProcessor(files, "<video>", "<a>", "<b>").prepare(
        Frames(images, [number / 2 for number in range(count)])
    )
    equal(prepared, **Qwen3VLVideoProcessor(**settings)([np.stack([np.asarray(image) for image in images])]))
    groups, rows, columns = prepared.tensors["video_grid_thw"][0]
    each = int(rows * columns) // 4
    assert prepared.feature_tokens == each * groups
    if family == "qwen3_vl":
        metadata = {"frames_indices": range(count), "fps": 2.0}
        times = _video_group_timestamps(int(groups), 2, 2.0, metadata)
        expected = _timestamped_video_placeholder(times, each, "<a>", "<b>").replace("<|placeholder|>", "<video>")
        assert prepared.text == expected
    else:
        assert prepared.text == "<video>" * prepared.feature_tokens


@pytest.mark.parametrize(
    "settings, sampling",
    [
        ({}, FrameSampling(2.0, 4, 64)),
        ({"fps": 1, "min_frames": 2, "max_frames": 10}, FrameSampling(1.0, 2, 10)),
        ({"fps": 4.5, "min_frames": 4, "max_frames": 768}, FrameSampling(4.5, 4, 64)),
        ({"max_frames": 2}, FrameSampling(2.0, 2, 2)),
    ],
)
def test_qwen_frame_sampling(settings: dict[str, Any], sampling: FrameSampling) -> None:
    tokens = {"video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10}
    files = ModelFiles({"model_type": "qwen3_vl", "vision_config": {}, **tokens}, {}, {}, {"size": {}, **settings})
    assert QwenVideoProcessor(files, "<video>", "<a>", "<b>").sampling == sampling
