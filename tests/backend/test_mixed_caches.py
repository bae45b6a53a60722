"""Models with layers of several kinds: length classes for full attention, rings for windows, arrays of states."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.utils import load_model

from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.batch import Batch
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.joining import JoiningRows, MixedRows, mixed_rows
from millstream.backend.generation.caches.mixed_caches import MixedCaches
from millstream.backend.generation.caches.slabs import SPARE_TOKENS
from millstream.backend.generation.caches.widths import exact, kernel_width, powers_of_two
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.prefill import groups
from millstream.backend.generation.prefill.prefiller import MixedPrefiller, SinglePrefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import leaf_caches
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from millstream.engine.prefix_cache.orders import SavePrefix
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
    "gpt_oss": {},
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
    assert [kept.length for kept in caches_of(rows.batch).attending[0].rows if kept is not None] == list(
        rows.tokens.values()
    )


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


def reference(folder: Path, wanted: list[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    model, _ = load_model(folder)
    expected = [[int(token) for token, _ in generate_step(mx.array(p), model, max_tokens=n)] for p, n in wanted]
    assert len({token for output in expected for token in output}) > 10, "outputs are too uniform to tell rows apart"
    return expected


@pytest.mark.parametrize("family", some(RARELY, ["gemma3n", "gemma4_text", "qwen3_next", "gpt_oss"]))
def test_a_changing_batch_of_rare_families_equals_single_requests(family: str, tmp_path: Path) -> None:
    folder = write_rare(tmp_path / family, family, **RARELY[family])
    draw = random.Random(family)
    wanted = [(prompt(seed, draw.choice([1, 2, 9, 30, 90])), draw.choice([1, 4, 15])) for seed in range(12)]
    expected = reference(folder, wanted)
    settings = GenerationSettings("folder", folder, max_rows=4)
    with engine(lambda: MlxGenerationBackend(settings), prefill_tokens=40) as driver:
        assert driver.facts is not None
        (paths,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        assert "slots" in paths.split("; not used: ")[0]
        assert driver.run(*(Generate(number, *each) for number, each in enumerate(wanted))) == expected


@pytest.mark.parametrize(
    ("family", "like_gpu"),
    some(
        [
            (family, like_gpu)
            for family in ("gemma3_text", "lfm2", "mamba2", "falcon_h1", *RARELY)
            for like_gpu in (False, True)
        ],
        [("gemma3_text", True), ("lfm2", False)],
    ),
)
def test_prompts_that_share_a_pass_equal_single_requests(
    family: str, like_gpu: bool, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty short prompts come at once. The windows of the families are shorter than some of them, and rings wrap."""
    folder = write_rare(tmp_path / family, family, **RARELY[family]) if family in RARELY else tiny_model(family)
    passes: list[int] = []
    begin = groups.Group.__init__

    def count(group: Any, submits: Any) -> None:
        passes.append(len(submits))
        begin(group, submits)

    draw = random.Random(family)
    wanted = [
        (prompt(seed, draw.randint(2, 24)), draw.choice([2, 6, 70 if seed % 20 == 0 else 9])) for seed in range(60)
    ]
    expected = reference(folder, wanted)
    monkeypatch.setattr(groups.Group, "__init__", count)
    settings = GenerationSettings("folder", folder, max_rows=32, like_gpu=like_gpu)
    with engine(lambda: MlxGenerationBackend(settings), prefill_tokens=400) as driver:
        passes.clear()
        assert driver.run(*(Generate(number, *each) for number, each in enumerate(wanted))) == expected
    if family != "jamba":  # whose states carry padding on
        assert sum(passes) > 30 and len(passes) < 25, "prompts run one by one"


@pytest.mark.parametrize("cuts", [(0, 20), (0, 30, 31, 75)])
@pytest.mark.parametrize("family", ["gemma3_text", "lfm2", "falcon_h1"])
def test_padding_changes_neither_windows_nor_states(
    family: str, cuts: tuple[int, ...], tiny_model: Callable[[str], Path]
) -> None:
    model, _ = load_model(tiny_model(family))
    submit = Generate(1, prompt(3, cuts[-1] + 1), 1)

    def prefill(*, padded: bool) -> MixedRows:
        prefiller = SinglePrefiller(model, PrefixStore(), pad_chunks=padded)
        for start, end in itertools.pairwise(cuts):
            mx.eval(prefiller.prefill([Prefill(submit, start, end)]))
        _, [caches] = prefiller.take([1])
        return mixed_rows(leaf_caches(caches))

    plain, padded = prefill(padded=False), prefill(padded=True)
    for window, rows in plain.attending.items():
        other = padded.attending[window]
        assert rows.lengths == other.lengths == (cuts[-1],)
        kept = min(window or cuts[-1], cuts[-1])
        for one, two in zip(rows.arrays, other.arrays, strict=True):
            assert mx.allclose(one[:, :, -kept:], two[:, :, -kept:], rtol=1e-3, atol=1e-4)
    for one, two in zip(plain.arrays, padded.arrays, strict=False):
        assert one.dtype == two.dtype
    for layer, same in zip(plain.states, padded.states, strict=True):
        for state, wanted in zip(layer, same, strict=True):
            assert state is not None and wanted is not None
            assert mx.allclose(state, wanted, rtol=1e-3, atol=1e-4)


def test_states_of_rows_that_join_and_leave(tiny_model: Callable[[str], Path]) -> None:
    """A row's states are those that it joined with, wherever its number goes."""
    model, _ = load_model(tiny_model("falcon_h1"))
    like = new_row_caches(model)
    model(mx.array([[1]]), cache=like)
    for policy, width in ((exact, None), (powers_of_two, kernel_width)):
        caches = MixedCaches(like, policy, width=width)
        held: list[float | None] = []

        def joined(values: list[float], caches: MixedCaches = caches) -> list[int]:
            states = [
                [mx.concatenate([mx.full((1, *each.shape[1:]), value) for value in values]) for each in leaf.cache]
                for leaf in leaf_caches(like)
                if isinstance(leaf, ArraysCache)
            ]
            return caches.join([MixedRows({0: JoiningRows([], (0,) * len(values))}, states, len(values))])

        for change in ([1.0, 2.0, 3.0], [4.0], [-2], [5.0, 6.0, 7.0, 8.0], [-1, -4, -6], [9.0], [-3, -5, -7]):
            if change[0] > 0:
                for number, value in zip(joined([float(each) for each in change]), change, strict=True):
                    held += [None] * (caches.size - len(held))
                    held[number] = value
            else:
                kept = [number for number, value in enumerate(held) if value is not None and -value not in change]
                held = [held[old] if old in kept else None for old in caches.filter(kept)]
            assert len(held) == caches.size
            for number, value in enumerate(held):
                if value is not None:
                    for leaf in caches.states.row(number):
                        assert all(mx.all(array == value).item() for array in leaf.cache)


@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1"])
def test_a_prompt_of_a_group_is_saved_as_it_would_be_alone(family: str, tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(tiny_model(family))
    store = PrefixStore()
    prefiller = MixedPrefiller(model, min_length_ratio=0.5, prefix_store=store)
    submits = [Generate(number, prompt(number, length), 1) for number, length in enumerate((17, 30, 25))]
    mx.eval(prefiller.prefill([Prefill(submit, 0, len(submit.prompt) - 1) for submit in submits]))
    assert prefiller.grouped == 3
    assert prefiller.save(SavePrefix(1, 0, 8, (), checkpoint=9, tokens=7)) is None, "its state is another token's"
    for submit in submits:
        tokens, first = len(submit.prompt) - 1, 100 * submit.request_id
        blocks = tuple(range(first, first + tokens // 8))
        arrays = prefiller.save(SavePrefix(submit.request_id, 0, 8, blocks, checkpoint=first + 99, tokens=tokens))
        assert arrays is not None
        mx.eval(arrays)
        restored, alone = new_row_caches(model), new_row_caches(model)
        store.fill_caches(blocks, first + 99, restored)
        model(mx.array([submit.prompt[:-1]]), cache=alone)
        last = mx.array([[submit.prompt[-1]]])
        assert mx.allclose(model(last, cache=restored), model(last, cache=alone), rtol=1e-3, atol=1e-4)
