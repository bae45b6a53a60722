"""Which fast paths a model gets, and the reason for each that it does not get."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import gemma2

from millstream.backend.device import current_device
from millstream.backend.generation.assembly import Assembly
from millstream.backend.generation.caches.widths import eighths, kernel_width, powers_of_two
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.agreement import Trial
from millstream.backend.generation.layout_choice.chooser import LayoutChooser
from millstream.backend.generation.layout_choice.fast_paths import FastPaths
from millstream.backend.generation.settings import GenerationSettings
from millstream.backend.generation.trial import TwoRowTrial
from millstream.backend.weights.loading import load
from millstream.config import FAST_PATHS
from support.engines import engine
from support.rare import write_rare
from support.tiny import VOCAB, write_model

pytestmark = pytest.mark.skipif(
    current_device().kind != "cpu", reason="expects the choices for a CPU: needs MLX's CPU device"
)


def choose(folder: Path, trial: Trial | None = None, **changes: Any) -> Layout:
    settings = GenerationSettings("folder", folder, max_rows=4, **changes)
    model = load("folder", folder, current_device(), unpack=True).model
    chooser = LayoutChooser(settings, current_device(), model, takes_media=False)
    chooser.shape_layers()
    return chooser.choose(trial or TwoRowTrial(Assembly(model, VOCAB)))


def test_full_attention_gets_length_classes(tiny_model: Callable[[str], Path]) -> None:
    layout = choose(tiny_model("llama"))
    assert (layout.caches, layout.one_row_reason, layout.mask_dims) == ("classes", None, 4)
    reasons = dict(layout.reasons)
    assert list(reasons) == list(FAST_PATHS)
    assert [reasons[name] for name in ("fuse", "slots", "group-prefill")] == [None, None, None]
    assert [reasons[name] for name in ("kernel", "fused-matmul")] == ["no CUDA", "no CUDA"]
    assert reasons["mkl-layout"] == (None if platform.machine() == "x86_64" else "not x86_64")


def test_the_paths_of_a_gpu_can_be_had_on_the_cpu(tiny_model: Callable[[str], Path]) -> None:
    layout = choose(tiny_model("llama"), like_gpu=True)
    assert (layout.caches, layout.padded_chunks, layout.in_place) == ("classes", True, False)
    assert dict(layout.reasons)["fused-matmul"] is None


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2", "falcon_h1", "mamba2"])
def test_layers_of_several_kinds_get_slots_groups_and_widths(family: str, tiny_model: Callable[[str], Path]) -> None:
    layout = choose(tiny_model(family), like_gpu=True)
    assert (layout.caches, layout.one_row_reason, layout.in_place) == ("mixed", None, False)
    assert layout.width is (None if family == "falcon_h1" else kernel_width), "only where blocks are fused"
    assert (layout.group_fill, layout.padded_chunks) == (0.5, True)
    assert [dict(layout.reasons)[name] for name in ("slots", "group-prefill")] == [None, None]


def test_states_that_carry_padding_on_get_neither_groups_nor_padded_chunks(tmp_path: Path) -> None:
    layout = choose(write_rare(tmp_path / "jamba", "jamba"), like_gpu=True)
    assert (layout.caches, layout.group_fill, layout.padded_chunks) == ("mixed", None, False)
    assert dict(layout.reasons)["group-prefill"] == "its prompts answer differently together than alone"


def test_mamba_2_layers_are_told_where_a_padded_row_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's Nemotron-H does not tell them. Its states are wrong then, which hardly shows in its logits."""
    folder = write_rare(tmp_path / "nemotron_h", "nemotron_h")
    assert choose(folder).group_fill is not None
    monkeypatch.setattr("millstream.backend.generation.layout_choice.chooser.tell_lengths", lambda model: 0)
    untold = choose(folder)
    assert dict(untold.reasons)["group-prefill"] == "its prompts answer differently together than alone"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("plamo2", "ArraysCache is not full attention, and its layers have attention of their own"),
    ],
)
def test_other_models_run_on_merged_caches(
    family: str, reason: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    plamo2 = {"hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_step": 2, "mamba_enabled": True}
    layout = choose(write_model(tmp_path / family, family, **plamo2) if family == "plamo2" else tiny_model(family))
    assert (layout.caches, layout.one_row_reason) == ("merged", None)
    reasons = dict(layout.reasons)
    assert reasons["slots"] == reason
    assert reasons["group-prefill"] == "needs slots"


class Scripted:
    """A trial with given results, by the layout's caches and whether kernels write."""

    def __init__(self, raises: set[tuple[str, bool]], disagrees: set[str]) -> None:
        self._raises = raises
        self._disagrees = disagrees

    def two_rows(self, layout: Layout) -> None:
        if (layout.caches, layout.in_place) in self._raises:
            raise ValueError("told to")

    def disagreement(self, layout: Layout, *, together: bool = False) -> float:
        return 0.5 if layout.caches in self._disagrees else 0.01

    def verification(self, layout: Layout, *, one_by_one: bool = False) -> float:
        if "passes" in {name for name, _ in self._raises}:
            raise ValueError("told to")
        return 0.5 if ("steps" if one_by_one else "passes") in self._disagrees else 0.01

    def continuation(self, layout: Layout) -> float:
        assert layout.continues
        if "prefixes" in {name for name, _ in self._raises}:
            raise ValueError("told to")
        return 0.5 if "prefixes" in self._disagrees else 0.01


@pytest.mark.parametrize(
    ("raises", "disagrees", "continues"),
    [(set(), set(), True), (set(), {"prefixes"}, False), ({("prefixes", False)}, set(), False)],
)
def test_a_trial_decides_whether_prompts_continue_a_prefix_together(
    raises: set[tuple[str, bool]], disagrees: set[str], continues: bool, tiny_model: Callable[[str], Path]
) -> None:
    scripted = Scripted(raises, disagrees)
    assert choose(tiny_model("gemma3_text"), scripted, like_gpu=True).continues is continues


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "falcon_h1", "mamba2"])
def test_prompts_of_all_kinds_continue_a_prefix_together(family: str, tiny_model: Callable[[str], Path]) -> None:
    for changes in ({}, {"like_gpu": True}):
        assert choose(tiny_model(family), **changes).continues


@pytest.mark.parametrize(
    ("raises", "disagrees", "caches", "in_place", "reason"),
    [
        (set(), set(), "mixed", True, None),
        ({("mixed", True)}, set(), "mixed", False, None),
        ({("mixed", True), ("mixed", False)}, set(), "merged", False, "told to"),
        (set(), {"mixed"}, "merged", False, "its rows answer differently together than alone"),
        (set(), {"mixed", "merged"}, "mixed", True, None),
    ],
)
def test_a_trial_decides_whether_a_mixed_model_gets_length_classes(
    raises: set[tuple[str, bool]],
    disagrees: set[str],
    caches: str,
    in_place: bool,
    reason: str | None,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FastPaths, "kernels_write", True)
    layout = choose(tiny_model("lfm2"), Scripted(raises, disagrees), like_gpu=True)
    assert (layout.caches, layout.in_place) == (caches, in_place)
    # What was made for kernels goes with them: two rows were computed as 64.
    if caches == "mixed":
        assert (layout.width, layout.slot_policy) == ((kernel_width, powers_of_two) if in_place else (None, eighths))
    assert dict(layout.reasons)["slots"] == (reason and f"ArraysCache is not full attention, and {reason}")


class Rounding:
    """A trial of a model that rounds a lot: groups differ from single prompts by a factor more."""

    def __init__(self, alone: float, grouped: float) -> None:
        self._alone = alone
        self._grouped = grouped

    def two_rows(self, layout: Layout) -> None: ...

    def disagreement(self, layout: Layout, *, together: bool = False) -> float:
        return self._grouped if together and layout.group_fill is not None else self._alone

    def verification(self, layout: Layout, *, one_by_one: bool = False) -> float:
        return self._alone


@pytest.mark.parametrize(
    ("alone", "grouped", "shares"),
    [(0.01, 0.09, True), (0.01, 0.15, False), (0.09, 0.15, True), (0.09, 0.3, False), (0.4, 0.6, False)],
)
def test_groups_in_half_precision_are_held_against_the_rounding_of_the_model(
    alone: float, grouped: float, shares: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "millstream.backend.generation.layout_choice.agreement._is_single_precision", lambda model: False
    )
    layout = choose(tiny_model("gemma3_text"), Rounding(alone, grouped))
    assert (layout.group_fill is not None) == shares


@pytest.mark.parametrize(
    ("raises", "disagrees", "reason"),
    [
        (set(), set(), None),
        (set(), {"passes"}, None),
        (set(), {"passes", "steps"}, "a pass of several tokens per row gives other answers than steps of one"),
        ({("passes", True)}, set(), "a pass of several tokens per row fails (told to)"),
    ],
)
def test_a_trial_decides_whether_a_model_has_drafts(
    raises: set[tuple[str, bool]], disagrees: set[str], reason: str | None, tiny_model: Callable[[str], Path]
) -> None:
    """What differs from a row alone may still be what steps give."""
    assert choose(tiny_model("lfm2"), Scripted(raises, disagrees)).no_drafts == reason


def test_caches_that_verify_no_drafts_say_so(tiny_model: Callable[[str], Path]) -> None:
    assert choose(tiny_model("llama4")).no_drafts == "its KV caches cannot forget tokens that a row does not keep"


def test_without_slots_a_mixed_model_runs_on_merged_caches(tiny_model: Callable[[str], Path]) -> None:
    layout = choose(tiny_model("lfm2"), disabled=frozenset({"slots"}))
    assert (layout.caches, dict(layout.reasons)["slots"]) == ("merged", "--disable")


def test_a_cache_that_cannot_be_batched_is_named(tiny_model: Callable[[str], Path]) -> None:
    layout = choose(tiny_model("llama4"))
    assert layout.one_row_reason == "ChunkedKVCache cannot be batched"


def test_what_the_user_disabled_is_named(tiny_model: Callable[[str], Path]) -> None:
    layout = choose(tiny_model("llama"), disabled=frozenset(FAST_PATHS))
    assert set(dict(layout.reasons).values()) == {"--disable"}
    assert layout.fast_paths.startswith("fast paths: none; not used: fuse (--disable)")


def write_gemma2(folder: Path) -> Path:
    return write_model(folder, "gemma2", query_pre_attn_scalar=16, sliding_window=64)


def test_capped_scores_are_left_to_our_attention(tmp_path: Path) -> None:
    layout = choose(write_gemma2(tmp_path / "gemma2"))
    assert layout.caches == "classes"
    assert layout.group_fill is not None


def test_masks_of_five_dimensions_leave_prompts_ungrouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Gemma 2 whose layers compute something else than the formula that we know."""
    own = gemma2.Attention.__call__
    monkeypatch.setattr(gemma2.Attention, "__call__", lambda *given: own(*given) * 1.25)
    layout = choose(write_gemma2(tmp_path / "gemma2"))
    assert (layout.caches, layout.mask_dims, layout.group_fill) == ("slots", 5, None)
    assert dict(layout.reasons)["group-prefill"] == "its masks have 5 dimensions"


def test_a_quantised_cache_has_groups_of_prompts(tmp_path: Path) -> None:
    layout = choose(write_model(tmp_path / "llama", "llama", head_dim=32), kv_bits=8)
    assert (layout.caches, layout.attention) == ("classes", "packed")
    assert layout.group_fill is not None


def test_the_paths_are_told_in_one_note(tiny_model: Callable[[str], Path]) -> None:
    from millstream.backend.generation.backend import MlxGenerationBackend

    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", tiny_model("llama"), max_rows=4))) as driver:
        assert driver.facts is not None
        (note,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
    assert "slots" in note.split("; not used: ")[0]
    assert "kernel (no CUDA)" in note
