"""The batch: the rows that decode together, and one decode step of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from llguidance import LLMatcher

from millstream.backend.generation.caches.batch_caches import BatchCaches, MergedCaches
from millstream.backend.generation.caches.mixed_caches import MixedCaches
from millstream.backend.generation.caches.traced_step import TracedStep
from millstream.backend.generation.compiled_step import CompiledStep
from millstream.backend.generation.mtp.passes import PassWatch
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.sampling.guides import Compiler, Guides, TokenMask
from millstream.backend.generation.sampling.logprobs import PendingLogprobs, RowLogprobs
from millstream.backend.generation.sampling.minimum import MinimumLengths
from millstream.backend.generation.sampling.penalties import Penalties, wants_penalties
from millstream.backend.generation.sampling.sampler import Sampler, drawing
from millstream.backend.generation.verification import VACANT, DraftedTokens, PassSampling, Verification
from millstream.backend.kernels.outbox import Letter, outbox
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import RowFailure, RowOutput
from millstream.engine.generation.speculation.lengths import LENGTHS
from millstream.engine.prefix_cache.orders import SavePrefix
from millstream.types import Sampling

Forward = Callable[..., mx.array]
Shift = Callable[[Generate], int]
"""How much further the positions of a row are than its tokens (M-RoPE)."""


class Launched:
    """A decode step that the device is computing."""

    def __init__(
        self,
        ids: tuple[int | None, ...],
        tokens: mx.array,
        logprobs: PendingLogprobs | None,
        letter: Letter | None = None,
        due: Sequence[mx.array] = (),
    ) -> None:
        """`letter`: where the tokens are for the host, once they are computed. `due`: what `start` evaluates."""
        self._due = due
        self._ids = ids
        self._tokens = tokens
        self._logprobs = logprobs
        self._letter = letter

    def start(self) -> None:
        """Have the device begin, if it was to wait for this."""
        if self._due:
            mx.async_eval(self._due)  # type: ignore[no-untyped-call]
        self._due = ()

    def read(self, ids: set[int]) -> list[RowOutput]:
        """Wait for the step. Returns its tokens for the rows among `ids`."""
        tokens = self._read_tokens()
        logprobs = {} if self._logprobs is None else self._logprobs.read(tokens)
        return [
            RowOutput(request_id, (token,), (logprobs[index],) if index in logprobs else ())
            for index, (request_id, token) in enumerate(zip(self._ids, tokens, strict=True))
            if request_id is not None and request_id in ids
        ]

    def _read_tokens(self) -> list[int]:
        if self._letter is None:
            tokens: list[int] = self._tokens.tolist()  # type: ignore[assignment]
            return tokens
        mx.eval(self._tokens)
        return self._letter.read(self._tokens.shape[0])


class Batch:
    """Owner only, all of it. A row is a request, its KV cache and its next input token; a slot may be vacant."""

    def __init__(
        self,
        forward: Forward,
        vocab_size: int,
        caches: BatchCaches[Any],
        *,
        kernel: bool = False,
        compiler: Compiler | None = None,
        shift: Shift | None = None,
        compiled: CompiledStep | None = None,
        watch: PassWatch | None = None,
    ) -> None:
        """`kernel`: sample with our CUDA kernel. `compiler`: for rows with a grammar. `shift`: for models with
        M-RoPE. `compiled`: runs forward passes as compiled functions. `watch`: is told of forward passes."""
        self._compiled = compiled
        self._watch = watch
        self._shift = shift
        self._shifts: dict[str, mx.array] = {}
        self._forward = forward
        self._kernel = kernel
        self._vocab_size = vocab_size
        self._rows: list[Generate | None] = []
        self._caches = caches
        self._penalties = Penalties()
        self._guides = Guides(compiler, vocab_size)
        self._minimum = MinimumLengths((), vocab_size)
        self._inputs = mx.zeros((0,), dtype=mx.int32)
        self._positions = mx.zeros((0,), dtype=mx.int32)
        self._due = caches.due
        self._samplings: list[Sampling] = []
        self._sampler = Sampler(())
        self._probe = RowLogprobs(())
        self.ids: set[int] = set()
        self._launches = 0
        self._joined: dict[int, int] = {}
        """How many steps had been launched when a row joined, less the tokens that it gained beyond one per step."""
        self._next: dict[int, int] = {}
        """The next input of rows, where it has been read."""
        self._pass_sampling: dict[int, PassSampling] = {}
        """By the length of a pass, for the rows as they are."""

    def join(self, submits: Sequence[Generate], joining: Sequence[Any]) -> None:
        """Add rows whose prompt is prefilled but for its last token. `joining` are their caches, in the same order."""
        if not submits:
            return
        slots = self._caches.join(joining)
        self._rows += [None] * (self._caches.size - len(self._rows))
        for slot, submit in zip(slots, submits, strict=True):
            self._rows[slot] = submit
            self._joined[submit.request_id] = self._launches
            self._next[submit.request_id] = submit.prompt[-1]
            self._guides.add(submit)
            if wants_penalties(submit.sampling):
                prompt = submit.prompt[: len(submit.prompt) - submit.resumed]
                self._penalties.add(slot, submit.sampling, prompt, self._vocab_size, output=submit.output)
        self._put_inputs(slots, submits)
        self._rows_changed()

    def _put_inputs(self, slots: Sequence[int], submits: Sequence[Generate]) -> None:
        """The next inputs and positions of rows that join, among those that the device has."""
        size = len(self._rows)
        new, inputs, positions = ([0] * size for _ in range(3))
        for slot, submit in zip(slots, submits, strict=True):
            new[slot], inputs[slot], positions[slot] = 1, submit.prompt[-1], submit.resumed
        if grown := size - self._inputs.shape[0]:
            fresh = mx.zeros((grown,), dtype=mx.int32)
            self._inputs = mx.concatenate([self._inputs, fresh])
            self._positions = mx.concatenate([self._positions, fresh])
        sent = [each[:size] if each.shape[0] > size else each for each in self._due.integers(new, inputs, positions)]
        joins = sent[0].astype(mx.bool_)
        self._inputs = mx.where(joins, sent[1], self._inputs)
        self._positions = mx.where(joins, sent[2], self._positions)
        self._due.add(self._inputs, self._positions)

    def keep_vacant(self, allowed: bool) -> None:
        """Whether memory that rows leave may stay vacant for others: see `Plan.tight`."""
        self._caches.keep_vacant(allowed)

    def drop(self, ids: set[int]) -> None:
        if not ids & self.ids:
            return
        self._guides.drop(ids)
        remaining = [slot for slot, row in enumerate(self._rows) if row is not None and row.request_id not in ids]
        occupied = set(remaining)
        rows = [row if slot in occupied else None for slot, row in enumerate(self._rows)]
        sources = self._caches.filter(remaining)  # the old slot of each new one
        if not sources:
            self._inputs = self._positions = mx.zeros((0,), dtype=mx.int32)
        elif sources != list(range(len(rows))):
            (moved,) = self._due.integers([max(0, source) for source in sources])
            moved = moved if moved.shape[0] == len(sources) else moved[: len(sources)]
            self._inputs, self._positions = self._inputs[moved], self._positions[moved]
            self._due.add(self._inputs, self._positions)
        self._penalties.filter([slot if slot in occupied else -1 for slot in sources])
        self._rows = [rows[slot] if slot >= 0 else None for slot in sources]
        for request_id in ids & self.ids:
            del self._joined[request_id]
            self._next.pop(request_id, None)
        self._rows_changed()
        if not self.ids:
            self._due.send()  # no step follows, and what is due may hold memory

    def save(self, order: SavePrefix, store: PrefixStore) -> list[mx.array] | None:
        """Save a prefix of a row to `store`. Returns the arrays to evaluate; None if the row is not at the token that
        a checkpoint is for, or has not computed all of the tokens: one that has just joined lacks its last one."""
        computed = self._tokens_in_cache(order.request_id)
        if computed < order.tokens or (order.checkpoint is not None and computed != order.tokens):
            return None
        return self._caches.save(self._ids.index(order.request_id), order, store)

    def _tokens_in_cache(self, request_id: int) -> int:
        row = self._rows[self._ids.index(request_id)]
        assert row is not None
        return len(row.prompt) - 1 + self._launches - self._joined[request_id]

    @property
    def nbytes(self) -> int:
        """Bytes of its KV cache."""
        return self._caches.nbytes

    @property
    def size(self) -> int:
        """Rows of a plain pass, including vacant ones."""
        return self._caches.size

    def states(self, index: int) -> list[mx.array | None]:
        """What the recurrent layers of a row keep. None of mlx-lm's own caches."""
        if not isinstance(self._caches, MixedCaches):
            return []
        return [state for layer in self._caches.states.row(index) for state in layer.cache]

    @property
    def can_be_compiled(self) -> bool:
        """True if its steps can be traced."""
        return isinstance(self._caches, TracedStep)

    @property
    def guided(self) -> bool:
        """True if a row has a grammar, or its next token may be forced: a step then needs `guide` between `forward` and
        `launch`."""
        return bool(self._guides)

    @property
    def supports_length(self) -> bool:
        """True if its rows can verify drafts now."""
        return self._shift is None and self._caches.supports_length

    @property
    def no_drafts(self) -> str | None:
        """Why its rows can never verify drafts; None if they can, at least at times."""
        if self._shift is not None:
            return "its positions depend on media (M-RoPE)"
        if self._caches.supports_length or isinstance(self._caches, MergedCaches):
            return None
        return "its KV caches take one token per row and step"

    def matcher(self, request_id: int) -> LLMatcher | None:
        """Of a row with a grammar: it has consumed all tokens that were read, after `catch_up` or a verification."""
        return self._guides.matcher(request_id)

    def forward(self) -> mx.array:
        """The first half of a step: its logits, not yet evaluated."""
        self._launches += 1
        self._caches.begin_step()
        logits = None
        if self._compiled is not None:
            logits = self._compiled.run(self._inputs, self._caches, self._shifts)
        if logits is None:
            logits = self._forward(self._inputs[:, None], cache=self._caches.layers, **self._shifts)[:, -1, :]
        self._caches.end_step()
        if self._watch is not None:
            self._watch.ran(self._ids)
        return logits

    def given_tokens(self, tokens: mx.array, counts: Sequence[int]) -> mx.array:
        """For trials: the logits of a pass of these tokens, (rows, length), in the place of the rows' own; row number i
        keeps `counts[i]` of them."""
        self._caches.begin_step(tokens.shape[1])
        logits = None
        if self._compiled is not None:
            logits = self._compiled.run(tokens, self._caches, self._shifts)
        if logits is None:
            logits = self._forward(tokens, cache=self._caches.layers, **self._shifts)
        mx.eval(logits)
        self._caches.end_step(counts)
        return logits

    def read(self, rows: Sequence[RowOutput]) -> None:
        """The tokens of a plain step were read."""
        self._guides.read(rows)

    def catch_up(self, rows: Sequence[RowOutput]) -> list[RowFailure]:
        """Advance the grammars by the tokens of the last step, before drafts are made. Returns the rows that cannot
        follow their grammar."""
        self._next.update((row.request_id, row.tokens[-1]) for row in rows)
        return self._guides.catch_up(rows)

    def verify(self, drafts: Mapping[int, Sequence[int]]) -> list[RowOutput]:
        """`launch_drafts` and its result at once; for callers that have no grammars."""
        launched, _ = self.launch_drafts(drafts)
        return [] if launched is None else launched.read()[0]

    def launch_drafts(self, drafts: Mapping[int, Sequence[int]]) -> tuple[Verification | None, list[RowFailure]]:
        """Launch a pass that verifies these drafts; no step may be pending. Rows without a draft gain one token. None
        if the grammars leave nothing of the drafts: then a plain step is due. Also returns the rows that cannot
        follow their grammar."""
        drafts = {row: self._known(draft) for row, draft in drafts.items() if row in self.ids}
        indices = {row.request_id: slot for slot, row in enumerate(self._rows) if row is not None}
        followed, failed = self._guides.follow(drafts)
        if not followed.drafts:
            return None, failed
        drafted = DraftedTokens(followed.drafts, indices, len(self._rows))
        length = drafted.length
        if length not in self._pass_sampling:
            self._pass_sampling[length] = PassSampling(self._rows, length, self._vocab_size, kernel=self._kernel)
        inputs, positions = self._pass_inputs(drafted), self._counted_positions()
        self._launches += 1
        self._caches.begin_step(length)
        logits = None
        if self._compiled is not None:
            logits = self._compiled.run(inputs, self._caches, self._shifts)
        if logits is None:
            logits = self._forward(inputs, cache=self._caches.layers, **self._shifts)
        if self._watch is not None:
            self._watch.ran(self._ids, length)
        tokens, logprobs = self._pass_sampling[length](
            logits, inputs[:, 1:], positions, self._penalties, followed.mask(indices, length)
        )
        mx.async_eval(tokens, *(logprobs.arrays if logprobs else ()))  # type: ignore[no-untyped-call]
        return Verification(self._ids, drafted, tokens, logprobs, self._commit), failed

    def _pass_inputs(self, drafted: DraftedTokens) -> mx.array:
        """The tokens of a pass. From what was read, if all of it was: then every pass is the same operations, which MLX
        has as CUDA graphs, and nothing is computed before it."""
        if not self.ids <= self._next.keys():
            drafts = mx.array(drafted.padded, dtype=mx.int32)
            return mx.concatenate([self._inputs[:, None], drafts], axis=1)
        following = [0 if row is None else self._next[row.request_id] for row in self._rows]
        tokens = [[first, *draft] for first, draft in zip(following, drafted.padded, strict=True)]
        return mx.array(tokens, dtype=mx.int32)

    def _counted_positions(self) -> mx.array:
        """How many output tokens each row has in its steps so far, as plain steps count on the device."""
        counts = [
            0 if row is None else row.resumed + self._launches - self._joined[row.request_id] for row in self._rows
        ]
        return mx.array(counts, dtype=mx.int32)

    def _known(self, draft: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a draft before the first that the model does not have: a tokenizer may have more."""
        first = next((n for n, token in enumerate(draft) if not 0 <= token < self._vocab_size), len(draft))
        return tuple(draft[: min(first, LENGTHS[-1] - 1)])

    def _commit(self, gained: Sequence[Sequence[int]], rows: Sequence[RowOutput]) -> list[RowFailure]:
        """Keep what each row has gained, and nothing of the rest of its draft."""
        counts = [len(tokens) for tokens in gained]
        self._caches.end_step(counts)
        if self._watch is not None:
            self._watch.kept(counts)
        for row in rows:
            self._joined[row.request_id] -= len(row.tokens) - 1
            self._next[row.request_id] = row.tokens[-1]
        self._inputs = mx.array([tokens[-1] for tokens in gained], dtype=mx.int32)
        self._positions = self._counted_positions()
        self._penalties.count_tokens(gained)
        self._guides.read(rows)
        return self._guides.catch_up(rows)

    def guide(self, rows: Sequence[RowOutput]) -> tuple[TokenMask | None, list[RowFailure]]:
        """Advance the grammars by the tokens of the last step. Returns the mask for the next tokens, and the rows that
        cannot follow their grammar."""
        slots = {row.request_id: slot for slot, row in enumerate(self._rows) if row is not None}
        return self._guides.advance(rows, slots)

    def launch(self, logits: mx.array, mask: TokenMask | None = None, *, later: bool = False) -> Launched:
        """The second half: sample. Returns without waiting; the tokens feed the next step on the device. `later`: the
        device begins with `Launched.start`."""
        penalised = self._minimum(self._penalties.apply(logits), self._positions)
        letter = None
        if mask is None:
            box = outbox() if self._sampler.by_kernel else None
            letter = None if box is None else box.take(len(self._rows))
            tokens, self._positions = self._sampler.step(penalised, self._positions, letter)
        else:
            masked = mask.apply(penalised)
            drawn, self._positions = self._sampler.step(masked, self._positions)
            tokens = mask.replace_forbidden(masked, drawn)
        self._penalties.count(tokens)
        logprobs = self._probe(logits, tokens) if self._probe else None
        self._inputs = tokens
        self._next.clear()
        arrays = [tokens, self._positions, *(logprobs.arrays if logprobs else ()), *self._due.take_with_step()]
        if not later:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        return Launched(self._ids, tokens, logprobs, letter, arrays if later else ())

    def _rows_changed(self) -> None:
        """Rebuild what depends on the rows: once per change, not per step."""
        if self._shift is not None:
            shifts = [0 if row is None else self._shift(row) for row in self._rows]
            self._shifts = {"rope_deltas": mx.array(shifts, dtype=mx.int32)} if any(shifts) else {}
        self._ids = tuple(None if row is None else row.request_id for row in self._rows)
        self.ids = {row.request_id for row in self._rows if row is not None}
        samplings = [VACANT if row is None else drawing(row.sampling) for row in self._rows]
        if samplings != self._samplings:
            self._samplings = samplings
            self._sampler = Sampler(samplings, kernel=self._kernel)
            self._due.add(*self._sampler.arrays)
        self._pass_sampling = {}
        self._minimum = MinimumLengths(self._rows, self._vocab_size)
        self._probe = RowLogprobs([None if row is None else row.logprobs for row in self._rows])
