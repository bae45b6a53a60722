"""Loads the head of a model and binds it to the model, as a drafter. Owner only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.backend.device import Device
from millstream.backend.generation.mtp.drafter import MtpDrafter
from millstream.backend.generation.mtp.hidden_states import HiddenStates
from millstream.backend.generation.mtp.loading import load_head, text_model, vocabulary_of
from millstream.backend.layers.cpu_experts import use_float32_experts
from millstream.backend.weights.loading import UNPACKED, unpack_weights
from millstream.backend.weights.materialize import evaluate_all


@dataclass(frozen=True, slots=True)
class AttachedMtp:
    """`note`: what to tell of the heads of a model that has some, or should have."""

    drafter: MtpDrafter | None = None
    weight_bytes: int = 0
    note: str = ""


def attach_mtp(folder: Path, config: dict[str, Any], model: Any, device: Device, *, unpack: bool) -> AttachedMtp:
    """The drafter of a model whose folder has a head; its weights are evaluated. From then on the model's last norm
    keeps what goes through it."""
    found = load_head(folder, config)
    if found.head is None or found.family is None:
        return AttachedMtp(note=found.note)
    try:
        inner, (embedding, output) = text_model(model), vocabulary_of(model)
    except ValueError as error:
        return AttachedMtp(note=f"MTP weights are not used: {error}")
    head = found.head
    dtype = UNPACKED.get(device.kind) if unpack else None
    if dtype is not None:
        unpack_weights(head, device, dtype)
    if device.is_cpu:
        use_float32_experts(head)
    nbytes = evaluate_all(head)
    head.bind(embedding, output)
    hidden = HiddenStates(inner.norm, after_norm=found.family.after_norm)
    return AttachedMtp(MtpDrafter(head, hidden), nbytes, f"MTP head: {nbytes / 2**20:,.0f} MiB")
