"""A quantised KV cache: only in length classes, with attention that reads packed numbers."""

from __future__ import annotations

import dataclasses
import logging

from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.quantized import choose_quantization, unsupported
from millstream.backend.generation.caches.widths import kernel_width
from millstream.backend.generation.layers.attention import adopt_attention, kernel_attention
from millstream.backend.generation.layers.packed_attention import packed_attention, packed_matmuls_fit
from millstream.backend.generation.layers.slab_attention import Attention, slab_attention
from millstream.backend.generation.layout import Layout
from millstream.backend.generation.layout_choice.agreement import Trial, trouble_of
from millstream.backend.generation.layout_choice.subject import Subject

log = logging.getLogger(__name__)


def quantised_cache(subject: Subject, trial: Trial) -> Layout:
    """Raises `ModelError` if the model cannot have one."""
    bits, paths = subject.settings.kv_bits, subject.paths
    if subject.takes_media:
        raise unsupported(bits, "it takes images, and quantised keys and values are for text models")
    packing = choose_quantization(subject.model, bits)
    if not paths.enabled("slots"):
        raise unsupported(bits, "it needs slots, and --disable slots leaves them out")
    layout = dataclasses.replace(subject.draft(), caches="classes", attention="packed", packing=packing)
    attend = _attention(subject)
    if adopt_attention(subject.model, attend) != len(new_row_caches(subject.model)):
        raise unsupported(bits, "its layers have attention of their own")
    if paths.wide:
        width = kernel_width if subject.fusion.fuse(attend) is not None else None
        layout = dataclasses.replace(layout, width=width, in_place=paths.kernels_write)
    trouble = trouble_of(trial, layout)
    if trouble and layout.in_place:
        log.info("This model decodes without kernels: %s", trouble)
        layout = dataclasses.replace(layout, in_place=False)
        trouble = trouble_of(trial, layout)
    if trouble and subject.fusion.undo(trouble):
        layout = dataclasses.replace(subject.without_kernels(layout), attention="packed")
        trouble = trouble_of(trial, layout)
    if trouble:
        raise unsupported(bits, f"its attention cannot read quantised keys and values ({trouble})")
    return layout


def _attention(subject: Subject) -> Attention:
    if subject.paths.on_cuda:
        return kernel_attention
    matmuls = packed_matmuls_fit(subject.device.kind) and not subject.settings.like_gpu
    return slab_attention(packed_attention(subject.attention, matmuls=matmuls))
