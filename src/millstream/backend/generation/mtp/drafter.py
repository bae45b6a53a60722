"""Drafts by a head for multi-token prediction, for all rows at once, on the engine's own thread and stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.mtp.head import MtpHead
from millstream.backend.generation.mtp.head_cache import SLACK, WINDOW, HeadCache
from millstream.backend.generation.mtp.hidden_states import HiddenStates
from millstream.backend.generation.mtp.passes import Follow, Pairs, Passes
from millstream.backend.generation.sampling.sampler import Sampler
from millstream.engine.generation.messages import Generate
from millstream.types import Sampling

PROMPT_TOKENS = 512
"""The last tokens of a prompt that a head reads: so it costs a prompt the same however long that is."""
DEEPEST = 16

assert PROMPT_TOKENS <= WINDOW - SLACK


@dataclass(slots=True)
class _Row:
    submit: Generate
    slot: int
    joined: int
    """The pass after which it joined."""
    output: list[int] = field(default_factory=list)
    """The tokens that it has generated since then."""
    read: int = 0
    """How many of them the head has read."""


class MtpDrafter:
    """Owner only. See `Drafter`, `PassWatch` and `PromptWatch`.

    A head reads pairs: a hidden state of the target, and the token that the target chose there. From the last pair it
    drafts one token; with that token and its own hidden state it goes on. What it has written for its own tokens is not
    kept: the next proposal overwrites it with what the target made of them.
    """

    name = "mtp"
    cheap = False

    def __init__(self, head: MtpHead, hidden: HiddenStates) -> None:
        self._head = head
        self.hidden = hidden
        self._passes = Passes(hidden)
        self._cache = HeadCache()
        self._rows: dict[int, _Row] = {}
        self._prompts: dict[int, tuple[Generate, KVCache]] = {}
        self._samplers: tuple[tuple[int, ...], Sampler] = ((), Sampler(()))

    @property
    def nbytes(self) -> int:
        """Bytes of its KV caches."""
        prompts: int = sum(cache.nbytes for _, cache in self._prompts.values())
        return self._cache.nbytes + prompts

    # The batch's passes.

    def ran(self, ids: tuple[int | None, ...], length: int = 1) -> None:
        self._passes.ran(ids, length)

    def kept(self, counts: Sequence[int]) -> None:
        self._passes.kept(counts)

    # Prompts.

    def take(self) -> mx.array | None:
        return self.hidden.take()

    def read(self, submit: Generate, start: int, end: int, hidden: mx.array | None) -> list[mx.array]:
        """A chunk of a prompt: the tokens that follow its hidden states are known. Costs one block for a few tokens."""
        first = max(start, len(submit.prompt) - 1 - PROMPT_TOKENS)
        # Media, and prompts that are read in part, have other hidden states than tokens.
        whole = hidden is not None and hidden.shape[1] >= end - start and not submit.media
        if hidden is None or not whole or not submit.speculate or submit.max_tokens < 2 or end <= first:
            return []
        hidden = hidden[:, first - start : end - start]
        tokens = submit.prompt[first + 1 : end + 1]
        cache = self._prompt(submit) or KVCache()
        self._prompts[submit.request_id] = (submit, cache)
        mask = create_attention_mask(hidden, cache, return_array=True)
        self._head(mx.array([tokens], dtype=mx.int32), hidden, mask, cache)
        return [cache.keys, cache.values]

    def forget(self, request_id: int) -> None:
        self._prompts.pop(request_id, None)

    def _prompt(self, submit: Generate) -> KVCache | None:
        """What was read of a prompt; not of another that had the same number."""
        known, cache = self._prompts.get(submit.request_id, (submit, None))
        return cache if known.prompt is submit.prompt else None

    # Rows.

    def join(self, submit: Generate) -> None:
        prompt = self._prompt(submit)
        self.forget(submit.request_id)
        parts = () if prompt is None else [part[..., : prompt.offset, :] for part in (prompt.keys, prompt.values)]
        slot = self._cache.join(parts)
        self._rows[submit.request_id] = _Row(submit, slot, self._passes.count)

    def drop(self, ids: set[int]) -> None:
        for request_id in ids & self._rows.keys():
            self._cache.leave(self._rows.pop(request_id).slot)
        if not self._rows:
            self._passes.clear()

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        if request_id in self._rows:
            self._rows[request_id].output += tokens

    def warm_up(self) -> None:
        """Draft for a few rows that do not exist: a GPU compiles kernels when they are first used."""
        for rows in (1, 3):
            submits = [Generate(number, (0, 0), 99, Sampling(temperature=0.5 * (number % 2))) for number in range(rows)]
            for submit in submits:
                self.join(submit)
            for length in (1, 3):
                self.hidden.put(self._head.embed(mx.zeros((rows, length), dtype=mx.int32)))
                self.ran(tuple(range(rows)), length)
                self.kept([1 + number % length for number in range(rows)])
                for number in range(rows):
                    self.commit(number, (0,) * (1 + number % length))
                self.propose(dict.fromkeys(range(rows), 3))
            self.drop(set(range(rows)))

    def detach(self) -> int:
        """Keep no hidden states any more. Returns the bytes of its weights."""
        self.hidden.remove()
        self.clear()
        return sum(value.nbytes for _, value in tree_flatten(self._head.parameters()))

    def clear(self) -> None:
        """Forget everything: after a failed step."""
        self._rows.clear()
        self._prompts.clear()
        self._passes.clear()
        self._cache = HeadCache()

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Reads what the target has made of these rows since the last time, then drafts. Waits for the tokens."""
        known = {each: self._rows[each] for each in wanted if each in self._rows}
        follow = {each: Follow(row.joined, len(row.output), row.read) for each, row in known.items()}
        pairs = self._passes.pairs(follow)
        if pairs is None:
            return {}
        rows = {each: known[each] for each in sorted(pairs.rows, key=lambda each: known[each].slot)}
        depth = min(DEEPEST, max(wanted[each] for each in rows))
        slots = [row.slot for row in rows.values()]
        hidden = self._read_pairs(rows, slots, pairs)
        positions = mx.array([row.submit.resumed + len(row.output) for row in rows.values()], dtype=mx.int32)
        sampler = self._sampler(rows)
        drafted: list[mx.array] = []
        for index in range(depth):
            if index:
                self._cache.begin(slots, 1, ahead=index - 1)
                hidden = self._head(drafted[-1][:, None], hidden, self._cache.mask, self._cache)
            tokens, positions = sampler.step(self._head.logits(hidden)[:, -1, :], positions)
            drafted.append(tokens)
        stacked = mx.stack(drafted, axis=1)
        mx.eval(stacked, self._cache.parts)
        found: list[list[int]] = stacked.tolist()  # type: ignore[assignment]
        return {each: tuple(draft[: wanted[each]]) for each, draft in zip(rows, found, strict=True)}

    def _read_pairs(self, rows: Mapping[int, _Row], slots: Sequence[int], pairs: Pairs) -> mx.array:
        """Have the head read pairs, a different number of each row. Returns its hidden state at the last of them."""
        counts = [len(pairs.rows[each]) for each in rows]
        length = max(counts)
        at, tokens = [], []
        for each, row in rows.items():
            padding = [0] * (length - len(pairs.rows[each]))
            at.append([index for index, _ in pairs.rows[each]] + padding)
            tokens.append([row.output[number] for _, number in pairs.rows[each]] + padding)
            row.read = len(row.output)
        self._cache.begin(slots, length)
        states = pairs.states[mx.array(at, dtype=mx.int32)]
        out = self._head(mx.array(tokens, dtype=mx.int32), states, self._cache.mask, self._cache)
        self._cache.commit(slots, counts)
        if length == 1:
            return out
        last = mx.array(counts, dtype=mx.int32) - 1
        return mx.take_along_axis(out, last[:, None, None], axis=1)

    def _sampler(self, rows: Mapping[int, _Row]) -> Sampler:
        """Draws a draft as the target draws its token: with the same number for the same seed and position, the two
        agree more often than the target's draw and the head's likeliest token."""
        ids = tuple(rows)
        if self._samplers[0] != ids:
            self._samplers = (ids, Sampler([row.submit.sampling for row in rows.values()]))
        return self._samplers[1]
