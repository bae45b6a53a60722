"""Which families bring heads for multi-token prediction (MTP), and how their weights are named and joined.

A head predicts the token after next: it joins the target's hidden state at a position with the embedding of the token
that follows, runs one block of the family's own kind, and shares the target's vocabulary. Families differ in names, in
the order of the pair, and in whether the hidden state has gone through the target's last norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTS = ("embedding_norm", "hidden_norm", "projection", "norm", "embedding", "output")
"""What a head has beside its block."""
NORMS = ("embedding_norm", "hidden_norm", "norm")


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """How one family stores its first head. In names, `{layers}` is the number of the target's layers."""

    block: str
    """What the names of the block's weights begin with."""
    parts: Mapping[str, str]
    """The names of the other parts, without `.weight`. `norm`, `embedding` and `output` may be missing: no norm, and
    the target's embedding and output layer."""
    count: str
    """The setting that says how many heads there are."""
    one_layer: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which the family's model has one layer: the block of the head."""
    hidden_first: bool = False
    """True if the hidden state stands before the embedding where the two are joined."""
    after_norm: bool = True
    """True if the head reads the target's hidden state after the last norm."""

    def prefixes(self, layers: int) -> tuple[str, ...]:
        """What the names of its weights begin with."""
        names = (self.block, *(f"{name}." for name in self.parts.values()))
        return tuple(name.format(layers=layers) for name in names)

    def part_of(self, name: str, layers: int) -> tuple[str, str] | None:
        """The part that a weight belongs to (`block` for the block), and the rest of its name; None if to no head."""
        for part, prefix in self.parts.items():
            start = f"{prefix.format(layers=layers)}."
            if name.startswith(start):
                return part, name[len(start) :]
        start = self.block.format(layers=layers)
        return ("block", name[len(start) :]) if name.startswith(start) else None


_ONE_EXPERT_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1}

_NEXTN = MtpFamily(
    block="model.layers.{layers}.",
    parts={
        "embedding_norm": "model.layers.{layers}.enorm",
        "hidden_norm": "model.layers.{layers}.hnorm",
        "projection": "model.layers.{layers}.eh_proj",
        "norm": "model.layers.{layers}.shared_head.norm",
        "output": "model.layers.{layers}.shared_head.head",
        "embedding": "model.layers.{layers}.embed_tokens",
    },
    count="num_nextn_predict_layers",
    one_layer=_ONE_EXPERT_LAYER,
)
"""DeepSeek's layout: a layer more than the model has."""

_QWEN = MtpFamily(
    block="mtp.layers.0.",
    parts={
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "projection": "mtp.fc",
        "norm": "mtp.norm",
    },
    count="mtp_num_hidden_layers",
    one_layer={
        "num_hidden_layers": 1,
        "full_attention_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)

FAMILIES: dict[str, MtpFamily] = {
    "deepseek_v3": _NEXTN,
    "glm4_moe": _NEXTN,
    "glm4_moe_lite": _NEXTN,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "mimo": MtpFamily(
        block="model.mtp_layers.0.",
        parts={
            "embedding_norm": "model.mtp_layers.0.token_layernorm",
            "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
            "projection": "model.mtp_layers.0.input_proj",
            "norm": "model.mtp_layers.0.final_layernorm",
        },
        count="num_nextn_predict_layers",
        one_layer={"num_hidden_layers": 1},
        hidden_first=True,
        after_norm=False,
    ),
    "ernie4_5_moe": MtpFamily(
        block="model.mtp_block.0.",
        parts={
            "embedding_norm": "model.mtp_emb_norm.0",
            "hidden_norm": "model.mtp_hidden_norm.0",
            "projection": "model.mtp_linear_proj.0",
        },
        count="num_nextn_predict_layers",
        # Its block has a plain MLP.
        one_layer={"num_hidden_layers": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
}
"""By `model_type`. The block is mlx-lm's; further heads of a family are not used: the first reads its own output."""

UNUSED_MARKS = ("mtp.", "model.mtp", "nextn")
"""Names of heads in families that are not here begin with one of these."""
