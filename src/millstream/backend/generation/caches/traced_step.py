"""A decode step as a function of arrays, so that `mx.compile` can trace it once and run it many times.

What layers read and write in a step is reached through references: arrays are taken from them, tracers are put in their
place while a step is traced, and the new arrays after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.pass_shape import PassShape

Ref = tuple[Any, str | int]
"""Where an array is: an object and the name of its attribute, or a list and an index."""


def read_refs(refs: Sequence[Ref]) -> list[mx.array]:
    return [owner[key] if isinstance(key, int) else getattr(owner, key) for owner, key in refs]


def write_refs(refs: Sequence[Ref], arrays: Sequence[mx.array]) -> None:
    for (owner, key), array in zip(refs, arrays, strict=True):
        if isinstance(key, int):
            owner[key] = array
        else:
            setattr(owner, key, array)


class TracedStep:
    """Base of batch caches whose steps can be traced, between `begin_step` and `end_step`:

        arrays = caches.step_arrays()
        function(tokens, arrays): caches.bind(arrays); logits = model(tokens, cache=caches.layers);
                                  return logits, caches.results()
        caches.commit(the results that the function gave)

    The same function may run every step with the same `step_key`. If tracing raises, `bind(arrays)` with the arrays of
    `step_arrays` puts everything back.
    """

    layers: list[Any]
    shape: PassShape
    """Of the step that `begin_step` has prepared."""
    _begun: Sequence[mx.array] = ()

    @property
    def size(self) -> int:
        """Rows of a plain step, including vacant ones."""
        raise NotImplementedError

    def step_key(self) -> Hashable | None:
        """All that a step depends on besides its arrays and their shapes; None if it cannot be traced."""
        raise NotImplementedError

    def step_refs(self) -> list[Ref]:
        """The arrays that a step reads."""
        raise NotImplementedError

    def result_refs(self) -> list[Ref]:
        """Those of them that a step replaces. Kernels that write in place replace none."""
        raise NotImplementedError

    def forget_step(self) -> None:
        """Drop what layers keep of a step: they may be tracers."""
        raise NotImplementedError

    def step_arrays(self) -> list[mx.array]:
        """What a step reads."""
        arrays = read_refs(self.step_refs())
        self._begun = arrays
        return list(arrays)

    def bind(self, arrays: Sequence[mx.array]) -> None:
        """Have the layers read these in the place of those that `step_arrays` gave."""
        write_refs(self.step_refs(), arrays)

    def results(self) -> list[mx.array]:
        """The arrays that a step has replaced, after the forward pass."""
        return read_refs(self.result_refs())

    def commit(self, arrays: Sequence[mx.array]) -> None:
        """End a step that ran as a function, whose results are `arrays`."""
        self.bind(self._begun)
        write_refs(self.result_refs(), arrays)
        self.forget_step()
        self._begun = ()
