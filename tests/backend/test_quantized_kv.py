"""Quantised KV cache in 8 and 4 bits: the same tokens as mlx-lm in any batch, less memory, and models it refuses."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.caches.quantized import KvQuantization, choose_quantization
from millstream.backend.generation.layers.packed_attention import packed_attention
from millstream.backend.generation.prefix_store.cache_state import fill_cache, kv_parts
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, Prefill
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Finished
from millstream.errors import ModelError
from support.engines import Driver, engine
from support.pointer_kernels import backend_with_kernels
from support.prefix_caches import BLOCK, caching_scheduler
from support.rare import write_rare
from support.tiers import some
from support.tiny import VOCAB, write_model

Folders = Callable[[str, int], Path]
Output = list[tuple[int, float]]
"""Tokens, and the lead of each one over the next best in log-probability."""

TIE = 0.05
"""A batch changes the last bits of a sum, and now and then that moves an element from one quantised value to the next.
This may change a choice that was close (leads are 0.1 to 0.3 as a rule), never a clear one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny models with a head size that can be quantised."""
    root = tmp_path_factory.mktemp("wide-heads")

    def get(family: str, head: int) -> Path:
        folder = root / f"{family}-{head}"
        return folder if folder.exists() else write_model(folder, family, head_dim=head)

    return get


def requests(seed: int, count: int) -> tuple[Generate, ...]:
    """Prompts from one token to many chunks, some of which share a prefix."""
    rng = random.Random(seed)
    known: list[tuple[int, ...]] = [tuple(rng.randrange(VOCAB) for _ in range(30))]
    for _ in range(count - 1):
        old = rng.choice(known)[: rng.choice([0, 0, 5, 20, 60])]
        known.append((old + tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 9, 30]))))[:80])
    return tuple(Generate(number, prompt, rng.choice([1, 2, 5, 20, 40])) for number, prompt in enumerate(known))


@functools.cache
def mlx_lm_outputs(folder: Path, bits: int, submits: tuple[Generate, ...]) -> list[Output]:
    """mlx-lm's own generation. It would prefill a first chunk before it quantises, so it gets quantised caches."""
    model, _ = load_model(folder)
    quantization = choose_quantization(model, bits)

    def output(submit: Generate) -> Output:
        caches = [KVCache().to_quantized(quantization.group_size, bits) for _ in model.layers]
        settings: dict[str, Any] = {"kv_bits": bits, "kv_group_size": quantization.group_size, "quantized_kv_start": 0}
        prompt = mx.array(submit.prompt)
        steps = generate_step(prompt, model, max_tokens=submit.max_tokens, prompt_cache=caches, **settings)
        return [(int(token), lead(logprobs)) for token, logprobs in steps]

    return [output(submit) for submit in submits]


def lead(logprobs: mx.array) -> float:
    second, first = mx.sort(logprobs)[-2:].tolist()  # type: ignore[misc]
    return float(first - second)


def check(got: list[list[int]], expected: list[Output]) -> None:
    """The same tokens, except for a few outputs that diverge at a tie."""
    diverged = 0
    for tokens, steps in zip(got, expected, strict=True):
        assert len(tokens) == len(steps)
        close = [difference for token, (wanted, difference) in zip(tokens, steps, strict=True) if token != wanted]
        diverged += bool(close)
        assert not close or close[0] < TIE
    assert diverged <= max(1, len(got) // 8)


def make(folder: Path, **changes: Any) -> Callable[[], MlxGenerationBackend]:
    return functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, **{"max_rows": 5, **changes}))


@pytest.mark.parametrize(
    ("family", "head", "bits", "like_gpu"),
    some(
        [
            (family, head, bits, like_gpu)
            for family, head in (("llama", 64), ("qwen3_moe", 32))
            for bits in (8, 4)
            for like_gpu in (False, True)
        ],
        [("llama", 64, 8, True), ("qwen3_moe", 32, 4, False)],
    ),
)
def test_equals_mlx_lm_alone_and_in_a_changing_batch(
    family: str, head: int, bits: int, like_gpu: bool, folders: Folders, whole: bool
) -> None:
    folder, submits = folders(family, head), requests(bits + head, 16 if whole else 10)
    expected = mlx_lm_outputs(folder, bits, submits)
    assert len({token for output in expected for token, _ in output}) > 10
    with engine(make(folder, kv_bits=bits, like_gpu=like_gpu)) as driver:
        check(driver.run(*submits), expected)
    with engine(make(folder, kv_bits=bits, like_gpu=like_gpu, max_rows=1), prefill_tokens=50) as driver:
        check(driver.run(*submits[:8]), expected[:8])


@pytest.mark.parametrize("bits", some([8, 4], [4]))
def test_kernels_pack_in_place(bits: int, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: slabs are read and written by address, prompts are unpacked for the prefill kernel's sake. Rows join,
    leave, and outgrow their slots."""
    kernels = backend_with_kernels(monkeypatch, blocks=False)
    folder, submits = folders("llama", 64), (*requests(bits, 9), Generate(20, (5, 6, 7), 270))
    with engine(make(folder, kv_bits=bits, like_gpu=True, disabled=frozenset({"fused-matmul"}))) as driver:
        check(driver.run(*submits), mlx_lm_outputs(folder, bits, submits))
    assert sum(count for name, count in kernels.calls.items() if name.endswith("decode")) > 300
    assert kernels.calls["join_rows"] > 0


def test_rows_outlast_their_columns(folders: Folders) -> None:
    submits = (
        Generate(0, (5, 6, 7), 300),
        Generate(1, (8,), 2),
        Generate(2, (9, 9), 270),
        Generate(3, tuple(range(40)), 9),
    )
    folder = folders("llama", 32)
    with engine(make(folder, kv_bits=4, max_rows=3)) as driver:
        check(driver.run(*submits), mlx_lm_outputs(folder, 4, submits))


@pytest.mark.parametrize(
    ("budget", "like_gpu", "bits"),
    some(
        [(1000, False, 8), (1000, False, 4), (12, True, 8), (12, True, 4)],
        [(12, True, 4)],
    ),
)
def test_cached_prefixes_change_no_token(bits: int, budget: int, like_gpu: bool, folders: Folders, whole: bool) -> None:
    folder, submits = folders("llama", 32), requests(bits + budget, 24 if whole else 16)
    expected = mlx_lm_outputs(folder, bits, submits)
    link = ThreadLink(
        "cached", make(folder, kv_bits=bits, like_gpu=like_gpu), functools.partial(caching_scheduler, budget, None)
    )
    driver = Driver(link)
    driver.start()
    try:
        check(driver.run(*submits), expected)
        again = [Generate(1000 + submit.request_id, submit.prompt, submit.max_tokens) for submit in submits]
        check(driver.run(*again), expected)
        ends = [driver.ends[submit.request_id][0] for submit in again]
    finally:
        driver.stop()
    cached = [end.usage.cached_tokens for end in ends if isinstance(end, Finished)]
    full_blocks = [(len(submit.prompt) - 1) // BLOCK * BLOCK for submit in submits]
    assert cached == full_blocks if budget == 1000 else sum(cached) > 0


@pytest.mark.parametrize("matmuls", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("sinks", [True, False])
def test_attention_reads_quantised_keys_and_values(matmuls: bool, queries: int, sinks: bool) -> None:
    """Against plain attention over the dequantised keys and values."""
    cache = QuantizedKVCache(group_size=32, bits=8)
    keys, values = cache.update_and_fetch(mx.random.normal((2, 2, 9, 64)), mx.random.normal((2, 2, 9, 32)))
    asked = mx.random.normal((2, 4, queries, 64))
    mask = (mx.arange(9) >= mx.array([0, 3])[:, None])[:, None, None, :]
    drain = mx.random.normal((4,)) if sinks else None
    plain = [mx.dequantize(*parts, group_size=32, bits=8) for parts in (keys, values)]
    expected = scaled_dot_product_attention(asked, *plain, None, 0.125, mask, drain)
    mx.eval(expected)
    got = packed_attention(scaled_dot_product_attention, matmuls=matmuls)(
        asked, keys, values, cache, 0.125, mask, drain
    )
    assert mx.allclose(got, expected, atol=1e-5)


def test_a_restored_cache_is_not_quantised_again() -> None:
    keys, values = mx.random.normal((1, 2, 9, 64)), mx.random.normal((1, 2, 9, 32))
    source = QuantizedKVCache(group_size=32, bits=4)
    source.update_and_fetch(keys, values)
    copy = QuantizedKVCache(group_size=32, bits=4)
    fill_cache(copy, kv_parts(source))
    assert copy.offset == 9
    for cache in (source, copy):
        cache.update_and_fetch(keys[:, :, :3], values[:, :, :3])
    for got, expected in zip(kv_parts(copy), kv_parts(source), strict=True):
        assert mx.array_equal(got, expected)


def halved(folder: Path) -> Path:
    """The same model in bfloat16."""
    model, _ = load_model(folder)
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def bytes_taken(folder: Path, bits: int) -> tuple[int, int]:
    """Bytes per token as reported by the model's facts, and bytes of two rows of 40 tokens in their slots."""

    def measure() -> tuple[int, int]:
        backend = make(folder, unpack=False, kv_bits=bits)()
        try:
            facts = backend.load()
            submits = [Generate(number, tuple(range(41)), 5) for number in range(2)]
            backend.step(Plan(prefill=tuple(Prefill(submit, 0, 40) for submit in submits)))
            backend.step(Plan(decode=(0, 1)))
            return facts.kv_bytes_per_token, backend.memory_bytes() - facts.weight_bytes
        finally:
            backend.close()

    with ThreadPoolExecutor(1) as pool:  # closing ends all streams of its thread
        return pool.submit(measure).result()


@pytest.mark.parametrize(("head", "group"), [(64, 64), (32, 32)])
def test_memory_shrinks_with_the_bits(head: int, group: int, tmp_path: Path) -> None:
    folder = halved(write_model(tmp_path, "llama", head_dim=head))
    plain, taken = bytes_taken(folder, 0)
    assert plain == 4 * 2 * 2 * head * 2
    for bits in (8, 4):
        share = (bits + 2 * 16 / group) / 16
        assert bytes_taken(folder, bits) == (plain * share, taken * share)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma3_text", "RotatingKVCache cannot be quantised"),
        ("lfm2", "ArraysCache cannot be quantised"),
        ("falcon_h1", "CacheList cannot be quantised"),
        ("llama4", "ChunkedKVCache cannot be quantised"),
        ("llama", "its head size is 16, and only multiples of 32"),
    ],
)
def test_unsupported_models_are_refused_with_a_way_out(
    family: str, words: str, tiny_model: Callable[[str], Path]
) -> None:
    refused(make(tiny_model(family), kv_bits=8), words)


def test_attention_that_cannot_read_quantised_keys_is_refused(tmp_path: Path) -> None:
    """Latent attention has plain KV caches, but computes its own matmuls over them."""
    folder = write_rare(tmp_path, "deepseek_v3", kv_lora_rank=32, qk_rope_head_dim=32)
    refused(make(folder, kv_bits=8), "its attention cannot read quantised keys and values")


def test_without_slots_it_is_refused(folders: Folders) -> None:
    refused(make(folders("llama", 32), kv_bits=4, disabled=frozenset({"slots"})), "--disable slots")


def refused(backend: Callable[[], MlxGenerationBackend], words: str) -> None:
    driver = Driver(ThreadLink("refused", backend, functools.partial(caching_scheduler, 1, None)))
    driver.link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert driver.load_error is not None
    assert words in driver.load_error
    assert "Leave out kv_bits for this model" in driver.load_error


def test_groups_fit_keys_and_values() -> None:
    class Model:
        layers = (None,)

        def __init__(self, keys: int, values: int) -> None:
            self.sizes = keys, values

        def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
            cache[0].update_and_fetch(*(mx.zeros((1, 1, 1, size)) for size in self.sizes))

    assert choose_quantization(Model(128, 64), 8) == KvQuantization(8, 64)
    assert choose_quantization(Model(192, 96), 4) == KvQuantization(4, 32)
    with pytest.raises(ModelError, match="its head size is 80 and 128"):
        choose_quantization(Model(128, 80), 4)
