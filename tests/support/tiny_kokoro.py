"""A tiny random Kokoro: the folder of a speech model with all of its parts, in any of the published layouts."""

from __future__ import annotations

import io
import json
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]

HIDDEN, STYLE, WIDTH, INNER = 16, 8, 24, 32
VOICES = ("af_bella", "af_heart", "am_adam", "bf_emma")
PHONEMES = ' .,!?;:—"()AIOQSTWYæðŋɑɐɒɔəɚɛɜɡɪɹɾʃʊʌʒʔʤʧθᵊᵻˈˌːabcdefhijklmnopqrstuvwxyz'
CONFIG: dict[str, Any] = {
    "istftnet": {
        "upsample_kernel_sizes": [4, 6],
        "upsample_rates": [2, 3],
        "gen_istft_hop_size": 2,
        "gen_istft_n_fft": 8,
        "resblock_dilation_sizes": [[1, 3]],
        "resblock_kernel_sizes": [3],
        "upsample_initial_channel": 16,
    },
    "hidden_dim": HIDDEN,
    "max_dur": 6,
    "n_layer": 1,
    "n_token": len(PHONEMES) + 1,
    "style_dim": STYLE,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": WIDTH,
        "num_attention_heads": 3,
        "intermediate_size": INNER,
        "max_position_embeddings": 300,
        "num_hidden_layers": 1,
    },
    "vocab": {symbol: token for token, symbol in enumerate(PHONEMES, 1)},
}


class _Weights(dict[str, Array]):
    def __init__(self, seed: int, style: int) -> None:
        super().__init__()
        self.style = style
        self._random = np.random.default_rng(seed)

    def add(self, name: str, *shape: int, scale: float = 0.3, mean: float = 0.0) -> None:
        self[name] = (mean + scale * self._random.standard_normal(shape)).astype(np.float32)

    def linear(self, name: str, inputs: int, outputs: int) -> None:
        self.add(f"{name}.weight", outputs, inputs)
        self.add(f"{name}.bias", outputs)

    def conv(self, name: str, first: int, second: int, kernel: int, bias: int | None = -1) -> None:
        self.add(f"{name}.weight_v", first, second, kernel)
        self.add(f"{name}.weight_g", first, 1, 1, scale=0.1, mean=1.0)
        if bias is not None:
            self.add(f"{name}.bias", first if bias == -1 else bias)

    def lstm(self, name: str, inputs: int, width: int) -> None:
        for end in ("_l0", "_l0_reverse"):
            self.add(f"{name}.weight_ih{end}", 4 * width, inputs)
            self.add(f"{name}.weight_hh{end}", 4 * width, width)
            self.add(f"{name}.bias_ih{end}", 4 * width)
            self.add(f"{name}.bias_hh{end}", 4 * width)

    def norm(self, name: str, width: int) -> None:
        self.add(f"{name}.weight", width, scale=0.1, mean=1.0)
        self.add(f"{name}.bias", width, scale=0.1)

    def styled(self, name: str, inputs: int, outputs: int, *, pool: bool = False) -> None:
        self.linear(f"{name}.norm1.fc", self.style, 2 * inputs)
        self.linear(f"{name}.norm2.fc", self.style, 2 * outputs)
        self.conv(f"{name}.conv1", outputs, inputs, 3)
        self.conv(f"{name}.conv2", outputs, outputs, 3)
        if inputs != outputs:
            self.conv(f"{name}.conv1x1", outputs, inputs, 1, None)
        if pool:
            self.conv(f"{name}.pool", inputs, 1, 3)

    def snake(self, name: str, channels: int, kernel: int, pairs: int) -> None:
        for part in (1, 2):
            for index in range(pairs):
                self.linear(f"{name}.adain{part}.{index}.fc", self.style, 2 * channels)
                self.conv(f"{name}.convs{part}.{index}", channels, channels, kernel)
                self.add(f"{name}.alpha{part}.{index}", 1, channels, 1, scale=0.1, mean=1.0)


def kokoro_weights(
    seed: int = 0, config: dict[str, Any] = CONFIG, decoder: int = 12, text: int = 4
) -> dict[str, Array]:
    """Names and shapes of `kokoro-v1_0.pth`. `decoder` and `text` are the widths of the decoder's blocks."""
    weights = _Weights(seed, config["style_dim"])
    tokens, net = config["n_token"], config["istftnet"]
    hidden, initial = config["hidden_dim"], net["upsample_initial_channel"]
    bert = config["plbert"]
    width = bert["hidden_size"]
    weights.add("bert.embeddings.word_embeddings.weight", tokens, 128)
    weights.add("bert.embeddings.position_embeddings.weight", bert["max_position_embeddings"], 128)
    weights.add("bert.embeddings.token_type_embeddings.weight", 2, 128)
    weights.norm("bert.embeddings.LayerNorm", 128)
    weights.linear("bert.encoder.embedding_hidden_mapping_in", 128, width)
    layer = "bert.encoder.albert_layer_groups.0.albert_layers.0"
    for part in ("query", "key", "value", "dense"):
        weights.linear(f"{layer}.attention.{part}", width, width)
    weights.norm(f"{layer}.attention.LayerNorm", width)
    weights.linear(f"{layer}.ffn", width, bert["intermediate_size"])
    weights.linear(f"{layer}.ffn_output", bert["intermediate_size"], width)
    weights.norm(f"{layer}.full_layer_layer_norm", width)
    weights.linear("bert_encoder", width, hidden)
    weights.add("text_encoder.embedding.weight", tokens, hidden)
    for number in range(config["n_layer"]):
        weights.conv(f"text_encoder.cnn.{number}.0", hidden, hidden, config["text_encoder_kernel_size"])
        weights.add(f"text_encoder.cnn.{number}.1.gamma", hidden, mean=1.0)
        weights.add(f"text_encoder.cnn.{number}.1.beta", hidden)
        weights.lstm(f"predictor.text_encoder.lstms.{2 * number}", hidden + weights.style, hidden // 2)
        weights.linear(f"predictor.text_encoder.lstms.{2 * number + 1}.fc", weights.style, 2 * hidden)
    weights.lstm("text_encoder.lstm", hidden, hidden // 2)
    weights.lstm("predictor.lstm", hidden + weights.style, hidden // 2)
    weights.lstm("predictor.shared", hidden + weights.style, hidden // 2)
    weights.linear("predictor.duration_proj.linear_layer", hidden, config["max_dur"])
    for name in ("F0", "N"):
        weights.styled(f"predictor.{name}.0", hidden, hidden)
        weights.styled(f"predictor.{name}.1", hidden, hidden // 2, pool=True)
        weights.styled(f"predictor.{name}.2", hidden // 2, hidden // 2)
        weights.add(f"predictor.{name}_proj.weight", 1, hidden // 2, 1)
        weights.add(f"predictor.{name}_proj.bias", 1, mean=120.0 if name == "F0" else 0.0)
        weights.conv(f"decoder.{name}_conv", 1, 1, 3)
    weights.conv("decoder.asr_res.0", text, hidden, 1)
    weights.styled("decoder.encode", hidden + 2, decoder)
    for number in range(4):
        last = number == 3
        weights.styled(f"decoder.decode.{number}", decoder + 2 + text, initial if last else decoder, pool=last)
    _add_vocoder(weights, net)
    return dict(weights)


def _add_vocoder(weights: _Weights, net: dict[str, Any]) -> None:
    generator, bins = "decoder.generator", net["gen_istft_n_fft"] + 2
    weights.linear(f"{generator}.m_source.l_linear", 9, 1)
    rates, kernels = net["upsample_rates"], net["resblock_kernel_sizes"]
    channels = net["upsample_initial_channel"]
    pairs = len(net["resblock_dilation_sizes"][0])
    for stage, rate in enumerate(rates):
        weights.conv(f"{generator}.ups.{stage}", channels, channels // 2, 2 * rate, channels // 2)
        channels //= 2
        last = stage == len(rates) - 1
        stride = int(np.prod(rates[stage + 1 :]))
        weights.add(f"{generator}.noise_convs.{stage}.weight", channels, bins, 1 if last else 2 * stride)
        weights.add(f"{generator}.noise_convs.{stage}.bias", channels)
        weights.snake(f"{generator}.noise_res.{stage}", channels, 11 if last else 7, pairs)
        for number, kernel in enumerate(kernels):
            weights.snake(f"{generator}.resblocks.{stage * len(kernels) + number}", channels, kernel, pairs)
    weights.conv(f"{generator}.conv_post", bins, channels, 7)
    weights[f"{generator}.conv_post.weight_g"] *= np.float32(0.1)
    weights[f"{generator}.conv_post.bias"][: bins // 2] -= 4  # magnitudes of sound that is not clipped


def voice_table(seed: int, phonemes: int = 290) -> Array:
    return np.random.default_rng(seed).standard_normal((phonemes, 1, 2 * STYLE)).astype(np.float32)


def write_kokoro(folder: Path, layout: str = "torch-names", seed: int = 0) -> Path:
    """`torch-names`: safetensors as PyTorch names and lays out tensors; `mlx`: as mlx-audio does; `pth`: the original
    format, voices too."""
    (folder / "voices").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = kokoro_weights(seed)
    for number, name in enumerate(VOICES):
        if layout == "pth":
            save_torch(voice_table(number), folder / "voices" / f"{name}.pt")
        else:
            save_file({"voice": voice_table(number)}, folder / "voices" / f"{name}.safetensors")
    if layout == "pth":
        parts: dict[str, Any] = {}
        for name, values in weights.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, OrderedDict())[f"module.{rest}"] = values
        save_torch(parts, folder / "kokoro-v1_0.pth")
    else:
        save_file(_mlx_names(weights) if layout == "mlx" else weights, folder / "kokoro-v1_0.safetensors")
    return folder


def _mlx_names(weights: dict[str, Array]) -> dict[str, Array]:
    from millstream.backend.speech.kokoro.tensors import _OTHER_NAMES

    renamed = {}
    for name, values in weights.items():
        if (
            name.endswith(("weight_v", "noise_convs.0.weight", "noise_convs.1.weight", "_proj.weight"))
            and values.ndim == 3
        ):
            values = np.ascontiguousarray(values.transpose(0, 2, 1))
        for ours, other in _OTHER_NAMES[:10]:
            if name.endswith(f".{ours}"):
                name = name.removesuffix(ours) + other
                break
        renamed[name] = values
    return renamed


class _Storage:
    def __init__(self, key: str, size: int) -> None:
        self.key, self.size = key, size


class _Tensor:
    """Pickled the way PyTorch pickles a tensor."""

    def __init__(self, storage: _Storage, values: Array) -> None:
        self.storage, self.values = storage, values

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(stride // 4 for stride in self.values.strides)
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (self.storage, 0, self.values.shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", sys.modules["torch"].FloatStorage, obj.key, "cpu", obj.size)
        return None


def save_torch(value: Any, path: Path) -> None:
    """Arrays, or dictionaries of them, as `torch.save` writes them. PyTorch's names stand in for the real ones."""

    def _rebuild_tensor_v2() -> None:
        """Named, never called."""

    class FloatStorage:
        """Named, never made."""

    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for module, item in ((utils, _rebuild_tensor_v2), (torch, FloatStorage)):
        item.__module__, item.__qualname__ = module.__name__, item.__name__
        setattr(module, item.__name__, item)
    names = {"torch": torch, "torch._utils": utils}
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules |= names
    try:
        with zipfile.ZipFile(path, "w") as archive:
            file = io.BytesIO()
            _Pickler(file, protocol=2).dump(_tensors(value, archive))
            archive.writestr("archive/data.pkl", file.getvalue())
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules |= hidden


def _tensors(value: Any, archive: zipfile.ZipFile) -> Any:
    if isinstance(value, dict):
        return type(value)((name, _tensors(each, archive)) for name, each in value.items())
    key = str(len(archive.namelist()))
    archive.writestr(f"archive/data/{key}", value.tobytes())
    return _Tensor(_Storage(key, value.size), value)
