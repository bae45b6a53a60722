"""What comes after an encoder's hidden states: a vector for embeddings, a score for rerankers. Owner only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from millstream.backend.encoders.families.operations import MLX
from millstream.backend.encoders.families.parts import Tensors
from millstream.backend.encoders.pooling import normalize, pool
from millstream.models.encoder_config import family_of
from millstream.models.encoder_layout import EncoderLayout

Head = Callable[[mx.array, mx.array], mx.array]
"""Hidden states and the tokens of each row, to one vector per row, in float32."""


def embedding_head(layout: EncoderLayout, dense: Mapping[str, Tensors]) -> Head:
    """`dense`: the tensors in each dense layer's folder."""
    layers = [(dense[each.folder].linear("linear"), MLX.activations.get(each.activation)) for each in layout.dense]

    def head(hidden: mx.array, lengths: mx.array) -> mx.array:
        vectors = pool(hidden, lengths, layout.pooling)
        for layer, activate in layers:
            vectors = layer(vectors)
            vectors = vectors if activate is None else activate(vectors)
        return normalize(vectors) if layout.normalize else vectors

    return head


def classifier_head(config: Mapping[str, Any], tensors: Tensors) -> Head:
    """The score as a probability, by the head that the family has."""
    score = _classifier(config, tensors)
    return lambda hidden, lengths: mx.sigmoid(score(hidden, lengths).astype(mx.float32))


def _classifier(config: Mapping[str, Any], tensors: Tensors) -> Head:
    match family_of(config):
        case "bert":
            prefix = tensors.find_prefix(("bert.",), "pooler.dense.weight")
            first, last = tensors.linear(f"{prefix}pooler.dense"), tensors.linear("classifier")
            return lambda hidden, lengths: last(mx.tanh(first(hidden[:, 0])))
        case "distilbert":
            first, last = tensors.linear("pre_classifier"), tensors.linear("classifier")
            return lambda hidden, lengths: last(mx.maximum(first(hidden[:, 0]), 0))
        case "modernbert":
            return _modernbert_classifier(config, tensors)
        case family:
            activate = MLX.activations["gelu" if family == "electra" else "tanh"]
            first, last = tensors.linear("classifier.dense"), tensors.linear("classifier.out_proj")
            return lambda hidden, lengths: last(activate(first(hidden[:, 0])))


def _modernbert_classifier(config: Mapping[str, Any], tensors: Tensors) -> Head:
    first, last = tensors.linear("head.dense"), tensors.linear("classifier")
    norm = tensors.norm("head.norm", float(config.get("norm_eps", 1e-5)))
    activate = MLX.activation(config.get("classifier_activation", "gelu"))
    mode = "mean" if config.get("classifier_pooling", "cls") == "mean" else "cls"
    return lambda hidden, lengths: last(norm(activate(first(pool(hidden, lengths, [mode]).astype(hidden.dtype)))))


def yes_no_head(rows: mx.array) -> Head:
    """`rows`: of a language model's head, for the tokens `no` and `yes`. The score is the probability of yes."""

    def head(hidden: mx.array, lengths: mx.array) -> mx.array:
        last = pool(hidden, lengths, ["last"])
        return mx.softmax(last @ rows.astype(mx.float32).T, axis=-1)[:, 1:]

    return head
