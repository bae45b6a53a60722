"""Videos for Qwen's models: frames in groups. Qwen3-VL reads the time before each group."""

from __future__ import annotations

import numpy as np
from PIL import Image

from millstream.media.frame_sampling import FrameSampling
from millstream.media.frames import Frames
from millstream.media.port import Mark, Prepared
from millstream.media.processors.base import CLIP, HALVES, Finish, ModelFiles, Settings, resized
from millstream.media.processors.qwen import fitted_size, patches_of

LEAST_PIXELS, MOST_PIXELS = 128 * 32 * 32, 32 * 32 * 768
"""Of all frames together, where the model does not say."""


class QwenVideoProcessor:
    def __init__(self, files: ModelFiles, name: str, begin: str, end: str) -> None:
        """`name`: the token of a video; `begin` and `end`: those that the template puts around it."""
        self._name = name
        self._timed = str(files.config.get("model_type", "")).startswith("qwen3")
        self._around = (begin, end)
        marker = f"{begin}{name}{end}" if self._timed else name
        self.mark = Mark(marker, files.id_of("video_token_id", "video_token_index"))
        looks, vision = files.video_looks or files.looks, files.vision
        self.pace = _pace(looks)
        mean, std = HALVES if self._timed else CLIP
        self._finish = Finish.read(looks, mean=mean, std=std)
        self._patch = int(looks.get("patch_size") or vision.get("patch_size") or (16 if self._timed else 14))
        self._merge = int(looks.get("merge_size") or vision.get("spatial_merge_size") or 2)
        self._group = int(looks.get("temporal_patch_size") or vision.get("temporal_patch_size") or 2)
        size = looks.get("size") or {}
        self._least = int(looks.get("min_pixels") or size.get("shortest_edge") or LEAST_PIXELS)
        self._most = int(looks.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS)

    def prepare(self, video: Frames) -> Prepared:
        first, count = video.images[0], len(video.images)
        unit = self._patch * self._merge
        whole = -(-count // self._group) * self._group
        height, width = fitted_size(
            first.height, first.width, unit, self._least, self._most, frames=count, padded=whole
        )
        frames = [self._finish(resized(image, height, width, Image.Resampling.BICUBIC)) for image in video.images]
        frames += frames[-1:] * (whole - count)
        seconds = video.seconds + video.seconds[-1:] * (whole - count)
        patches, grid = patches_of(np.stack(frames), self._patch, self._merge, self._group)
        each = int(grid[0, 1] * grid[0, 2]) // self._merge**2
        groups = whole // self._group
        tensors = {"pixel_values_videos": patches, "video_grid_thw": grid}
        return Prepared("video", tensors, self._text(seconds, each, groups), each * groups)

    def _text(self, seconds: list[float], each: int, groups: int) -> str:
        if not self._timed:
            return self._name * (each * groups)
        begin, end = self._around
        middles = [(seconds[at] + seconds[at + self._group - 1]) / 2 for at in range(0, len(seconds), self._group)]
        return "".join(f"<{middle:.1f} seconds>{begin}{self._name * each}{end}" for middle in middles)


def _pace(looks: Settings) -> FrameSampling:
    """As the model says; but no more frames than is usual here, since each of them is decoded and kept."""
    usual = FrameSampling()
    most = max(1, min(int(looks.get("max_frames") or usual.most), usual.most))
    fewest = min(int(looks.get("min_frames") or usual.fewest), most)
    return FrameSampling(float(looks.get("fps") or usual.a_second), fewest, most)
