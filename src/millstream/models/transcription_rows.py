"""How many numbers a window takes beside the weights, by a model's configuration: for all families but Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WINDOW_SECONDS = 30
"""The longest window of these families."""
TOKENS_PER_SECOND = 16
"""A text is not longer: what writes on has lost its way."""
_FRAMES_PER_SECOND = 100
_AUDIO_TOKENS_PER_SECOND = 13
_PROMPT_TOKENS = 256


def row_values(family: str, config: Mapping[str, Any]) -> int:
    """0 if the configuration does not say it: the load will say why."""
    if family == "parakeet":
        # The first convolution has the largest output: half of the frames by half of the mel bands.
        encoder, mels = _part(config, "encoder"), _part(config, "preprocessor")
        channels = _size(encoder, "subsampling_conv_channels")
        return channels * WINDOW_SECONDS * _FRAMES_PER_SECOND * _size(mels, "features") // 4
    if family == "moonshine":
        width, layers = _size(config, "hidden_size"), _size(config, "decoder_num_hidden_layers")
        return 2 * layers * width * 42 * WINDOW_SECONDS  # the cross attention's keys and values
    text = _part(_part(config, "thinker_config") or config, "text_config")
    positions = WINDOW_SECONDS * (_AUDIO_TOKENS_PER_SECOND + TOKENS_PER_SECOND) + _PROMPT_TOKENS
    heads = _size(text, "num_key_value_heads") * _size(text, "head_dim")
    return 2 * _size(text, "num_hidden_layers") * heads * positions


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if type(value) is int and value > 0 else 0
