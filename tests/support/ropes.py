"""Rotary embeddings of several kinds, and a model that holds some."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


class Holder(nn.Module):  # type: ignore[misc]
    def __init__(self, *ropes: Any) -> None:
        super().__init__()
        self.ropes = list(ropes)
