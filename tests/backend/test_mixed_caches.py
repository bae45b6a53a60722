"""Models with layers of several kinds: length classes for full attention, rings for windows, arrays of states."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.batch import Batch
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.joining import MixedRows, mixed_rows
from millstream.backend.generation.caches.mixed_caches import MixedCaches
from millstream.backend.generation.caches.slabs import SPARE_TOKENS
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import leaf_caches
from millstream.engine.generation.messages import Generate
from support.engines import engine
from support.rare import write_rare
from support.tiers import some
from support.tiny import VOCAB

GEMMA3N: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e6,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.0] * 6,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "rope_scaling": None,
}
RARELY: dict[str, dict[str, Any]] = {
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4_text": {},
    "qwen3_next": {},
    "jamba": {},
    "nemotron_h": {},
}
"""Families that the tests of equality leave out. Gemma 3n and 4 have layers that share keys and values."""
MIXED = Layout(caches="mixed", attention="mlx-lm")


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(VOCAB) for _ in range(length))


class Rows:
    """A batch in the mixed layout, which rows join by their length. Their tokens are made up: reading long prompts
    takes long."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)
        adopt_attention(self.model, attention)
        self.assembly = Assembly(self.model, VOCAB)
        self.batch, _ = self.assembly.make(MIXED, PrefixStore())
        self.tokens: dict[int, int] = {}

    def join(self, *lengths: int) -> list[int]:
        """Returns the request ids."""
        first = max(self.tokens, default=0) + 1
        joining = dict(enumerate(lengths, start=first))
        self.batch.join(
            [Generate(request_id, (request_id,), 9) for request_id in joining],
            [self._row(length) for length in lengths],
        )
        self.tokens |= joining
        return list(joining)

    def _row(self, length: int) -> MixedRows:
        caches = new_row_caches(self.model)
        self.model(mx.array([[1]]), cache=caches)
        for leaf in leaf_caches(caches):
            if type(leaf) is KVCache:
                _, heads, _, size = leaf.keys.shape
                leaf.update_and_fetch(*mx.random.normal((2, 1, heads, length - 1, size)))
        return mixed_rows(leaf_caches(caches))

    def drop(self, *ids: int) -> None:
        self.batch.drop(set(ids))
        for request_id in ids:
            del self.tokens[request_id]

    def step(self) -> None:
        self.batch.launch(self.batch.forward()).read(self.batch.ids)
        self.tokens = {request_id: tokens + 1 for request_id, tokens in self.tokens.items()}


def caches_of(batch: Batch) -> MixedCaches:
    caches = batch._caches
    assert isinstance(caches, MixedCaches)
    return caches


@pytest.mark.parametrize("family", some(["lfm2", "gemma3_text", "falcon_h1"], ["lfm2", "falcon_h1"]))
def test_one_long_row_beside_short_ones_takes_memory_by_tokens(family: str, tiny_model: Callable[[str], Path]) -> None:
    rows = Rows(tiny_model(family))
    token_bytes, _ = rows.assembly.measure(MIXED)
    constant = 8 * SPARE_TOKENS * token_bytes
    """What a class may have vacant, and states that do not grow."""

    def check() -> None:
        held = sum(rows.tokens.values()) + len(rows.tokens)
        assert rows.batch.nbytes <= 1.5 * held * token_bytes + constant

    short = rows.join(*range(5, 20))
    check()
    (long,) = rows.join(6000)
    for _ in range(3):
        rows.step()
        check()
    assert 4 * (1.5 * sum(rows.tokens.values()) + 8 * SPARE_TOKENS) < 16 * 6000, "a rectangle would pass"
    rows.join(40, 300)
    rows.drop(*short[:9])
    rows.step()
    check()
    rows.drop(long)
    rows.step()
    assert rows.batch.nbytes <= 2 * constant


def test_rows_that_join_and_leave_do_not_copy_the_keys_and_values_of_others(
    tiny_model: Callable[[str], Path],
) -> None:
    rows = Rows(tiny_model("lfm2"))
    (long,) = rows.join(3000)
    rows.join(10)
    rows.step()
    row = caches_of(rows.batch).attending[0].rows[0]
    assert row is not None and row.length == rows.tokens[long]
    place, slot = row.place, row.slot
    joined = rows.join(5, 700, 9)
    rows.step()
    rows.drop(joined[0], joined[2])
    rows.step()
    assert (row.place, row.slot) == (place, slot)
    assert [kept.length for kept in caches_of(rows.batch).attending[0].rows if kept is not None] == list(rows.tokens.values())


def test_a_model_gets_its_layers_in_the_order_of_its_caches(tiny_model: Callable[[str], Path]) -> None:
    for family in ("gemma3_text", "falcon_h1"):
        rows = Rows(tiny_model(family))
        rows.join(4, 6)
        caches = caches_of(rows.batch)
        wanted = [type(leaf) is KVCache for leaf in leaf_caches(new_row_caches(rows.model))]
        assert [leaf in caches.attending[0].layers for leaf in leaf_caches(caches.layers)] == wanted
        assert len(caches.layers) == len(new_row_caches(rows.model))
        rows.drop(1, 2)
        assert rows.batch.nbytes == 0


@pytest.mark.parametrize("family", some(RARELY, ["gemma3n", "gemma4_text", "qwen3_next"]))
def test_a_changing_batch_of_rare_families_equals_single_requests(family: str, tmp_path: Path) -> None:
    folder = write_rare(tmp_path / family, family, **RARELY[family])
    draw = random.Random(family)
    wanted = [(prompt(seed, draw.choice([1, 2, 9, 30, 90])), draw.choice([1, 4, 15])) for seed in range(12)]
    model, _ = load_model(folder)
    expected = [[int(token) for token, _ in generate_step(mx.array(p), model, max_tokens=n)] for p, n in wanted]
    assert len({token for output in expected for token in output}) > 10, "outputs are too uniform to tell rows apart"
    settings = GenerationSettings("folder", folder, max_rows=4)
    with engine(lambda: MlxGenerationBackend(settings), prefill_tokens=40) as driver:
        assert driver.facts is not None
        (paths,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        assert "slots" in paths.split("; not used: ")[0]
        assert driver.run(*(Generate(number, *each) for number, each in enumerate(wanted))) == expected
