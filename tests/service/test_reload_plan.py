"""What a reload of the configuration does to each model: old and new specs become a plan."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.config import ModelSpec, Settings
from millstream.loading.reload_plan import LIVE_FIELDS, ReloadPlan, load_options, plan_reload

SETTINGS = Settings(isolation="thread", memory=2**30)

OTHER_VALUES = {
    "source": "org/other",
    "aliases": ("z",),
    "kind": "embedding",
    "pin": True,
    "load": "use",
    "idle_unload": 5.0,
    "spec_prefill": 0.5,
    "max_batch": 3,
    "isolation": "process",
    "kv_memory": 2**20,
    "kv_bits": 8,
    "speculation": "off",
    "draft": "org/small",
    "draft_depth": 3,
    "sampling": (("temperature", 0.5),),
    "max_tokens": 9,
    "tool_format": "none",
    "reasoning_format": "none",
    "allow_special_tokens": True,
}

SPECS = st.builds(
    ModelSpec,
    source=st.sampled_from(["org/a", "org/b", None]),
    name=st.sampled_from("abcd"),
    aliases=st.lists(st.sampled_from("xyz"), max_size=2).map(tuple),
    pin=st.booleans(),
    idle_unload=st.sampled_from([None, 0.0, 5.0]),
    max_batch=st.sampled_from([None, 3, SETTINGS.max_batch]),
    isolation=st.sampled_from([None, "thread", "process"]),
    max_tokens=st.sampled_from([None, 9]),
)
LISTS = st.lists(SPECS, unique_by=lambda spec: spec.name, max_size=4)


@given(old=LISTS, new=LISTS)
def test_a_plan_leads_from_the_old_models_to_the_new_ones(old: list[ModelSpec], new: list[ModelSpec]) -> None:
    plan = plan_reload(SETTINGS, old, new)
    served = {spec.name: spec for spec in old if spec.name not in plan.removed}
    assert not served.keys() & {spec.name for spec in plan.added}
    assert {spec.name for spec in (*plan.updated, *plan.reloaded)} <= served.keys()
    assert set(plan.removed) <= {spec.name for spec in old}
    served |= {spec.name: spec for spec in (*plan.added, *plan.updated, *plan.reloaded)}
    assert [served[name] for name in plan.order] == new
    assert len(served) == len(new)


@given(old=LISTS, new=LISTS)
def test_a_model_is_touched_only_if_it_changed_and_reloaded_only_if_it_must_be(
    old: list[ModelSpec], new: list[ModelSpec]
) -> None:
    plan = plan_reload(SETTINGS, old, new)
    before = {spec.name: spec for spec in old}
    for spec in plan.updated:
        assert spec != before[spec.name]
        assert load_options(SETTINGS, spec) == load_options(SETTINGS, before[spec.name])
    for spec in plan.reloaded:
        assert load_options(SETTINGS, spec) != load_options(SETTINGS, before[spec.name])
    touched = [*plan.removed, *(spec.name for spec in (*plan.added, *plan.updated, *plan.reloaded))]
    assert len(touched) == len(set(touched)), "each model is in one list"
    for spec in new:
        assert (spec.name in touched) == (before.get(spec.name) != spec)


@given(specs=LISTS)
def test_the_same_file_changes_nothing(specs: list[ModelSpec]) -> None:
    plan = plan_reload(SETTINGS, specs, specs)
    assert plan.is_empty and str(plan) == "no changes"
    again = plan_reload(SETTINGS, specs, list(reversed(specs)))
    assert again.is_empty and list(again.order) == [spec.name for spec in reversed(specs)]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelSpec) if field.name != "name"])
def test_every_option_takes_effect_at_once_or_reloads(field: str) -> None:
    old = ModelSpec("org/a", "a")
    new = replace(old, **{field: OTHER_VALUES[field]})  # type: ignore[arg-type]
    plan = plan_reload(SETTINGS, [old], [new])
    assert plan == ReloadPlan(**{"updated" if field in LIVE_FIELDS else "reloaded": (new,)}, order=("a",))


def test_what_the_server_sets_anyway_reloads_nothing() -> None:
    old = ModelSpec("org/a", "a")
    new = replace(old, max_batch=32, isolation="thread", kv_bits=0, tool_format="auto", allow_special_tokens=False)
    assert plan_reload(SETTINGS, [old], [new]).updated == (new,)
    without_budget = replace(SETTINGS, memory=None)
    assert plan_reload(without_budget, [old], [replace(old, kv_memory=2**20)]).reloaded == ()


def test_a_plan_in_words() -> None:
    a, b, c, d = (ModelSpec("org/x", name) for name in "abcd")
    plan = plan_reload(SETTINGS, [a, b, c], [replace(b, pin=True), replace(c, max_batch=1), d])
    assert str(plan) == "added: d; removed: a; reloaded: c; updated: b"
