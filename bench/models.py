"""Make models for benchmarks: random weights of a real shape, or the demo GGUF file as a folder that every peer loads.

python bench/models.py random-1b OUT        a Llama of 1.2 billion parameters in bf16, random weights
python bench/models.py random-small OUT     the same with 8 narrower layers, to run next to it
python bench/models.py random-tiny OUT      the same with 2 small layers, for the CPU
python bench/models.py random-mid OUT       the same with 4 layers, twice as wide, to run next to random-tiny
python bench/models.py gemma3-1b OUT        a family of bench/family_shapes.py, random weights; gemma3-1b@4: 4 bits
python bench/models.py demo OUT             the demo model as an MLX folder, 4 bits as in its GGUF file
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from family_shapes import FAMILIES

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SMALL = {
    **LLAMA_1B,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
TINY = {
    **LLAMA_1B,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "torch_dtype": "float32",
}
MID = {
    **TINY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RANDOM = {"random-1b": LLAMA_1B, "random-small": SMALL, "random-tiny": TINY, "random-mid": MID, **FAMILIES}
GROUP_SIZE = 64
VERSION = 3
"""Part of the folders' names. Raise it when what is made here changes: models are reused."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def random_model(folder: Path, config: dict[str, Any], bits: int = 0) -> Path:
    """A model with random weights: it is as fast as a trained one of the same shape."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    mx.random.seed(0)
    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, config["torch_dtype"]))
    if bits:
        nn.quantize(model, group_size=GROUP_SIZE, bits=bits)
        config = {**config, "quantization": {"group_size": GROUP_SIZE, "bits": bits}}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A token for every byte and a word for every other id, so that all output of a random model is text, and becomes
    the same tokens when a client sends it back."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|start|>", "<|end|>"]
    words = [f"Ġw{number:x}" for number in range(vocab_size - len(alphabet) - len(special))]
    vocabulary = {name: number for number, name in enumerate([*alphabet, *words])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def demo_as_folder(folder: Path) -> Path:
    """The demo model's quantised weights and tokenizer in the layout that mlx-lm loads."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from millstream.backend.weights.gguf import load_gguf_model
    from millstream.models.gguf_file import open_gguf
    from millstream.models.source import resolve
    from millstream.text.gguf_tokenizer import gguf_tokenizer

    path = resolve(None, report=print).path
    # float32 scales: half precision is emulated on x86_64 and would slow the peers down
    model, config = load_gguf_model(path, native_quantisation=True, dtype=mx.float32)
    folder.mkdir(parents=True, exist_ok=True)
    packing = {"group_size": 32, "bits": 4}
    config["quantization"] = {
        **packing,
        **{
            name: {"group_size": module.group_size, "bits": module.bits}
            for name, module in model.named_modules()
            if "scales" in module
        },
    }
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    parts = gguf_tokenizer(open_gguf(path))
    parts.tokenizer.save(str(folder / "tokenizer.json"))
    config["eos_token_id"] = sorted(parts.eos_ids)
    (folder / "config.json").write_text(json.dumps(config))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": parts.eos_token,
        "bos_token": parts.bos_token,
        "chat_template": parts.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make(name: str, folder: Path) -> Path:
    """In a process that ends: MLX would hold the model's memory for reuse, and the servers that are measured next share
    the device with this one."""
    if not is_made(folder):
        subprocess.run([sys.executable, __file__, name, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def make_here(name: str, folder: Path) -> Path:
    if is_made(folder):
        return folder
    if name == "demo":
        return demo_as_folder(folder)
    shape, _, bits = name.partition("@")
    return random_model(folder, RANDOM[shape], int(bits or 0))


def is_made(folder: Path) -> bool:
    """True once the last of its files is there."""
    return (folder / "tokenizer_config.json").exists()


def known(name: str) -> bool:
    shape, _, bits = name.partition("@")
    return name == "demo" or (shape in RANDOM and bits in ("", "4", "8"))


def find(name: str) -> Path:
    """An existing folder, or one of the models above, made at first use and reused afterwards."""
    folder = Path(name)
    if folder.exists():
        return folder
    if not known(name):
        sys.exit(f"{name} is neither a folder nor one of {', '.join(RANDOM)} (with @4 or @8: quantised), demo")
    return make(name, Path(tempfile.gettempdir()) / f"millstream-bench-{name}-{VERSION}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or not known(sys.argv[1]):
        sys.exit(__doc__)
    print(make_here(sys.argv[1], Path(sys.argv[2])))
