"""Grammars of the rows that have one: which tokens each may take next.

A mask needs the token before it, and a step is launched before the last one's tokens are read. So the logits of a step
are launched first, and its masks are made while the device computes them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from millstream.engine.background import BackgroundTask
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import RowFailure, RowOutput
from millstream.errors import BadRequest, ModelError
from millstream.types import Grammar

PARALLEL = 8
"""From so many rows on, their masks are worth several threads."""

CANNOT = "the answer cannot follow its grammar"

_OFF = float("-inf")


class Compiler(Protocol):
    """Makes matchers for the model's vocabulary: see `text.grammar.GrammarCompiler`."""

    @property
    def vocab_size(self) -> int: ...

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Any thread. Have all ready for matchers, of this grammar as well. Raises as `matcher` does."""
        ...

    def knows(self, grammar: Grammar) -> bool:
        """Whether a matcher would be made at once."""
        ...

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A fresh one. Raises `ValueError` or `ModelError` if there can be none."""
        ...

    def forget(self, grammar: Grammar) -> None:
        """A matcher of this grammar has failed, and others share what made it fail."""
        ...


def preparing(compiler: Compiler | None, grammar: Grammar | None) -> BackgroundTask | None:
    """What to do before a request with this grammar gets a row: compiling a large one takes some 20 ms, and all rows
    would wait. For None, the vocabulary alone: to build it takes a second, in which no thread of this process runs
    Python, so that is best done before there are rows. Nothing of MLX is held."""
    if compiler is None or (grammar is not None and compiler.knows(grammar)):
        return None
    size = len(grammar.source) if grammar is not None else 0
    return BackgroundTask(functools.partial(_prepare, compiler, grammar), size)


def _prepare(compiler: Compiler, grammar: Grammar | None) -> None:
    try:
        compiler.prepare(grammar)
    except ValueError as error:
        raise BadRequest(f"{CANNOT}: {error}") from error
    except ModelError as error:
        raise ModelError(f"{CANNOT}: {error}") from error


class Mask:
    """What some rows may take in one step; all others are left as they are."""

    def __init__(self, places: Sequence[int], bits: NDArray[np.uint8], vocab_size: int) -> None:
        """`bits` (rows, bytes): the lowest bit of the first byte is the first token."""
        self._places = mx.array(list(places), dtype=mx.int32)
        each = mx.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=mx.uint8)
        allowed = (mx.array(bits)[:, :, None] & each) != 0
        self._allowed = allowed.reshape(len(places), -1)[:, :vocab_size]

    def apply(self, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        logits[self._places] = mx.where(self._allowed, logits[self._places], _OFF)
        return logits

    def hold(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """`tokens`, drawn from masked `logits`. A GPU adds in parallel, so a sum of weights may shrink by a rounding,
        and a draw that falls exactly there can hit a neighbour: then the best token stands."""
        drawn = tokens[self._places]
        best = mx.argmax(logits[self._places], axis=-1).astype(tokens.dtype)
        fits = mx.take_along_axis(self._allowed, drawn[:, None], axis=-1)[:, 0]
        tokens[self._places] = mx.where(fits, drawn, best)
        return tokens


class Guides:
    """Owner only. One matcher a row that has a grammar and still lives by it."""

    def __init__(self, compiler: Compiler | None, vocab_size: int) -> None:
        """`vocab_size`: of the logits, which may be more or fewer than the tokenizer's tokens."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._new: dict[int, Generate] = {}
        self._matchers: dict[int, tuple[Generate, LLMatcher]] = {}
        self._threads: LLExecutor | None = None

    def __bool__(self) -> bool:
        return bool(self._new or self._matchers)

    def add(self, submit: Generate) -> None:
        """Its matcher is made while the device computes the row's first logits: at once if it was prepared."""
        if submit.grammar is not None:
            self._new[submit.request_id] = submit

    def drop(self, ids: set[int]) -> None:
        for request_id in ids:
            self._new.pop(request_id, None)
            self._matchers.pop(request_id, None)

    def follow(self, rows: Sequence[RowOutput], places: Mapping[int, int]) -> tuple[Mask | None, list[RowFailure]]:
        """Tell the matchers what their rows took, and begin with new ones: what each may take next, and who cannot go
        on. These are free from now on; the owner drops them. `places`: where each row is in the batch."""
        failed = self._begin() + self._advance(rows)
        if not self._matchers:
            return None, failed
        bits = self._fill([matcher for _, matcher in self._matchers.values()])
        living = []
        for number, (request_id, (_, matcher)) in enumerate(list(self._matchers.items())):
            if matcher.is_error() or not bits[number].any():
                failed.append(self._fail(request_id))
            else:
                living.append((number, places[request_id]))
        if not living:
            return None, failed
        numbers, where = zip(*living, strict=True)
        return Mask(where, bits[list(numbers)], self._vocab_size), failed

    def _begin(self) -> list[RowFailure]:
        failed = []
        for request_id, submit in self._new.items():
            assert submit.grammar is not None
            try:
                if self._compiler is None:
                    raise ModelError("this engine has no tokenizer")
                self._matchers[request_id] = (submit, self._compiler.matcher(submit.grammar))
            except (ValueError, ModelError) as error:
                refused = isinstance(error, ValueError)
                failed.append(RowFailure(request_id, f"{CANNOT}: {error}", refused))
        self._new.clear()
        return failed

    def _advance(self, rows: Sequence[RowOutput]) -> list[RowFailure]:
        failed = []
        for row in rows:
            if row.request_id not in self._matchers:
                continue
            submit, matcher = self._matchers[row.request_id]
            if any(token in submit.stop_tokens for token in row.tokens):
                del self._matchers[row.request_id]
            elif not matcher.consume_tokens(list(row.tokens)):
                failed.append(self._fail(row.request_id))
        return failed

    def _fail(self, request_id: int) -> RowFailure:
        submit, matcher = self._matchers.pop(request_id)
        said = matcher.get_error().strip().split("\n", 1)[0] or "no token of this model can come next"
        if self._compiler is not None and submit.grammar is not None:
            self._compiler.forget(submit.grammar)
        return RowFailure(request_id, f"{CANNOT}: {said}", refused=True)

    def _fill(self, matchers: Sequence[LLMatcher]) -> NDArray[np.uint8]:
        """One line of bits a matcher, as long as the logits: tokens that the tokenizer lacks are never taken."""
        assert self._compiler is not None
        words = np.zeros((len(matchers), -(-self._compiler.vocab_size // 32)), dtype=np.int32)
        if len(matchers) < PARALLEL:
            for number, matcher in enumerate(matchers):
                fill_next_token_bitmask(matcher, words, number)
        else:
            self._threads = self._threads or LLExecutor()
            fill_next_token_bitmask_par(self._threads, [(matcher, n) for n, matcher in enumerate(matchers)], words)
        known = words.view(np.uint8)
        bits = np.zeros((len(matchers), -(-self._vocab_size // 8)), dtype=np.uint8)
        width = min(known.shape[1], bits.shape[1])
        bits[:, :width] = known[:, :width]
        return bits
