"""Estimates against the memory of the loaded model, and errors for unreadable files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_cache
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.weights.unpacking import quantised_layers, unpacked_layer
from millstream.errors import ModelError
from millstream.model_facts import GenerationFacts
from millstream.models import estimate as module
from millstream.models.demo import DEMO, user_cache_dir
from millstream.models.estimate import Estimate, estimate, expected_device
from millstream.models.source import ModelSource
from support.rare import RARE, write_rare
from support.tiers import some
from support.tiny import FAMILIES, write_model
from support.zeros import write_zeros

DEMO_FILE = user_cache_dir() / f"{DEMO.name}.gguf"


@pytest.fixture(scope="module")
def any_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def get(family: str) -> Path:
        return write_rare(tmp_path_factory.mktemp("rare"), family) if family in RARE else tiny_model(family)

    return get


def of(
    path: Path,
    kind: Literal["folder", "gguf"] = "folder",
    device: Literal["cpu", "cuda", "metal"] = "cpu",
    *,
    unpack: bool = True,
    kv_bits: int = 0,
) -> Estimate:
    return estimate(ModelSource("m", kind, path), device=device, unpack=unpack, kv_bits=kv_bits)


def loaded(
    path: Path, kind: Literal["folder", "gguf"] = "folder", *, unpack: bool = True, kv_bits: int = 0
) -> GenerationFacts:
    """The backend's facts after loading. On a thread of its own: closing it ends all streams of its thread."""

    def facts() -> GenerationFacts:
        backend = MlxGenerationBackend(GenerationSettings(kind, path, max_rows=1, unpack=unpack, kv_bits=kv_bits))
        try:
            return backend.load()
        finally:
            backend.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(facts).result()


def cache_bytes(caches: Iterable[Any]) -> int:
    """Bytes of keys and values in the caches; the states of recurrent layers do not grow and are not counted."""
    total = 0
    for cache in caches:
        if isinstance(cache, mlx_cache.CacheList):
            total += cache_bytes(cache.caches)
        elif not isinstance(cache, mlx_cache.ArraysCache):
            total += sum(array[..., : cache.offset, :].nbytes for array in (cache.keys, cache.values))
    return total


@pytest.mark.parametrize("family", [*FAMILIES, *RARE])
def test_the_estimate_equals_the_loaded_model(any_model: Callable[[str], Path], family: str) -> None:
    folder = any_model(family)
    estimated = of(folder)
    facts = loaded(folder)
    assert estimated.weight_bytes == pytest.approx(facts.weight_bytes, rel=0.05)
    assert (estimated.context_length or 2**20) == facts.context_length
    model, _ = load_model(folder)
    caches = mlx_cache.make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3, 4]]), cache=caches))
    assert estimated.kv_bytes_per_token == cache_bytes(caches) / 4


@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.parametrize("head", [32, 64, 96])
def test_quantised_keys_and_values(tmp_path: Path, head: int, kv_bits: int) -> None:
    folder = write_model(tmp_path, "llama", head_dim=head)
    estimated = of(folder, kv_bits=kv_bits).kv_bytes_per_token
    assert estimated == loaded(folder, kv_bits=kv_bits).kv_bytes_per_token
    assert estimated < of(folder).kv_bytes_per_token / 3


def quantised(folder: Path, family: str = "llama", dtype: mx.Dtype = mx.float16, expert_bits: int = 4) -> Path:
    """A folder of mixed bits and groups, saved as mlx-lm saves one."""
    write_model(folder, family)
    model, config = load_model(folder)
    model.set_dtype(dtype)
    own = {"group_size": 32, "bits": 5}
    packing: dict[str, Any] = {"group_size": 64, "bits": 4}

    def layout(path: str, layer: nn.Module) -> bool | dict[str, int]:
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % 64:
            return False
        if path.endswith("v_proj"):
            packing[path] = own
            return own
        if "switch_mlp" in path and expert_bits != 4:
            packing[path] = {"group_size": 64, "bits": expert_bits}
            return dict(packing[path])
        return True

    nn.quantize(model, 64, 4, class_predicate=layout)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({**config, "quantization": packing}))
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("unpack", [True, False])
def test_a_quantised_folder_dequantised_and_as_stored(tmp_path: Path, family: str, unpack: bool) -> None:
    folder = quantised(tmp_path, family)
    estimated = of(folder, unpack=unpack)
    assert estimated.weight_bytes == pytest.approx(loaded(folder, unpack=unpack).weight_bytes, rel=0.01)
    assert estimated.kv_bytes_per_token == 4 * 2 * 2 * 16 * (4 if unpack else 2)


def test_cuda_dequantises_experts_of_unusual_bits_and_metal_nothing(tmp_path: Path) -> None:
    for family in ("llama", "qwen3_moe"):
        folder = quantised(tmp_path / family, family)
        model, _ = load_model(folder)
        packed = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
        for device in ("cuda", "metal"):
            assert of(folder, device=device).weight_bytes == pytest.approx(packed, rel=0.01)
    folder = quantised(tmp_path / "three bits", "qwen3_moe", expert_bits=3)
    model, _ = load_model(folder)
    packed = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    experts = [(name, layer) for name, layer in quantised_layers(model) if "switch_mlp" in name]
    model.update_modules(tree_unflatten([(name, unpacked_layer(layer)) for name, layer in experts]))
    unpacked = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    assert experts and unpacked > packed
    assert of(folder, device="cuda").weight_bytes == pytest.approx(unpacked, rel=0.01)
    assert of(folder, device="cuda", unpack=False).weight_bytes == pytest.approx(packed, rel=0.01)


def test_only_the_cpu_converts_plain_weights(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": ("BF16", (10, 8)), "model.norm.weight": ("F32", (8,))}
    write_zeros(tmp_path, tensors, num_hidden_layers=1, num_attention_heads=2, hidden_size=8)
    assert of(tmp_path).weight_bytes == 88 * 4
    assert of(tmp_path, device="cuda") == of(tmp_path, device="metal") == Estimate(10 * 8 * 2 + 8 * 4, 32, None)


@pytest.mark.skipif(not DEMO_FILE.is_file(), reason="needs the demo model in the cache (`make serve` fetches it)")
@pytest.mark.parametrize("unpack", some([True, False], [True]))
def test_the_demo_model(unpack: bool) -> None:
    estimated = of(DEMO_FILE, "gguf", unpack=unpack)
    facts = loaded(DEMO_FILE, "gguf", unpack=unpack)
    assert estimated.weight_bytes == pytest.approx(facts.weight_bytes, rel=0.01)
    assert estimated.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert estimated.context_length == facts.context_length
    assert of(DEMO_FILE, "gguf", kv_bits=8).kv_bytes_per_token == 30 * 2 * 3 * (64 + 2 * 4)
    on_gpu = of(DEMO_FILE, "gguf", "cuda", unpack=unpack)
    assert on_gpu.kv_bytes_per_token == estimated.kv_bytes_per_token / 2
    assert of(DEMO_FILE, "gguf", "metal").weight_bytes == of(DEMO_FILE, "gguf", "cuda", unpack=False).weight_bytes


def test_tensors_that_mlx_lm_does_not_load_are_not_counted(tmp_path: Path) -> None:
    tensors = {
        "language_model.model.embed_tokens.weight": ("F32", (10, 8)),
        "lm_head.weight": ("F32", (10, 8)),
        "vision_tower.layers.0.attn.k_proj.weight": ("F32", (99, 8)),
    }
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8, "max_position_embeddings": 77}
    write_zeros(tmp_path, tensors, tie_word_embeddings=True, text_config=text)
    assert of(tmp_path) == Estimate(10 * 8 * 4, 2 * 2 * 8 * 4, 77)


def test_other_quantised_formats(tmp_path: Path) -> None:
    tensors = {"a.qweight": ("I32", (10, 8)), "b.weight": ("F8_E4M3", (10, 8))}
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 1}
    write_zeros(tmp_path, tensors, quantization_config={"bits": 8}, **shape)
    assert of(tmp_path).weight_bytes == 320 * 4 + 80 * 4
    assert of(tmp_path, device="metal").weight_bytes == 320 + 80 * 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("", "is not valid JSON"),
        ("{}", "has no num_hidden_layers"),
        ('{"num_hidden_layers": "four"}', "num_hidden_layers is 'four'"),
        ('{"num_hidden_layers": 4, "layer_types": 7}', "not subscriptable"),
        ('{"num_hidden_layers": 4, "text_config": 7}', "not a mapping"),
        ('{"num_hidden_layers": 4, "hidden_size": 8}', "has no num_attention_heads"),
    ],
)
def test_a_damaged_config(tmp_path: Path, config: str, reason: str) -> None:
    write_zeros(tmp_path, {"lm_head.weight": ("F32", (10, 8))})
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=rf"config\.json: .*{reason}"):
        of(tmp_path)


def test_quantised_weights_without_a_group_size(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": ("U32", (10, 8)), "lm_head.scales": ("BF16", (10, 1))}
    write_zeros(tmp_path, tensors, num_hidden_layers=1, num_attention_heads=1, hidden_size=8)
    with pytest.raises(ModelError, match=r"lm_head is quantised, but config.json has no group_size"):
        of(tmp_path)


def test_a_missing_folder_or_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        of(tmp_path)
    with pytest.raises(ModelError, match=r"a\.gguf: cannot be opened"):
        of(tmp_path / "a.gguf", "gguf")


@pytest.mark.parametrize(
    ("system", "machine", "installed", "requested", "device"),
    [
        ("darwin", "arm64", ["mlx", "mlx-metal"], None, "metal"),
        ("darwin", "arm64", ["mlx", "mlx-metal"], "cpu", "cpu"),
        ("darwin", "x86_64", ["mlx"], None, "cpu"),
        ("linux", "x86_64", ["mlx", "mlx-cpu"], None, "cpu"),
        ("linux", "x86_64", ["mlx", "mlx_cuda_13"], None, "cuda"),
        ("linux", "aarch64", ["mlx", "mlx-cuda-12"], None, "cuda"),
        ("linux", "x86_64", ["mlx", "mlx-cuda-12"], "cpu", "cpu"),
    ],
)
def test_the_expected_device_without_mlx(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, installed: list[str], requested: str | None, device: str
) -> None:
    monkeypatch.setattr(module.sys, "platform", system)
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(metadata, "distributions", lambda: [SimpleNamespace(name=name) for name in installed])
    assert expected_device(requested) == device
