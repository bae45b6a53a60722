"""Video processor of the Qwen-VL models: frames in temporal groups; Qwen3-VL has a timestamp before each group."""

from __future__ import annotations

import numpy as np
from PIL import Image

from millstream.media.frame_sampling import FrameSampling
from millstream.media.frames import Frames
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import (
    IMAGENET_STANDARD,
    OPENAI_CLIP,
    ModelFiles,
    Normalizer,
    Settings,
    resize,
)
from millstream.media.processors.qwen import target_size, to_patches

MIN_PIXELS, MAX_PIXELS = 128 * 32 * 32, 32 * 32 * 768
"""Of all frames together: defaults."""


class QwenVideoProcessor:
    def __init__(self, files: ModelFiles, video_token: str, begin: str, end: str) -> None:
        """`begin` and `end`: the tokens that the chat template puts around `video_token`."""
        self._video_token = video_token
        self._timestamps = str(files.config.get("model_type", "")).startswith("qwen3")
        self._around = (begin, end)
        text = f"{begin}{video_token}{end}" if self._timestamps else video_token
        self.placeholder = Placeholder(text, files.token_id("video_token_id", "video_token_index"))
        settings, vision = files.video or files.image, files.vision
        self.sampling = _sampling(settings)
        mean, std = IMAGENET_STANDARD if self._timestamps else OPENAI_CLIP
        self._normalize = Normalizer.read(settings, mean=mean, std=std)
        self._patch = int(settings.get("patch_size") or vision.get("patch_size") or (16 if self._timestamps else 14))
        self._merge = int(settings.get("merge_size") or vision.get("spatial_merge_size") or 2)
        self._group = int(settings.get("temporal_patch_size") or vision.get("temporal_patch_size") or 2)
        size = settings.get("size") or {}
        self._min_pixels = int(settings.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS)
        self._max_pixels = int(settings.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS)

    def prepare(self, video: Frames) -> PreparedMedia:
        first, count = video.images[0], len(video.images)
        unit = self._patch * self._merge
        padded = -(-count // self._group) * self._group
        height, width = target_size(
            first.height, first.width, unit, self._min_pixels, self._max_pixels, frames=count, padded=padded
        )
        frames = [self._normalize(resize(image, height, width, Image.Resampling.BICUBIC)) for image in video.images]
        frames += frames[-1:] * (padded - count)
        seconds = video.seconds + video.seconds[-1:] * (padded - count)
        patches, grid = to_patches(np.stack(frames), self._patch, self._merge, self._group)
        tokens_per_group = int(grid[0, 1] * grid[0, 2]) // self._merge**2
        groups = padded // self._group
        tensors = {"pixel_values_videos": patches, "video_grid_thw": grid}
        text = self._text(seconds, tokens_per_group, groups)
        return PreparedMedia("video", tensors, text, tokens_per_group * groups)

    def _text(self, seconds: list[float], tokens_per_group: int, groups: int) -> str:
        if not self._timestamps:
            return self._video_token * (tokens_per_group * groups)
        begin, end = self._around
        starts = range(0, len(seconds), self._group)
        middles = [(seconds[start] + seconds[start + self._group - 1]) / 2 for start in starts]
        features = self._video_token * tokens_per_group
        return "".join(f"<{middle:.1f} seconds>{begin}{features}{end}" for middle in middles)


def _sampling(settings: Settings) -> FrameSampling:
    """As the model's settings say, but with our limit on frames: each is decoded and held in memory."""
    default = FrameSampling()
    max_frames = max(1, min(int(settings.get("max_frames") or default.max_frames), default.max_frames))
    min_frames = min(int(settings.get("min_frames") or default.min_frames), max_frames)
    return FrameSampling(float(settings.get("fps") or default.fps), min_frames, max_frames)
