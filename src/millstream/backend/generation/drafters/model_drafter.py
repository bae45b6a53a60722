"""Drafts by a smaller model: what it would say next, a few tokens ahead of the target."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from millstream.backend.generation.drafters.draft_model import DraftModel
from millstream.backend.generation.drafters.draft_prompts import DraftPrompts
from millstream.backend.generation.sampling.sampler import Sampler
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.lengths import LENGTHS
from millstream.types import Sampling

CATCH_UP = LENGTHS[-1]
"""The most tokens of a row in one pass, and MOST_PASSES how many such passes one proposal may take: a row that gained
many tokens by other drafts catches up over several steps."""
MOST_PASSES = 4
WARM_UP = -1
"""The id of a request that is none."""
GREEDY = Sampling()


@dataclass(slots=True)
class DraftedRow:
    """A row of the batch, as the draft model knows it."""

    submit: Generate
    sampling: Sampling
    """As the draft model samples: the target's own choice at (seed, position), without what it cannot apply."""
    tokens: array[int]
    """The prompt and what the row has gained. Ids that the draft model does not have are 0."""
    gained: int
    """Tokens of the answer among them."""
    read: int = 0
    """How many of the tokens are in the draft model's cache."""
    drafted: tuple[int, ...] = field(default=())
    """What the cache holds behind them: the latest draft but for its last token."""

    def gain(self, tokens: Sequence[int], vocab_size: int) -> None:
        for token in tokens:
            known = token if token < vocab_size else 0
            self.tokens.append(known)
            if self.drafted and self.drafted[0] == known:
                self.read, self.drafted = self.read + 1, self.drafted[1:]
            else:
                self.drafted = ()
        self.gained += len(tokens)


class ModelDrafter:
    """Owner only. A row's prompt is read when its first draft is wanted, in pieces; until then it has no draft."""

    name = "draft-model"
    cheap = False

    def __init__(self, draft: DraftModel, depth: int | None = None, *, confident: bool = True) -> None:
        """`depth`: the most tokens of a draft. `confident`: end drafts where the draft model is unsure."""
        self._draft = draft
        self._depth = depth
        self._confident = confident
        self._known: dict[int, DraftedRow] = {}
        self._rows, prefiller = draft.make()
        self._prompts = DraftPrompts(prefiller)
        self._sampler: tuple[tuple[int | None, ...], Sampler] | None = None
        self._step_seconds = self._token_seconds = 0.0
        """What a step of the draft model takes; and a token of a row's answer, all in all."""
        self.read_seconds = 0.0
        """What the latest proposal took to read prompts: not the price of its drafts."""
        self._asked = (0.0, 0)
        """When drafts were wanted last, and how many tokens all rows had gained."""
        self._total = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its KV caches."""
        return self._rows.nbytes + self._prompts.nbytes

    def join(self, submit: Generate) -> None:
        vocab_size = self._draft.vocab_size
        tokens = array("i", (token if token < vocab_size else 0 for token in submit.prompt))
        bias = tuple(each for each in submit.sampling.logit_bias if each[0] < vocab_size)
        sampling = replace(submit.sampling, logit_bias=bias)
        self._known[submit.request_id] = DraftedRow(submit, sampling, tokens, submit.resumed)

    def drop(self, ids: set[int]) -> None:
        self._rows.drop(ids)
        self._prompts.drop(ids)
        for each in ids:
            self._known.pop(each, None)

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        if (row := self._known.get(request_id)) is not None:
            row.gain(tokens, self._draft.vocab_size)
            self._total += len(tokens)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        started = time.monotonic()
        rows = {each: self._known[each] for each in wanted if each in self._known and self._fits(each, wanted[each])}
        self._learn(started, len(rows))
        self._read_prompts(rows)
        ready = {each: row for each, row in rows.items() if each in self._rows}
        if not ready:
            return {}
        for row in ready.values():
            row.read, row.drafted = min(row.read, len(row.tokens) - 1), ()  # the last token is run, also if again
        self._rows.take_back({each: row.read for each, row in ready.items()})
        logits = self._catch_up(ready)
        ready = {each: row for each, row in ready.items() if row.read == len(row.tokens)}
        if not ready:
            mx.eval(logits)  # no draft will be made of them, but what was read must be in the caches
            return {}
        return self._drafts(ready, {each: self._count(wanted[each]) for each in ready}, logits)

    def _count(self, wanted: int) -> int:
        return wanted if self._depth is None else min(wanted, self._depth)

    def _fits(self, request_id: int, count: int) -> bool:
        """Whether the draft model's context has room."""
        return len(self._known[request_id].tokens) + count <= self._draft.context_length

    def _learn(self, now: float, rows: int) -> None:
        """What a token takes, drafts and all: from the time since drafts were wanted last."""
        then, total = self._asked
        if then and rows and self._total > total:
            seconds = (now - then) * rows / (self._total - total)
            self._token_seconds = (
                seconds
                if not self._token_seconds
                else 0.8 * self._token_seconds + 0.2 * min(seconds, 3 * self._token_seconds)
            )
        self._asked = (now, self._total)

    def _read_prompts(self, rows: Mapping[int, DraftedRow]) -> None:
        """Read on in the prompts of rows that have no cache yet, for about as long as a step takes."""
        self.read_seconds = 0.0
        unread = {each: row.tokens for each, row in rows.items() if each not in self._rows}
        if not unread:
            return
        began = time.monotonic()
        for each, tokens, joining in self._prompts.read(unread, self._token_seconds):
            self._rows.join([each], [joining])
            self._known[each].read = tokens
        self.read_seconds = time.monotonic() - began

    def warm_up(self) -> None:
        """Run what the first drafts would otherwise pay for."""
        self.join(Generate(WARM_UP, (0,) * 9, 99))
        for length in LENGTHS:
            self.commit(WARM_UP, (1,) * length)
            self.propose({WARM_UP: 2})
        self.drop({WARM_UP})
        self._step_seconds = self._token_seconds = 0.0
        self._asked = (0.0, self._total)

    def _catch_up(self, rows: Mapping[int, DraftedRow]) -> mx.array:
        """Run what rows have gained since their last draft. Returns the logits after it."""
        for _ in range(MOST_PASSES):
            missing = {each: row.tokens[row.read : row.read + CATCH_UP] for each, row in rows.items()}
            longest = max(map(len, missing.values()))
            logits = self._rows.read(missing, next(length for length in LENGTHS if longest <= length))
            for each, tokens in missing.items():
                rows[each].read += len(tokens)
            behind = [row for row in rows.values() if row.read < len(row.tokens)]
            if not behind or len(behind) < len(rows):
                break  # the others go on with this; logits of rows that are still behind are not used
            mx.eval(logits)
        return logits

    def _drafts(
        self, rows: Mapping[int, DraftedRow], counts: Mapping[int, int], logits: mx.array
    ) -> dict[int, tuple[int, ...]]:
        """Run the draft model on its own tokens."""
        ids = tuple(self._rows.ids)
        sampler = self._sampler_of(ids)
        first = [self._known[each].gained if each in rows else 0 for each in ids]  # type: ignore[index]
        positions = mx.array(first, dtype=mx.int32)
        drafts: dict[int, list[int]] = {each: [] for each in rows}
        chances = dict.fromkeys(rows, 1.0)
        running = dict(counts)
        least = self._least_chance()
        for step in range(max(counts.values())):
            began = time.monotonic()
            tokens, positions = sampler.step(logits, positions)
            best = mx.max(mx.softmax(logits.astype(mx.float32), axis=-1), axis=-1) if self._confident else None
            mx.eval(tokens, *([] if best is None else [best]))
            drawn: list[int] = tokens.tolist()  # type: ignore[assignment]
            sure: list[float] = [1.0] * len(ids) if best is None else best.tolist()  # type: ignore[assignment]
            if step:
                self._took(time.monotonic() - began)
            for number, each in enumerate(ids):
                if each is None or each not in running:
                    continue
                chances[each] *= sure[number]
                drafts[each].append(drawn[number])
                if len(drafts[each]) == running[each] or chances[each] < least:
                    del running[each]
            if not running:
                break
            logits = self._rows.step(tokens, running)
        for each, draft in drafts.items():
            rows[each].drafted = tuple(draft[:-1])
        return {each: tuple(draft) for each, draft in drafts.items()}

    def _sampler_of(self, ids: tuple[int | None, ...]) -> Sampler:
        if self._sampler is None or self._sampler[0] != ids:
            settings = [GREEDY if each is None else self._known[each].sampling for each in ids]
            self._sampler = ids, Sampler(settings, kernel=self._draft.layout.sampling_kernel)
        return self._sampler[1]

    def _took(self, seconds: float) -> None:
        """A step of the draft model took so long."""
        known = self._step_seconds
        self._step_seconds = seconds if not known else 0.8 * known + 0.2 * min(seconds, 3 * known)

    def _least_chance(self) -> float:
        """How likely a draft must be right as a whole to be worth one more token: a right one saves what a token takes,
        and it costs a step of the draft model."""
        if not self._confident or not self._token_seconds:
            return 0.0
        return min(0.9, self._step_seconds / self._token_seconds)
