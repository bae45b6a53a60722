"""Frames of animated images, sampled evenly in time."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.frame_sampling import FrameSampling, sample_frames
from millstream.media.frames import open_frames
from millstream.media.limits import MediaLimits


def animation(count: int, kind: str = "GIF", *, size: int = 20, duration: int = 500) -> bytes:
    frames = [Image.new("RGB", (size, size), (40 * (number % 6), 0, 0)) for number in range(count)]
    buffer = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=duration, loop=0, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_frames_and_their_times(kind: str) -> None:
    video = open_frames(animation(5, kind), MediaLimits(), FrameSampling())
    assert [image.getpixel((3, 3))[0] for image in video.images] == [0, 40, 80, 120, 160]
    assert {(image.mode, image.size) for image in video.images} == {("RGB", (20, 20))}
    assert video.seconds == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])


def test_a_still_image_is_one_frame() -> None:
    assert open_frames(animation(1), MediaLimits(), FrameSampling()).seconds == [0.0]


def test_two_frames_per_second_are_sampled() -> None:
    video = open_frames(animation(30, duration=100), MediaLimits(), FrameSampling())
    assert video.seconds == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])


@pytest.mark.parametrize("count, span", [(1, 0.1), (2, 9.0), (3, 0.01), (500, 0.04), (500, 10.0)])
def test_sampled_indices_are_few_and_valid(count: int, span: float) -> None:
    indices = sample_frames([span * (number + 1) for number in range(count)], FrameSampling())
    assert indices == sorted(set(indices))
    assert indices[0] == 0
    assert indices[-1] < count
    assert min(count, 4) <= len(indices) <= FrameSampling().max_frames


def test_too_many_pixels_in_total() -> None:
    with pytest.raises(MediaRefused, match="more than 2 frames of 20 x 20"):
        open_frames(animation(3), MediaLimits(pixels=400), FrameSampling())
    assert len(open_frames(animation(2), MediaLimits(pixels=400), FrameSampling()).images) == 2


@pytest.mark.parametrize("data", [b"RIFF\0\0\0\0AVI ", b"hello", animation(3)[:200]])
def test_files_that_are_not_videos(data: bytes) -> None:
    with pytest.raises(MediaRefused, match="or an animated GIF, WEBP or PNG"):
        open_frames(data, MediaLimits(), FrameSampling())
