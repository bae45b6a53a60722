"""Drafts by heads for multi-token prediction: what a head reads, what it gains, and that answers stay the same.

A head that reads the wrong hidden states is never wrong, only useless: so its drafts are compared with those of the
same head that reads all of a row's text from the beginning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.layout_choice.fast_paths import FastPaths
from millstream.backend.generation.mtp import drafter as drafter_module
from millstream.backend.generation.mtp import head_cache
from millstream.backend.generation.mtp.drafter import MtpDrafter
from millstream.backend.generation.mtp.head import MtpHead
from millstream.backend.generation.mtp.head_cache import HeadCache
from millstream.backend.generation.mtp.hidden_states import HiddenStates
from millstream.backend.generation.mtp.loading import load_head, text_model, vocabulary_of
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, Prefill
from millstream.types import Sampling
from support.mtp_models import (
    VOCAB,
    make_head,
    make_model,
    mtp_config,
    randomize,
    sentences,
    trained_folder,
    write_published,
)
from support.tiers import some


@pytest.fixture(scope="module")
def trained() -> Path:
    return trained_folder()


class FromTheBeginning:
    """The same head, which reads all of a text whenever it is asked."""

    def __init__(self, folder: Path) -> None:
        self.model, config = load_model(folder)
        found = load_head(folder, config)
        assert found.head is not None and found.family is not None
        self.head = found.head
        self.head.bind(*vocabulary_of(self.model))
        self.hidden = HiddenStates(text_model(self.model).norm, after_norm=found.family.after_norm)

    def draft(self, text: Sequence[int], count: int) -> tuple[int, ...]:
        self.model(mx.array([text[:-1]]))
        hidden = self.hidden.take()
        assert hidden is not None
        cache = KVCache()
        mask = create_attention_mask(hidden, cache, return_array=True)
        state = self.head(mx.array([text[1:]]), hidden, mask, cache)[:, -1:]
        found: list[int] = []
        while len(found) < count:
            found.append(int(mx.argmax(self.head.logits(state)[0, -1]).item()))
            state = self.head(mx.array([[found[-1]]]), state, None, cache)
        return tuple(found)


@dataclass
class Played:
    """A backend that was driven step by step."""

    backend: MlxGenerationBackend
    texts: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    drafted: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = field(default_factory=list)
    """(the text so far, how many tokens were asked for, the draft)."""
    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    def listen(self) -> None:
        """Note what the head is asked and what it drafts."""
        mtp = self.mtp
        propose = mtp.propose

        def noted(wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
            found = propose(wanted)
            for request_id, draft in found.items():
                row = mtp._rows[request_id]
                self.drafted.append(((*row.submit.prompt, *row.output), wanted[request_id], draft))
            return found

        mtp.propose = noted  # type: ignore[method-assign]

    @property
    def mtp(self) -> MtpDrafter:
        loaded = self.backend._loaded
        assert loaded is not None and loaded.assembly.mtp is not None
        return loaded.assembly.mtp

    def prefill(self, *submits: Generate, chunk: int = 1000) -> None:
        for submit in submits:
            last = len(submit.prompt) - 1
            for start in range(0, last, chunk):
                self.backend.step(Plan(prefill=(Prefill(submit, start, min(start + chunk, last)),), decode=self.rows))
        self._join(submits)

    def prefill_together(self, *submits: Generate) -> None:
        self.backend.step(Plan(prefill=tuple(Prefill(each, 0, len(each.prompt) - 1) for each in submits)))
        self._join(submits)

    def _join(self, submits: Sequence[Generate]) -> None:
        for submit in submits:
            self.texts[submit.request_id] = list(submit.prompt)
            self.prompts[submit.request_id] = len(submit.prompt)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.texts)

    def step(self, depth: int | Mapping[int, int] = 0, drop: tuple[int, ...] = ()) -> None:
        for request_id in drop:
            del self.texts[request_id]
        wanted = dict.fromkeys(self.rows, depth) if isinstance(depth, int) else depth
        drafts = tuple((row, count) for row, count in wanted.items() if count and row in self.texts)
        for row in self.backend.step(Plan(decode=self.rows, drafts=drafts, drop=drop)).rows:
            self.texts[row.request_id] += row.tokens
            self.proposed += row.proposed
            self.accepted += row.accepted
        self.steps += 1

    def answer(self, request_id: int, count: int) -> list[int]:
        start = self.prompts[request_id]
        return self.texts[request_id][start : start + count]

    def until(self, count: int, depth: int) -> list[list[int]]:
        while any(len(self.answer(row, count)) < count for row in self.rows):
            self.step(depth)
        return [self.answer(row, count) for row in self.rows]


def play(folder: Path, drafters: list[Any] | None = None, **settings: Any) -> Played:
    backend = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=8, **settings), drafters)
    played = Played(backend)
    facts = backend.load()
    assert ("mtp" in facts.drafters) == (drafters is None)
    return played


def requests(seed: int, count: int, length: int = 20, **sampling: Any) -> list[Generate]:
    return [
        Generate(number, tuple(prompt[: length + number]), 60, sampling=Sampling(seed=number, **sampling))
        for number, prompt in enumerate(sentences(seed, count, length + count))
    ]


@pytest.mark.parametrize(
    ("layout", "temperature"),
    some(
        [(layout, temperature) for layout in ("default", "like a GPU", "compiled") for temperature in (0.0, 1.0)],
        [("default", 1.0), ("like a GPU", 0.0), ("compiled", 0.0), ("compiled", 1.0)],
    ),
)
def test_the_same_answers_in_fewer_passes(
    layout: str, temperature: float, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "compiled":
        monkeypatch.setattr(FastPaths, "steps_compile", True)
    settings = {"like_gpu": layout != "default"}
    wanted = requests(500, 4, temperature=temperature)
    plain = play(trained, [], **settings)
    plain.prefill_together(*wanted)
    expected = plain.until(40, 0)
    played = play(trained, **settings)
    played.prefill_together(*wanted)
    assert played.until(40, 2) == expected
    assert played.accepted > 0.5 * played.proposed
    assert played.steps < 0.7 * plain.steps


def test_drafts_are_those_of_a_head_that_read_everything(trained: Path) -> None:
    """Rows that join, leave, are not asked, plain steps between, passes of all lengths."""
    reference = FromTheBeginning(trained)
    played = play(trained)
    played.listen()
    draw = random.Random(3)
    wanted = requests(600, 6)
    for step in range(28):
        if step % 4 == 0 and wanted:
            played.prefill(wanted.pop(), chunk=draw.choice([3, 7, 100]))
        depths = {row: draw.choice([0, 1, 2, 4]) for row in played.rows}
        drop = tuple(row for row in played.rows if step > 10 and draw.random() < 0.05)
        played.step({} if draw.random() < 0.3 else depths, drop)
    assert len(played.drafted) > 25
    for text, count, draft in played.drafted:
        assert draft == reference.draft(text, count)


def test_prompts_that_share_a_pass_are_read(trained: Path, tmp_path: Path) -> None:
    """As if each was prefilled alone: padded on the left, and on the right for layers of several kinds."""
    hybrid = write_published(tmp_path / "qwen", "qwen3_5")
    wanted = requests(700, 3)
    for folder in (trained, hybrid):
        alone, together = play(folder, like_gpu=True), play(folder, like_gpu=True)
        for each in wanted:
            alone.backend.step(Plan(prefill=(Prefill(each, 0, len(each.prompt) - 1),)))
        together.prefill_together(*wanted)
        assert len(together.mtp._prompts) == 3
        for request_id, (_, cache) in together.mtp._prompts.items():
            _, other = alone.mtp._prompts[request_id]
            assert cache.offset == other.offset == len(wanted[request_id].prompt) - 1
            keys, expected = (each.keys[..., : each.offset, :] for each in (cache, other))
            assert mx.allclose(keys, expected, atol=1e-4)
        together.step(2)
        assert not together.mtp._prompts


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_published_layouts_draft_from_their_own_text(family: str, tmp_path: Path) -> None:
    """From a folder to drafts: experts; gated delta layers, and norms that are stored less one."""
    folder = write_published(tmp_path / family, family)
    reference = FromTheBeginning(folder)
    plain = play(folder, [])
    played = play(folder)
    played.listen()
    wanted = requests(800, 2)
    for each in (plain, played):
        each.prefill(*wanted)
    assert played.until(12, 2) == plain.until(12, 0)
    assert played.drafted
    assert all(draft == reference.draft(text, count) for text, count, draft in played.drafted)


def test_a_model_that_cannot_verify_drops_its_head(tmp_path: Path) -> None:
    """Its hidden states are not kept either, and memory does not count the head."""
    folder = write_published(tmp_path / "glm", "glm4_moe_lite")
    backend = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4))
    facts = backend.load()
    assert facts.drafters == () and any(note.startswith("no speculative decoding") for note in facts.notes)
    assert not any("MTP" in note for note in facts.notes)
    other = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=4), [])
    assert facts.weight_bytes == other.load().weight_bytes
    assert backend._loaded is not None and backend._loaded.assembly.mtp is None
    assert type(backend._loaded.assembly.model.model.norm) is nn.RMSNorm


def test_long_pauses_and_long_prompts_leave_tokens_out(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that has missed some tokens goes on with the latest: no error, the same answers."""
    monkeypatch.setattr(drafter_module, "PROMPT_TOKENS", 8)
    wanted = requests(900, 2)
    plain, played = play(trained, []), play(trained)
    for each in (plain, played):
        each.prefill(*wanted, chunk=5)
    for _ in range(20):
        played.step()
    assert played.until(48, 4) == plain.until(48, 0)
    assert played.accepted > 10


def test_nothing_is_left_of_rows_that_ended(trained: Path) -> None:
    played = play(trained)
    played.prefill(*requests(900, 3))
    for _ in range(3):
        played.step(2)
    (late,) = requests(901, 1)
    played.backend.step(Plan(prefill=(Prefill(late, 0, 8),), decode=played.rows))
    held = played.backend.memory_bytes()
    played.step(drop=played.rows)
    played.backend.step(Plan(drop=(late.request_id,)))
    assert not played.mtp._prompts and not played.mtp._rows and played.mtp.nbytes == 0
    assert played.backend.memory_bytes() < held


def test_a_warm_up_leaves_nothing(trained: Path) -> None:
    played = play(trained)
    held = played.backend.memory_bytes()
    played.mtp.warm_up()
    assert played.backend.memory_bytes() == held and not played.mtp._rows
    played.prefill(*requests(900, 2))
    for _ in range(6):
        played.step(2)
    assert played.accepted > 0


def test_a_request_may_refuse(trained: Path) -> None:
    played = play(trained)
    played.prefill(*(Generate(each.request_id, each.prompt, 20, speculate=False) for each in requests(900, 2)))
    for _ in range(4):
        played.step(2)
    assert played.proposed == 0 and not played.mtp._rows


def small_head() -> MtpHead:
    config = mtp_config("glm4_moe")
    model = make_model(config)
    head = make_head(config, model)
    randomize(model, 1)
    randomize(head, 2)
    return head


@pytest.mark.parametrize("window", [48, 128])
def test_the_cache_of_a_head(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of random lengths, some of them beyond the window, in passes with padding and with tokens that are not kept:
    each row sees exactly its own latest tokens."""
    monkeypatch.setattr(head_cache, "WINDOW", window)
    monkeypatch.setattr(head_cache, "SLACK", 16)
    monkeypatch.setattr(head_cache, "FIRST_COLUMNS", 32)
    head, draw = small_head(), random.Random(window)
    cache = HeadCache()
    rows: dict[int, tuple[mx.array, list[int]]] = {}

    def noise(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(draw.randrange(2**31)))

    for step in range(60):
        if len(rows) < 3 or draw.random() < 0.1:
            rows[cache.join()] = (mx.zeros((1, 0, 64)), [])
        elif draw.random() < 0.05:
            slot = draw.choice(list(rows))
            del rows[slot]
            cache.leave(slot)
        slots = sorted(draw.sample(list(rows), draw.randint(1, len(rows))))
        length = draw.randint(1, 6)
        counts = [draw.randint(1, length) for _ in slots]
        hidden = noise(len(slots), length, 64)
        tokens = [[draw.randrange(VOCAB) for _ in range(length)] for _ in slots]
        cache.begin(slots, length)
        out = head(mx.array(tokens), hidden, cache.mask, cache)
        cache.commit(slots, counts)
        for ahead in range(draw.randint(0, 4)):
            cache.begin(slots, 1, ahead=ahead)
            head(mx.array([[1]] * len(slots)), noise(len(slots), 1, 64), cache.mask, cache)
        for index, slot in enumerate(slots):
            before, said = rows[slot]
            rows[slot] = (
                mx.concatenate([before, hidden[index : index + 1, : counts[index]]], axis=1),
                said + tokens[index][: counts[index]],
            )
            if step % 3 == 0:
                states, said = rows[slot]
                # The pass had `length` tokens: padding takes room in a full ring.
                seen = min(len(said), window - 16 - (length - counts[index]))
                assert_sees(head, states, said, seen, out[index, counts[index] - 1])
    assert max(len(said) for _, said in rows.values()) > window / 2


def assert_sees(head: MtpHead, states: mx.array, tokens: Sequence[int], seen: int, got: mx.array) -> None:
    """The last output is that of a head which attends to the last so many tokens, at their own positions."""
    positions = mx.arange(len(tokens))
    visible = (positions[None] <= positions[:, None]) & (positions[None] > len(tokens) - 1 - seen)
    expected = head(mx.array([tokens]), states, visible[None, None], None)[0, -1]
    assert mx.allclose(got, expected, atol=1e-4), mx.abs(got - expected).max().item()
