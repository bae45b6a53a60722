"""Notes when parts of a step begin and end, in any Python process that has this folder on its PYTHONPATH.

See bench/step_times.py. Python imports this module at its start. Nothing is noted unless MLX_STEP_TRACE names a file
(an engine's process gets no variables with other beginnings). Each writes its notes to FILE.PID.json at its end.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.machinery
import json
import os
import sys
import time
from types import ModuleType
from typing import Any

FILE = os.environ.get("MLX_STEP_TRACE", "")
NOTED = {
    "millstream.engine.owner": {"OwnerLoop": ("_handle", "_step", "_emit", "_measure")},
    "millstream.engine.wire_mailbox": {"WireMailbox": ("_receive",)},
    "millstream.engine.generation.scheduler": {"GenerationScheduler": ("submit", "plan", "advance", "cancel")},
    "millstream.backend.generation.backend": {
        "MlxGenerationBackend": ("step", "_save", "_share", "_join", "_prefill", "_compact"),
    },
    "millstream.backend.generation.decoding": {"Decoder": ("launch", "finish")},
    "millstream.backend.generation.batch": {"Batch": ("join", "drop", "forward", "launch", "save", "_rows_changed")},
    "millstream.backend.generation.compiled_step": {"CompiledStep": ("run", "_step")},
    "millstream.backend.generation.caches.due": {"Due": ("integers", "send")},
    "millstream.backend.generation.caches.class_caches": {"ClassCaches": ("place", "rearrange", "begin_step")},
    "millstream.backend.generation.caches.mixed_caches": {"MixedCaches": ("join", "filter", "begin_step")},
    "millstream.backend.generation.caches.kernel_slabs": {
        "KernelStep": ("_look", "prepare"),
        "KernelWriter": ("join", "move"),
    },
    "millstream.backend.generation.prefill.deferred": {"DeferredChunks": ("evaluate", "_start")},
    "millstream.backend.generation.prefill.prefiller": {
        "SinglePrefiller": ("_begin", "_new_caches", "take"),
        "BatchPrefiller": ("prefill", "take"),
    },
    "millstream.backend.generation.prefill.pass_in_parts": {"PassInParts": ("part",)},
    "millstream.backend.generation.prefill.groups": {"RightPaddedGroup": ("__init__",)},
    "millstream.backend.generation.prefix_store.blocks": {"PrefixStore": ("save_row", "share", "evict")},
    "millstream.engine.process_link": {"ProcessLink": ("_take", "post_soon")},
    "millstream.service.engine_client": {"EngineClient": ("_receive",)},
    "millstream.api.http1.protocol": {"LimitedProtocol": ("data_received",)},
}
"""By module and class, the methods whose times are noted."""

notes: list[tuple[str, float, float]] = []
"""(name, begin, end) by the monotonic clock, which all processes of a machine share."""


def note(kind: type, name: str) -> None:
    method, label = vars(kind)[name], f"{kind.__name__}.{name}"

    @functools.wraps(method)
    def noted(*given: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*given, **named)
        finally:
            notes.append((label, began, time.monotonic()))

    setattr(kind, name, noted)


def note_all(module: ModuleType, kinds: dict[str, tuple[str, ...]]) -> None:
    for kind, names in kinds.items():
        for name in names:
            note(getattr(module, kind), name)


def note_collections() -> None:
    begun: list[float] = []

    def collected(phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            begun.append(time.monotonic())
        else:
            notes.append((f"garbage collection {told['generation']}", begun.pop(), time.monotonic()))

    gc.callbacks.append(collected)


def write() -> None:
    if any(not name.startswith("garbage") for name, _, _ in notes):
        with open(f"{FILE}.{os.getpid()}.json", "w") as file:
            json.dump(notes, file)


class Finder:
    """Lets modules be found as ever, and notes their methods once they have run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in NOTED:
            return None
        kinds = NOTED.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executing(module: ModuleType) -> None:
            execute(module)
            note_all(module, kinds)

        spec.loader.exec_module = executing  # type: ignore[method-assign]
        return spec


if FILE:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    note_collections()
    atexit.register(write)
