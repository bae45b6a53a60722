"""What rows may sample next: masks from their grammars, and the tokens that close a reasoning beyond its limit.

A mask depends on the previous token, and a step is launched before the tokens of the previous one are read. So the
logits of a step are launched first, and its masks are computed while the device works on them.
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
from millstream.types import Grammar, ReasoningLimit

PARALLEL_ROWS = 8
"""With at least so many rows, computing masks on several threads pays."""

GRAMMAR_ERROR = "the output cannot follow its grammar"

_FORBIDDEN = float("-inf")


class Watch(Protocol):
    """Follows a row's reasoning: see `text.output.parser.ReasoningWatch`."""

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must come next; none if the model chooses."""
        ...

    @property
    def over(self) -> bool: ...

    @property
    def due(self) -> bool:
        """True if the next token must be read before the one after it is sampled."""
        ...

    def push(self, tokens: Sequence[int]) -> None: ...

    def room(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft may be verified."""
        ...


class Compiler(Protocol):
    """Compiles grammars to matchers over the model's vocabulary: see `text.grammar.GrammarCompiler`."""

    @property
    def vocab_size(self) -> int: ...

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Any thread. Build the vocabulary, and compile this grammar, if given. Raises as `matcher` does."""
        ...

    def knows(self, grammar: Grammar) -> bool:
        """Whether `matcher` returns without compiling."""
        ...

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A new matcher. Raises `ValueError` if the grammar, or `ModelError` if the model, does not allow one."""
        ...

    def forget(self, grammar: Grammar) -> None:
        """Drop the compiled grammar: one of its matchers failed, and others share the state that made it fail."""
        ...

    @property
    def reads_text(self) -> bool:
        """Whether `watch` returns without loading anything."""
        ...

    def prepare_watch(self) -> None:
        """Any thread. Raises as `watch` does."""
        ...

    def watch(self, limit: ReasoningLimit) -> Watch:
        """For a new row. Raises `ModelError` if the model has no tokenizer that can be loaded."""
        ...


def prepare_vocabulary(compiler: Compiler | None) -> BackgroundTask | None:
    """A task that builds the vocabulary. It takes a second in which no thread of this process runs Python, so it is
    best done before there are rows."""
    return None if compiler is None else BackgroundTask(functools.partial(_prepare, compiler, None))


def prepare_guides(compiler: Compiler | None, request: Generate) -> BackgroundTask | None:
    """A task that compiles the grammar of a request, or loads what follows its reasoning, before it gets a row. None if
    there is nothing to do. It touches nothing of MLX.

    Compiling a large grammar takes about 20 ms, and all rows would wait.
    """
    if compiler is None:
        return None
    grammar = request.grammar
    if grammar is not None and not compiler.knows(grammar):
        return BackgroundTask(functools.partial(_prepare, compiler, grammar), len(grammar.source))
    if request.reasoning is not None and not compiler.reads_text:
        return BackgroundTask(compiler.prepare_watch)
    return None


def _prepare(compiler: Compiler, grammar: Grammar | None) -> None:
    try:
        compiler.prepare(grammar)
    except ValueError as error:
        raise BadRequest(f"{GRAMMAR_ERROR}: {error}") from error
    except ModelError as error:
        raise ModelError(f"{GRAMMAR_ERROR}: {error}") from error


class TokenMask:
    """The tokens that some rows may sample in one step; all other rows are unrestricted."""

    def __init__(self, indices: Sequence[int], bits: NDArray[np.uint8], vocab_size: int) -> None:
        """`indices`: of the rows in the batch. `bits` (rows, bytes): the lowest bit of the first byte is token 0."""
        self._indices = mx.array(list(indices), dtype=mx.int32)
        bit_values = mx.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=mx.uint8)
        allowed = (mx.array(bits)[:, :, None] & bit_values) != 0
        self._allowed = allowed.reshape(len(indices), -1)[:, :vocab_size]

    def apply(self, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        logits[self._indices] = mx.where(self._allowed, logits[self._indices], _FORBIDDEN)
        return logits

    def replace_forbidden(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """Replace forbidden `tokens`, sampled from masked `logits`, by the best allowed ones. They occur because a GPU
        sums in parallel: a rounded sum of probabilities may shrink, and a sample just there hits a neighbour."""
        sampled = tokens[self._indices]
        best = mx.argmax(logits[self._indices], axis=-1).astype(tokens.dtype)
        allowed = mx.take_along_axis(self._allowed, sampled[:, None], axis=-1)[:, 0]
        tokens[self._indices] = mx.where(allowed, sampled, best)
        return tokens


class Followed:
    """Drafts that every row may follow, and the masks of rows with a grammar along them."""

    def __init__(
        self, drafts: dict[int, tuple[int, ...]], masks: Mapping[int, NDArray[np.uint8]], vocab_size: int
    ) -> None:
        """`masks`: one more than the row's draft has tokens."""
        self.drafts = drafts
        self._masks = masks
        self._vocab_size = vocab_size

    def mask(self, indices: Mapping[int, int], length: int) -> TokenMask | None:
        """For a pass of `length` tokens per row: its logits are those of the batch's rows, each `length` times."""
        if not self._masks:
            return None
        places = [indices[row] * length + place for row, bits in self._masks.items() for place in range(len(bits))]
        return TokenMask(places, np.concatenate(list(self._masks.values())), self._vocab_size)


class Guides:
    """Owner only. The matchers of rows with a grammar, one per row, until its stop token; and what watches a
    reasoning that is limited, for as long as there may be some. Where both have a say, the grammar decides."""

    def __init__(self, compiler: Compiler | None, vocab_size: int) -> None:
        """`vocab_size`: the length of the logits, which may be more or less than the tokenizer's vocabulary."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._new: dict[int, Generate] = {}
        self._matchers: dict[int, tuple[Generate, LLMatcher]] = {}
        self._watches: dict[int, Watch] = {}
        self._executor: LLExecutor | None = None

    def __bool__(self) -> bool:
        """True if the next step needs `advance`."""
        return bool(self._new or self._matchers) or any(watch.due for watch in self._watches.values())

    def add(self, submit: Generate) -> None:
        """Add a row. Its matcher is created while the device computes the row's first logits."""
        if submit.grammar is not None:
            self._new[submit.request_id] = submit
        if submit.reasoning is not None:
            if self._compiler is None:
                raise ModelError("this engine has no tokenizer, which a limit of the reasoning needs")
            watch = self._watches[submit.request_id] = self._compiler.watch(submit.reasoning)
            watch.push(submit.output)

    def drop(self, ids: set[int]) -> None:
        for request_id in ids:
            self._new.pop(request_id, None)
            self._matchers.pop(request_id, None)
            self._watches.pop(request_id, None)

    def read(self, rows: Sequence[RowOutput]) -> None:
        """Rows have gained these tokens, each of which comes here once."""
        if not self._watches:
            return
        for row in rows:
            if (watch := self._watches.get(row.request_id)) is not None:
                watch.push(row.tokens)
                if watch.over:
                    del self._watches[row.request_id]

    def advance(
        self, rows: Sequence[RowOutput], indices: Mapping[int, int]
    ) -> tuple[TokenMask | None, list[RowFailure]]:
        """Create matchers of new rows and feed the others the tokens of their rows. Returns the mask of the next step,
        and the rows that cannot continue: these are unrestricted from now on, until the owner drops them.

        `indices`: of the rows in the batch, by request id.
        """
        failed = self.catch_up(rows)
        allowed: dict[int, NDArray[np.uint8]] = {}
        bits = self._bitmasks([matcher for _, matcher in self._matchers.values()]) if self._matchers else ()
        for (request_id, (_, matcher)), mask in zip(list(self._matchers.items()), bits, strict=True):
            if matcher.is_error() or not mask.any():
                failed.append(self._fail(request_id))
            else:
                allowed[request_id] = mask
        allowed |= self._forced()
        if not allowed:
            return None, failed
        row_indices = [indices[request_id] for request_id in allowed]
        return TokenMask(row_indices, np.stack(list(allowed.values())), self._vocab_size), failed

    def catch_up(self, rows: Sequence[RowOutput]) -> list[RowFailure]:
        """Create matchers of new rows and feed the others the tokens of their rows. Returns the rows that cannot
        continue."""
        return self._create_matchers() + self._consume(rows)

    def matcher(self, request_id: int) -> LLMatcher | None:
        """Of a row: it has consumed all tokens that were read. None if the row has no grammar, or has ended."""
        found = self._matchers.get(request_id)
        return None if found is None else found[1]

    def follow(self, drafts: Mapping[int, Sequence[int]]) -> tuple[Followed, list[RowFailure]]:
        """What becomes of drafts: those of rows with a grammar are cut where it does not allow them, or where nothing
        could come next, and before a stop token, since what comes after one has no grammar; where the reasoning is
        limited, before it may be closed. Also returns the rows that cannot continue."""
        failed: list[RowFailure] = []
        cut = {request_id: tuple(draft) for request_id, draft in drafts.items()}
        for request_id, watch in self._watches.items():
            if draft := cut.get(request_id):
                cut[request_id] = draft[: watch.room(draft)]
        masks: dict[int, NDArray[np.uint8]] = {}
        for request_id, (submit, matcher) in list(self._matchers.items()):
            found = self._bitmasks([matcher])
            if matcher.is_error() or not found.any():
                failed.append(self._fail(request_id))
                cut.pop(request_id, None)
                continue
            draft = cut.get(request_id, ())
            stop = next((place for place, token in enumerate(draft) if token in submit.stop_tokens), len(draft))
            draft = draft[: matcher.validate_tokens(list(draft[:stop]))] if stop else ()
            masks[request_id], cut[request_id] = self._along(matcher, draft, found)
        masks |= {request_id: mask[None] for request_id, mask in self._forced().items()}
        return Followed({each: draft for each, draft in cut.items() if draft}, masks, self._vocab_size), failed

    def _along(
        self, matcher: LLMatcher, draft: tuple[int, ...], first: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """The bitmasks before each token of a draft and after the last, and the draft as far as it can be followed. A
        copy of the matcher follows it, so nothing is taken back."""
        masks = [first]
        if not draft:
            return first, draft
        follower = matcher.deep_copy()
        for count, token in enumerate(draft):
            after = self._bitmasks([follower]) if follower.consume_token(token) else None
            if after is None or follower.is_error() or not after.any():
                draft = draft[:count]
                break
            masks.append(after)
        return np.concatenate(masks), draft

    def _forced(self) -> dict[int, NDArray[np.uint8]]:
        """For rows of which the next token is forced, a bitmask of this one alone."""
        masks: dict[int, NDArray[np.uint8]] = {}
        for request_id, watch in self._watches.items():
            forced, matcher = list(watch.forced), self.matcher(request_id)
            if forced and (matcher is None or matcher.validate_tokens(forced) == len(forced)):
                mask = masks[request_id] = np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
                mask[forced[0] // 8] = 1 << (forced[0] % 8)
        return masks

    def _create_matchers(self) -> list[RowFailure]:
        failed = []
        for request_id, submit in self._new.items():
            assert submit.grammar is not None
            try:
                if self._compiler is None:
                    raise ModelError("this engine has no tokenizer, which structured output needs")
                matcher = self._compiler.matcher(submit.grammar)
                self._matchers[request_id] = (submit, matcher)
                # A row that was preempted goes on where it was.
                if submit.resumed and not matcher.consume_tokens(list(submit.output)):
                    failed.append(self._fail(request_id))
            except (ValueError, ModelError) as error:
                refused = isinstance(error, ValueError)
                failed.append(RowFailure(request_id, f"{GRAMMAR_ERROR}: {error}", refused))
        self._new.clear()
        return failed

    def _consume(self, rows: Sequence[RowOutput]) -> list[RowFailure]:
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
        reason = matcher.get_error().strip().split("\n", 1)[0] or "the model has no token that may come next"
        if self._compiler is not None and submit.grammar is not None:
            self._compiler.forget(submit.grammar)
        return RowFailure(request_id, f"{GRAMMAR_ERROR}: {reason}", refused=True)

    def _bitmasks(self, matchers: Sequence[LLMatcher]) -> NDArray[np.uint8]:
        """One bitmask per matcher, as long as the logits: tokens that the tokenizer lacks are forbidden."""
        assert self._compiler is not None
        words = np.zeros((len(matchers), -(-self._compiler.vocab_size // 32)), dtype=np.int32)
        if len(matchers) < PARALLEL_ROWS:
            for number, matcher in enumerate(matchers):
                fill_next_token_bitmask(matcher, words, number)
        else:
            self._executor = self._executor or LLExecutor()
            fill_next_token_bitmask_par(self._executor, [(matcher, n) for n, matcher in enumerate(matchers)], words)
        filled = words.view(np.uint8)
        bits = np.zeros((len(matchers), -(-self._vocab_size // 8)), dtype=np.uint8)
        width = min(filled.shape[1], bits.shape[1])
        bits[:, :width] = filled[:, :width]
        return bits
