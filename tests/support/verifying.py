"""Rows that decode several tokens at a time and keep some of them, as speculation does, against a plain forward pass.

The text of a row is given: a pass gets the next tokens of it, and garbage behind those that the row will keep.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from support.tiny import VOCAB


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(VOCAB) for _ in range(length))


class VerifiedRows:
    """A batch of a model as it was loaded, whose rows are named by numbers."""

    def __init__(self, folder: Path, *, tolerance: float = 1e-3, **settings: Any) -> None:
        self.backend = MlxGenerationBackend(GenerationSettings("folder", folder, **{"max_rows": 6, **settings}))
        self.facts = self.backend.load()
        loaded = self.backend._loaded
        assert loaded is not None
        assembly, layout = loaded.assembly, loaded.layout
        self.layout = layout
        self.model = assembly.model
        self.store = PrefixStore()
        self.batch, self.prefiller = assembly.make(layout, self.store)
        self.caches: Any = self.batch._caches
        self.tolerance = tolerance
        self._plain, _ = load_model(folder)
        self._texts: dict[int, tuple[int, ...]] = {}
        self._expected: dict[int, Any] = {}
        self.lengths: dict[int, int] = {}
        """Tokens of each row in the caches."""
        self._garbage = random.Random(3)

    def expect(self, tokens: Sequence[int]) -> Any:
        """The logits after each token, of the model as mlx-lm wrote it."""
        found = self._plain(mx.array([list(tokens)]), cache=make_prompt_cache(self._plain))[0]
        return np.array(found.astype(mx.float32))

    def join(self, rows: Mapping[int, tuple[tuple[int, ...], int]], expected: Mapping[int, Any] | None = None) -> None:
        """By name: the text of a row, and how many tokens of it are its prompt."""
        submits = [Generate(name, tokens[:prompt], 9) for name, (tokens, prompt) in rows.items()]
        mx.eval(self.prefiller.prefill([Prefill(submit, 0, len(submit.prompt) - 1) for submit in submits]))
        self.batch.join(*self.prefiller.take([submit.request_id for submit in submits]))
        for name, (tokens, prompt) in rows.items():
            self._texts[name] = tokens
            self._expected[name] = self.expect(tokens) if expected is None else expected[name]
            self.lengths[name] = prompt - 1

    def drop(self, names: set[int]) -> None:
        self.batch.drop(names)
        for name in names:
            del self.lengths[name]

    def forward(self, tokens: mx.array) -> mx.array:
        compiled = self.batch._compiled
        logits = compiled.run(tokens, self.caches, {}) if compiled is not None else None
        return self.batch._forward(tokens, cache=self.caches.layers) if logits is None else logits

    def step(self, length: int, counts: Mapping[int, int]) -> None:
        """One pass: by name, how many of its new tokens each row keeps. Compares the logits after those."""
        inputs = np.array([[self._garbage.randrange(VOCAB) for _ in range(length)] for _ in range(self.caches.size)])
        numbers = {name: number for number, name in enumerate(self.batch._ids) if name is not None}
        for name, number in numbers.items():
            at = self.lengths[name]
            inputs[number, : counts[name]] = self._texts[name][at : at + counts[name]]
        self.caches.begin_step(length)
        logits = self.forward(mx.array(inputs.astype(np.int32)))
        mx.eval(logits)
        kept = [0 if name is None else counts[name] for name in self.batch._ids]
        self.caches.end_step(kept)
        got = np.array(logits.astype(mx.float32))
        assert got.shape[:2] == (self.caches.size, length)
        for name, number in numbers.items():
            at, count = self.lengths[name], counts[name]
            wanted = self._expected[name][at : at + count]
            spread = np.linalg.norm(wanted - wanted.mean(axis=-1, keepdims=True), axis=-1).max()
            difference = np.linalg.norm(got[number, :count] - wanted, axis=-1).max()
            assert difference <= self.tolerance * spread, (name, at, length, count, difference / spread)
            self.lengths[name] += count

    def room(self, name: int) -> int:
        """Tokens of a row's text that are left."""
        return len(self._texts[name]) - self.lengths[name]
