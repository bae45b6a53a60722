"""One head for multi-token prediction: from hidden states and the tokens that follow them to the tokens after those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Vocabulary = Callable[[mx.array], mx.array]
"""The target's embedding (tokens to vectors), or its output layer (hidden states to logits)."""


class MtpHead(nn.Module):  # type: ignore[misc]
    """A block of the family's own kind between the norms and the projection that join a pair, and a norm at its end.

    `embedding` and `output` are the head's own, or None for the target's, which `bind` sets.
    """

    def __init__(self, block: Any, size: int, eps: float, *, has_norm: bool, hidden_first: bool) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.norm = nn.RMSNorm(size, eps=eps) if has_norm else None
        self.embedding: Any = None
        self.output: Any = None
        self._hidden_first = hidden_first
        self._target_embedding: Vocabulary | None = None
        self._target_output: Vocabulary | None = None

    def bind(self, embedding: Vocabulary, output: Vocabulary) -> None:
        """Use the target's embedding and output layer where the head has none of its own."""
        self._target_embedding, self._target_output = embedding, output

    def __call__(self, tokens: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        """`tokens` (rows, L) follow the positions of `hidden` (rows, L, size). Returns hidden states like the target's:
        `logits` makes tokens of them, and further calls read them again."""
        pair = [self.embedding_norm(self.embed(tokens)), self.hidden_norm(hidden)]
        if self._hidden_first:
            pair.reverse()
        out: mx.array = self.block(self.projection(mx.concatenate(pair, axis=-1)), mask, cache)
        # After the norm in every family: what the head reads next time has been through it in training too.
        if self.norm is not None:
            out = self.norm(out)
        return out

    def embed(self, tokens: mx.array) -> mx.array:
        embedding = self.embedding if self.embedding is not None else self._target_embedding
        assert embedding is not None, "the head is not bound to its model"
        vectors: mx.array = embedding(tokens)
        return vectors

    def logits(self, hidden: mx.array) -> mx.array:
        output = self.output if self.output is not None else self._target_output
        assert output is not None, "the head is not bound to its model"
        logits: mx.array = output(hidden)
        return logits
