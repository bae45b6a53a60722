"""What a model is for, told by its configuration and file names alone: text, vision, audio, embedding, reranker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from millstream.models.speech_layout import speech_family
from millstream.models.transcription_layout import transcription_family

_AUDIO = frozenset({
    "whisper", "parakeet", "voxtral", "qwen3_asr", "moonshine", "canary", "sensevoice", "granite_speech", "kokoro",
    "qwen3_tts", "csm", "sesame", "dia", "outetts", "spark", "wav2vec2", "speecht5", "vits", "bark", "parler_tts",
})  # fmt: skip
_EMBEDDING = frozenset({
    "bert", "xlm-roberta", "modernbert", "mpnet", "roberta", "distilbert", "nomic_bert", "new", "gte",
    "qwen3_embedding", "gemma3_embedding", "embedding_gemma2", "siglip", "clip",
})  # fmt: skip
_SENTENCE_FILES = frozenset({"modules.json", "config_sentence_transformers.json", "1_Pooling"})


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str:
    """`names`: the files of the model's folder. `other` if nothing says that it is a model that could be served."""
    family = str(config.get("model_type", "")).lower()
    architectures = config.get("architectures")
    classes = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if any(name.endswith("ForSequenceClassification") for name in classes):
        return "reranker"
    if not _SENTENCE_FILES.isdisjoint(names) or family in _EMBEDDING:
        return "embedding"
    if family in _AUDIO or speech_family(config) is not None or transcription_family(config) is not None:
        return "audio"
    if any(isinstance(config.get(key), dict) for key in ("vision_config", "vit_config")):
        return "vision"
    if any(isinstance(config.get(key), dict) for key in ("audio_config", "audio_encoder_config")):
        return "audio"
    return "text" if family else "other"
