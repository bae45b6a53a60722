"""Finds the processors that a model's folder asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.errors import ModelError
from millstream.media.processors.base import ImageProcessor, ModelFiles, SoundProcessor, VideoProcessor
from millstream.media.processors.gemma import Gemma3Processor, Gemma4Processor
from millstream.media.processors.gemma_audio import Gemma4SoundProcessor
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


Processors = tuple[ImageProcessor, VideoProcessor | None, SoundProcessor | None]


def load_processors(folder: Path, token_bytes: Callable[[int], bytes]) -> Processors | None:
    """For images and, where the model takes them, for videos and sounds; None for a model that takes text only.
    `token_bytes` names the tokens of its tokenizer."""
    files = ModelFiles.read(folder)
    make = FAMILIES.get(str(files.config.get("model_type")))
    if make is None or not isinstance(files.config.get("vision_config"), dict):
        return None
    name = token_bytes(files.id_of("image_token_index", "image_token_id")).decode()
    if not name:
        raise ModelError(f"{folder}: its tokenizer does not know the token that images stand at")
    video = _video(files, token_bytes) if make is QwenProcessor else None
    return make(files, name), video, _sound(files, token_bytes) if make is Gemma4Processor else None


def _video(files: ModelFiles, token_bytes: Callable[[int], bytes]) -> VideoProcessor | None:
    keys = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    if not all(isinstance(files.config.get(key), int) for key in keys):
        return None
    return QwenVideoProcessor(files, *(token_bytes(files.id_of(key)).decode() for key in keys))


def _sound(files: ModelFiles, token_bytes: Callable[[int], bytes]) -> SoundProcessor | None:
    """None for sizes without a tower for sounds."""
    if not isinstance(files.config.get("audio_config"), dict):
        return None
    name = token_bytes(files.id_of("audio_token_id", "audio_token_index")).decode()
    if not name:
        raise ModelError("the model's tokenizer does not know the token that sounds stand at")
    return Gemma4SoundProcessor(files, name)
