"""What a Kokoro folder's config.json says: the sizes of its parts and its alphabet of phonemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.files import read_object

SAMPLE_RATE = 24_000


@dataclass(frozen=True, slots=True)
class KokoroConfig:
    vocab: dict[str, int]
    """Phonemes and punctuation to tokens. 0 stands for the begin and the end."""
    tokens: int
    hidden: int
    style: int
    """Numbers of a style for the decoder, and as many for the prosody."""
    layers: int
    text_kernel: int
    max_duration: int
    albert_layers: int
    albert_heads: int
    max_positions: int
    upsample_rates: tuple[int, ...]
    upsample_kernels: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[tuple[int, ...], ...]
    n_fft: int
    hop: int

    @property
    def max_phonemes(self) -> int:
        """Of one piece: two positions are for its begin and its end."""
        return self.max_positions - 2


def is_kokoro(config: Mapping[str, Any]) -> bool:
    """Published folders have no `model_type`: their parts tell it."""
    return isinstance(config.get("istftnet"), dict) and isinstance(config.get("plbert"), dict)


def torch_weights(folder: Path) -> Path | None:
    """The file of PyTorch's in which Kokoro was published first, if there are no safetensors."""
    if any(folder.glob("*.safetensors")):
        return None
    return next(iter(sorted(folder.glob("kokoro*.pth"))), None)


def read_kokoro_config(folder: Path) -> KokoroConfig:
    path = folder / "config.json"
    config = read_object(path)
    try:
        return _config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: not the configuration of a Kokoro model ({type(error).__name__}: {error})"
        ) from error


def _config(config: Mapping[str, Any]) -> KokoroConfig:
    net, bert = config["istftnet"], config["plbert"]
    read = KokoroConfig(
        vocab={str(symbol): int(token) for symbol, token in config["vocab"].items()},
        tokens=int(config["n_token"]),
        hidden=int(config["hidden_dim"]),
        style=int(config["style_dim"]),
        layers=int(config["n_layer"]),
        text_kernel=int(config["text_encoder_kernel_size"]),
        max_duration=int(config["max_dur"]),
        albert_layers=int(bert["num_hidden_layers"]),
        albert_heads=int(bert["num_attention_heads"]),
        max_positions=int(bert["max_position_embeddings"]),
        upsample_rates=tuple(map(int, net["upsample_rates"])),
        upsample_kernels=tuple(map(int, net["upsample_kernel_sizes"])),
        kernels=tuple(map(int, net["resblock_kernel_sizes"])),
        dilations=tuple(tuple(map(int, each)) for each in net["resblock_dilation_sizes"]),
        n_fft=int(net["gen_istft_n_fft"]),
        hop=int(net["gen_istft_hop_size"]),
    )
    if any(kernel != 2 * rate for rate, kernel in zip(read.upsample_rates, read.upsample_kernels, strict=True)):
        raise ValueError("upsample_kernel_sizes must be twice upsample_rates")
    if any(not 0 <= token < read.tokens for token in read.vocab.values()):
        raise ValueError("vocab has tokens beyond n_token")
    return read
