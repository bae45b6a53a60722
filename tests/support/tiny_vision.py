"""Tiny random float32 vision models, one per family, as model folders; and images in the form of their processors."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.engine.generation.messages import Generate
from millstream.types import Media, Tensor
from support.tiny import write_tokenizer

VOCAB = 97
IMAGE, VIDEO, START, BREAK, END, AUDIO = 90, 91, 92, 93, 94, 95
"""The media tokens of images, video and audio, and the tokens around and between them."""
WORDS = range(1, 90)

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_TOKENS = {"vocab_size": VOCAB, "image_token_id": IMAGE, "image_token_index": IMAGE}
_QWEN = {**_TOKENS, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_QWEN_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
}
_PATCHED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "patch_size": 4,
    "image_size": 32,
}
_PIXTRAL_VISION = {**_PATCHED, "model_type": "pixtral", "head_dim": 16, "rope_theta": 10000.0}
_GEMMA4_TEXT = {
    **_TEXT,
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": False,
}
_GEMMA4 = {
    **_TOKENS,
    "model_type": "gemma4",
    "audio_token_id": AUDIO,
    "hidden_size": 64,
    "vision_config": {
        **_PATCHED,
        "model_type": "gemma4_vision",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "position_embedding_size": 64,
        "pooling_kernel_size": 2,
        "default_output_length": 16,
    },
}

_GEMMA4_AUDIO = {
    "model_type": "gemma4_audio",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 24,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_TEXT,
        **_QWEN,
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen2_vl", "embed_dim": 32, "hidden_size": 64},
    },
    "qwen2_5_vl": {
        **_TEXT,
        **_QWEN,
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen2_5_vl", "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **_QWEN,
        "model_type": "qwen3_vl",
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            **_QWEN_VISION,
            "model_type": "qwen3_vl",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen3_vl_moe": {
        **_QWEN,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_moe_text",
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
        },
        "vision_config": {
            **_QWEN_VISION,
            "model_type": "qwen3_vl_moe",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "gemma3": {
        **_TOKENS,
        "model_type": "gemma3",
        "hidden_size": 64,
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "mm_tokens_per_image": 16,
        },
        "vision_config": {**_PATCHED, "model_type": "siglip_vision_model"},
    },
    # Like the large sizes: tokens of an image attend to each other.
    "gemma4": {
        **_GEMMA4,
        "text_config": {
            **_GEMMA4_TEXT,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
    },
    # Like the small sizes: per-layer embeddings, and layers that share the KV cache of others.
    "gemma4-small": {
        **_GEMMA4,
        "text_config": {**_GEMMA4_TEXT, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    },
    # The same with an audio tower.
    "gemma4-audio": {
        **_GEMMA4,
        "text_config": {**_GEMMA4_TEXT, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
        "audio_config": _GEMMA4_AUDIO,
    },
    # No published size has both: tokens of an image that attend to each other, and audio.
    "gemma4-audio-blocks": {
        **_GEMMA4,
        "text_config": {
            **_GEMMA4_TEXT,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "audio_config": _GEMMA4_AUDIO,
    },
    "idefics3": {
        **_TOKENS,
        "model_type": "idefics3",
        "scale_factor": 2,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_PATCHED, "model_type": "idefics3"},
    },
    "smolvlm": {
        **_TOKENS,
        "model_type": "smolvlm",
        "scale_factor": 2,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_PATCHED, "model_type": "smolvlm_vision"},
    },
    "llava": {
        **_TOKENS,
        "model_type": "llava",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_PATCHED, "model_type": "clip_vision_model"},
    },
    "pixtral": {
        **_TOKENS,
        "model_type": "pixtral",
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": _PIXTRAL_VISION,
    },
    "mistral3": {
        **_TOKENS,
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": _PIXTRAL_VISION,
    },
    "ministral3": {
        **_TOKENS,
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "text_config": {
            **_TEXT,
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 16,
            },
        },
        "vision_config": _PIXTRAL_VISION,
    },
}


def write_vision_model(
    folder: Path, family: str, *, seed: int = 0, bits: int | None = None, config: dict[str, Any] | None = None
) -> Path:
    """Write a model whose weights are large enough that logits differ clearly between tokens and between images.
    `bits`: quantise it. `config`: replaces the family's own."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config = config or FAMILIES[family]
    given = json.loads(json.dumps(config))
    module, _ = get_model_and_args(given)
    given.setdefault("text_config", {})
    settings = module.ModelConfig.from_dict(given)
    settings = update_module_configs(settings, module, given, ["text", "vision", "audio"])
    mx.random.seed(seed)
    model = module.Model(settings)
    model.update(
        tree_map(lambda value: mx.random.normal(value.shape) * 0.15 if value.ndim > 1 else value, model.parameters())
    )
    if bits is not None:
        fits = lambda _, layer: hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0  # noqa: E731
        nn.quantize(model, group_size=32, bits=bits, class_predicate=fits)
        config = {**config, "quantization": {"group_size": 32, "bits": bits}}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'video') %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_servable_qwen(folder: Path, family: str) -> Path:
    """A tiny Qwen vision model that the server can serve: one token per byte, small frames."""
    import tokenizers

    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    keys = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_special_tokens(names)
    tokenizer.save(path)
    settings = {"eos_token": "<|im_end|>", "chat_template": _QWEN_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = {"size": {"shortest_edge": 64, "longest_edge": 6400}}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(size))
    wide = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
    tokens = {key: tokenizer.token_to_id(name) for key, name in zip(keys, names, strict=True)}
    config = {**FAMILIES[family], **wide, **tokens}
    config.pop("image_token_index")
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **wide}
    return write_vision_model(folder, family, config=config)


Arrays = dict[str, np.ndarray]


def picture(family: str, seed: int) -> tuple[Arrays, list[int]]:
    """An image in the form of the family's processor, and its tokens."""
    draw = np.random.default_rng(seed)
    model = FAMILIES[family]["model_type"]
    if model.startswith("qwen"):
        rows, columns = (2 * int(n) for n in draw.integers(1, 5, size=2))
        pixels = draw.normal(size=(rows * columns, 3 * 2 * 4 * 4)).astype(np.float32)
        grid = np.array([[1, rows, columns]], dtype=np.int64)
        return {"pixel_values": pixels, "image_grid_thw": grid}, [IMAGE] * (rows * columns // 4)
    if model in ("idefics3", "smolvlm"):
        tiles = int(draw.integers(1, 3))
        pixels = draw.normal(size=(1, tiles, 3, 32, 32)).astype(np.float32)
        mask = np.ones((1, tiles, 32, 32), dtype=np.int64)
        tokens = [token for _ in range(tiles) for token in [BREAK, *[IMAGE] * 16]]
        return {"pixel_values": pixels, "pixel_attention_mask": mask}, tokens[1:]
    pixels = draw.normal(size=(1, 3, 32, 32)).astype(np.float32)
    if model in ("pixtral", "mistral3"):
        side = 8 if model == "pixtral" else 4
        rows = [token for _ in range(side) for token in [*[IMAGE] * side, BREAK]]
        return {"pixel_values": pixels, "image_sizes": np.array([[32, 32]], dtype=np.int64)}, rows[:-1]
    return {"pixel_values": pixels}, [IMAGE] * (64 if model == "llava" else 16)


def joined(family: str, images: Sequence[Arrays]) -> Arrays:
    """Several images of one prompt, in the form of the processor."""
    model = FAMILIES[family]["model_type"]
    if model in ("idefics3", "smolvlm"):
        return {name: np.concatenate([image[name] for image in images], axis=1) for name in images[0]}
    return {name: np.concatenate([image[name] for image in images]) for name in images[0]}


class Case:
    """A prompt with or without images, as input for our engine and for mlx-vlm."""

    def __init__(self, family: str, seed: int, images: Sequence[int], words: int, count: int) -> None:
        """`images`: a seed per image, so that prompts can share them."""
        draw = random.Random(seed)
        self.family = family
        self.seed, self.words, self.count = seed, words, count
        self.pictures = [picture(family, image) for image in images]
        self.images = list(images)
        self.extra: Arrays = {}
        """Further arguments for mlx-vlm."""
        tokens: list[int] = []
        self.starts: list[int] = []
        for _, image_tokens in self.pictures:
            tokens += [draw.choice(WORDS) for _ in range(draw.randrange(words + 1))] + [START]
            self.starts.append(len(tokens))
            tokens += [*image_tokens, END]
        tokens += [draw.choice(WORDS) for _ in range(1 + words)]
        self.prompt = tuple(tokens)

    def submit(self, number: int, count: int | None = None) -> Generate:
        media = tuple(
            Media("image", start, len(image_tokens), f"image {seed}", tensors(arrays))
            for start, seed, (arrays, image_tokens) in zip(self.starts, self.images, self.pictures, strict=True)
        )
        contents = tuple((each.start, each.digest) for each in media)
        return Generate(number, self.prompt, count or self.count, contents=contents, media=media)


def tensors(arrays: Arrays) -> tuple[tuple[str, Tensor], ...]:
    return tuple((name, Tensor(str(each.dtype), each.shape, each.tobytes())) for name, each in arrays.items())


def reference(model: Any, case: Case) -> list[int]:
    """mlx-vlm's own generation, one request at a time."""
    import mlx.core as mx
    from mlx_vlm.generate.ar import generate_step

    arrays = joined(case.family, [image for image, _ in case.pictures]) if case.pictures else {}
    given = {name: mx.array(value) for name, value in {**arrays, **case.extra}.items()}
    tokens = mx.array([case.prompt])
    if model.config.model_type == "gemma4" and case.pictures:
        given["mm_token_type_ids"] = (tokens == IMAGE).astype(mx.int32)
    language = model.language_model
    if hasattr(language, "_rope_deltas"):
        language._rope_deltas = language._position_ids = None
    steps = generate_step(
        tokens,
        model,
        given.pop("pixel_values", None),
        mx.ones(tokens.shape, dtype=mx.int32),
        max_tokens=case.count,
        temperature=0.0,
        **given,
    )
    return [int(token) for token, _ in steps]
