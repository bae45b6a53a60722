"""What to do with the models when the configuration was read again: old and new specs become a plan, a pure function.

A model is reloaded only if an option changed that is fixed when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millstream.config import ModelSpec, Settings
from millstream.loading.settings import draft_depth, draft_of, kv_bits, max_batch, speculation

LIVE_FIELDS = frozenset({"aliases", "pin", "load", "idle_unload", "sampling", "max_tokens"})
"""Fields of `ModelSpec` that take effect without a reload."""


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """Every spec has a name."""

    removed: tuple[str, ...] = ()
    added: tuple[ModelSpec, ...] = ()
    updated: tuple[ModelSpec, ...] = ()
    """Models that go on running, with new options."""
    reloaded: tuple[ModelSpec, ...] = ()
    """Models that finish their requests and are loaded again."""
    order: tuple[str, ...] = ()
    """All names afterwards. Requests that name no model get the first one."""

    @property
    def is_empty(self) -> bool:
        return not (self.removed or self.added or self.updated or self.reloaded)

    def __str__(self) -> str:
        parts = {
            "added": _names(self.added),
            "removed": list(self.removed),
            "reloaded": _names(self.reloaded),
            "updated": _names(self.updated),
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names) or "no changes"


def plan_reload(settings: Settings, old: Sequence[ModelSpec], new: Sequence[ModelSpec]) -> ReloadPlan:
    """`settings`: the server's, which stay. The names of the specs are set and unique."""
    before = {spec.name: spec for spec in old}
    changed = [spec for spec in new if spec.name in before and before[spec.name] != spec]
    reloaded = [spec for spec in changed if load_options(settings, spec) != load_options(settings, before[spec.name])]
    return ReloadPlan(
        removed=tuple(_names(spec for spec in old if spec.name not in set(_names(new)))),
        added=tuple(spec for spec in new if spec.name not in before),
        updated=tuple(spec for spec in changed if spec not in reloaded),
        reloaded=tuple(reloaded),
        order=tuple(_names(new)),
    )


def load_options(settings: Settings, spec: ModelSpec) -> tuple[object, ...]:
    """All that is fixed when a model is loaded. The server's options count where the model sets none."""
    allowed = spec.allow_special_tokens
    return (
        spec.source,
        spec.kind,
        settings.isolated(spec),
        max_batch(settings, spec),
        kv_bits(settings, spec),
        speculation(settings, spec),
        draft_of(settings, spec),
        draft_depth(settings, spec),
        None if settings.memory is None else spec.kv_memory,
        spec.tool_format or settings.tool_format,
        spec.reasoning_format or settings.reasoning_format,
        settings.allow_special_tokens if allowed is None else allowed,
    )


def _names(specs: Iterable[ModelSpec]) -> list[str]:
    return [spec.name or "" for spec in specs]
