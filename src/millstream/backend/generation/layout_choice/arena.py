"""Arenas for layers of every kind: if they were asked for, or no other layout batches the model, and a trial agrees."""

from __future__ import annotations

import dataclasses
import logging

from millstream.backend.generation.arena.rows import misfit
from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.widths import exact
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.agreement import ERRORS, Trial
from millstream.backend.generation.layout_choice.subject import Subject

log = logging.getLogger(__name__)


def arena_layout(subject: Subject, trial: Trial) -> Layout | None:
    """None, with the reason in the log, if this model does not run in arenas."""
    layout = dataclasses.replace(
        subject.draft(),
        caches="arena",
        slot_policy=exact,
        padded_chunks=subject.paths.as_on_gpu,
        queued=subject.settings.layout != "arena-built",
    )
    trouble = _not_served(subject) or misfit(new_row_caches(subject.model))
    if trouble is None:
        try:
            found = trial.in_arenas()
            layout = dataclasses.replace(layout, pads_states=found == "padded")
            trial.two_rows(layout)
            if found == "wrong":
                trouble = "its rows answer differently together than alone"
        except ERRORS as error:
            trouble = str(error) or type(error).__name__
    if trouble is None:
        for name in ("slots", "kernel", "fused-matmul", "packed-matmul", "compiled-step"):
            subject.paths.decline(name, "arenas")
        return layout
    level = logging.INFO if subject.settings.layout == "auto" else logging.WARNING
    log.log(level, "This model does not run in arenas: %s", trouble)
    return None


def _not_served(subject: Subject) -> str | None:
    if subject.settings.kv_bits:
        return "quantised keys and values are in length classes"
    return None
