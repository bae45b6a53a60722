"""Chooses and builds the media processors of a model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.errors import ModelError
from millstream.media.processors.base import AudioProcessor, ImageProcessor, ModelFiles, VideoProcessor
from millstream.media.processors.gemma import Gemma3Processor, Gemma4Processor
from millstream.media.processors.gemma_audio import Gemma4AudioProcessor
from millstream.media.processors.idefics import IdeficsProcessor
from millstream.media.processors.llava import LlavaProcessor
from millstream.media.processors.pixtral import PixtralProcessor
from millstream.media.processors.qwen import QwenProcessor
from millstream.media.processors.qwen_video import QwenVideoProcessor

FAMILIES: dict[str, Callable[[ModelFiles, str], ImageProcessor]] = {
    "qwen2_vl": QwenProcessor,
    "qwen2_5_vl": QwenProcessor,
    "qwen3_vl": QwenProcessor,
    "qwen3_vl_moe": QwenProcessor,
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
    "idefics3": IdeficsProcessor,
    "smolvlm": IdeficsProcessor,
    "llava": LlavaProcessor,
    "pixtral": PixtralProcessor,
    "mistral3": PixtralProcessor,
}
"""By `model_type` of config.json."""


Processors = tuple[ImageProcessor, VideoProcessor | None, AudioProcessor | None]


def load_processors(folder: Path, token_bytes: Callable[[int], bytes]) -> Processors | None:
    """The image processor and, if the model takes them, those for video and audio. Returns None if the model takes text
    only. `token_bytes` maps the tokenizer's token ids to their text."""
    files = ModelFiles.read(folder)
    make = FAMILIES.get(str(files.config.get("model_type")))
    if make is None or not isinstance(files.config.get("vision_config"), dict):
        return None
    image_token = token_bytes(files.token_id("image_token_index", "image_token_id")).decode()
    if not image_token:
        raise ModelError(f"{folder}: the tokenizer does not have the image token that config.json names")
    video = _video(files, token_bytes) if make is QwenProcessor else None
    audio = _audio(files, token_bytes) if make is Gemma4Processor else None
    return make(files, image_token), video, audio


def _video(files: ModelFiles, token_bytes: Callable[[int], bytes]) -> VideoProcessor | None:
    keys = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    if not all(isinstance(files.config.get(key), int) for key in keys):
        return None
    return QwenVideoProcessor(files, *(token_bytes(files.token_id(key)).decode() for key in keys))


def _audio(files: ModelFiles, token_bytes: Callable[[int], bytes]) -> AudioProcessor | None:
    """Returns None for model sizes without an audio tower."""
    if not isinstance(files.config.get("audio_config"), dict):
        return None
    audio_token = token_bytes(files.token_id("audio_token_id", "audio_token_index")).decode()
    if not audio_token:
        raise ModelError("the model's tokenizer does not have the audio token that config.json names")
    return Gemma4AudioProcessor(files, audio_token)
