"""Groups whose padded pass is built some layers at a time: the same numbers as at once, whatever happens midway."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.caches.joining import MixedRows
from millstream.backend.generation.mtp.passes import PromptWatch
from millstream.backend.generation.prefill.pass_in_parts import LayersInParts, PassInParts
from millstream.backend.generation.prefill.prefiller import MixedPrefiller, Passes
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, Prefill, StepResult
from millstream.engine.prefix_cache.orders import SavePrefix
from support.tiny import VOCAB

LENGTHS = (17, 30, 25)
BLOCK = 8


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(VOCAB) for _ in range(length))


def whole(submit: Generate, save: SavePrefix | None = None) -> Prefill:
    return Prefill(submit, 0, len(submit.prompt) - 1, save=save)


SUBMITS = tuple(Generate(number, prompt(number, length), 1) for number, length in enumerate(LENGTHS, start=1))
CHUNKS = tuple(map(whole, SUBMITS))


def order(number: int, first: int) -> SavePrefix:
    """Save all that a prompt has read. `first`: the first handle."""
    tokens = len(SUBMITS[number - 1].prompt) - 1
    return SavePrefix(number, 0, BLOCK, tuple(range(first, first + tokens // BLOCK)), first + 99, tokens)


class Pair:
    """Prefillers of the same prompts, at once and in parts."""

    def __init__(self, folder: Path, *, padded: bool = True) -> None:
        self.model, _ = load_model(folder)
        self.whole = self._prefiller(None, padded)
        self.parts = self._prefiller(LayersInParts(self.model), padded)
        mx.eval(self.whole.prefill(CHUNKS))
        (begun,) = self.parts.prefill(CHUNKS)
        assert isinstance(begun, PassInParts) and begun.layers == len(self.model.layers)
        self.begun, self.builds = begun, begun.split(begun.layers)

    def _prefiller(self, layers: LayersInParts | None, padded: bool) -> MixedPrefiller:
        store = PrefixStore()
        return MixedPrefiller(self.model, min_length_ratio=0.5, prefix_store=store, pad_chunks=padded, layers=layers)

    def build(self, parts: int) -> list[int]:
        """Build and evaluate the next parts. Returns how many arrays each has."""
        due, self.builds = self.builds[:parts], self.builds[parts:]
        counts = []
        for build in due:
            arrays = build()
            mx.eval(arrays)
            counts.append(len(arrays))
        return counts

    def check(self, *wanted: int) -> None:
        """Take these rows from both."""
        (submits, (rows,)), (others, (expected,)) = self.parts.take(wanted), self.whole.take(wanted)
        assert submits == others == [SUBMITS[number - 1] for number in sorted(wanted)]
        assert isinstance(rows, MixedRows) and isinstance(expected, MixedRows)
        assert rows.count == expected.count and rows.attending.keys() == expected.attending.keys()
        for window, same in expected.attending.items():
            mine = rows.attending[window]
            assert (mine.left_padding, mine.right_padding) == (same.left_padding, same.right_padding)
            assert mine.lengths == same.lengths
        assert [len(layer) for layer in rows.states] == [len(layer) for layer in expected.states]
        equal(rows.arrays, expected.arrays)


def equal(these: Sequence[mx.array] | None, those: Sequence[mx.array] | None) -> None:
    assert these and those
    for one, other in zip(these, those, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and mx.array_equal(one, other).item()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "gemma3_text"])
def test_rows_are_those_of_a_pass_at_once(family: str, padded: bool, tiny_model: Callable[[str], Path]) -> None:
    pair = Pair(tiny_model(family), padded=padded)
    sizes = [pair.parts.nbytes]
    for _ in range(pair.begun.layers):
        assert all(pair.build(1))
        sizes.append(pair.parts.nbytes)
    assert sizes == sorted(sizes) and sizes[1] > sizes[0], "what is built is counted, and nothing is built for it"
    assert sizes[-1] == pair.whole.nbytes
    pair.check(1, 2, 3)
    assert pair.parts.nbytes == 0


@pytest.mark.parametrize("built", [0, 1, 4])
def test_members_are_taken_before_all_is_built(built: int, tiny_model: Callable[[str], Path]) -> None:
    pair = Pair(tiny_model("lfm2"))
    pair.build(built)
    pair.check(1, 3)
    pair.build(2)
    pair.check(2)
    assert all(pair.build(4)), "what was taken is still evaluated in its step"


@pytest.mark.parametrize("built", [0, 1, 4])
def test_a_member_is_saved_before_all_is_built(built: int, tiny_model: Callable[[str], Path]) -> None:
    pair = Pair(tiny_model("lfm2"))
    pair.build(built)
    equal(pair.parts.save(order(2, 10)), pair.whole.save(order(2, 10)))
    assert pair.parts.save(SavePrefix(1, 0, BLOCK, (), checkpoint=9, tokens=7)) is None, "its state is another token's"
    pair.build(4)
    pair.check(1, 2, 3)


def test_some_members_are_dropped_before_all_is_built(tiny_model: Callable[[str], Path]) -> None:
    pair = Pair(tiny_model("lfm2"))
    pair.build(1)
    for prefiller in (pair.parts, pair.whole):
        prefiller.drop([2])
    assert all(pair.build(3)), "others want the pass"
    pair.check(1, 3)


def test_what_nobody_wants_is_not_built(tiny_model: Callable[[str], Path]) -> None:
    pair = Pair(tiny_model("lfm2"))
    pair.build(1)
    pair.parts.drop([1])
    pair.parts.drop([2, 3])
    assert pair.build(3) == [0, 0, 0] and pair.parts.nbytes == 0
    assert pair.parts.take([1, 2, 3]) == ([], [])


def test_a_group_is_not_built_for_others_that_are_taken(tiny_model: Callable[[str], Path]) -> None:
    pair = Pair(tiny_model("lfm2"))
    other, before = Generate(9, prompt(9, 12), 1), pair.parts.nbytes
    pair.parts.prefill([whole(other)])
    submits, _ = pair.parts.take([9])
    assert submits == [other] and pair.parts.nbytes == before
    pair.build(4)
    pair.check(1, 2, 3)


def test_groups_that_save_or_are_watched_are_built_at_once(tiny_model: Callable[[str], Path]) -> None:
    class Watch(PromptWatch):
        def take(self) -> None: ...

        def read(self, *arguments: Any) -> list[mx.array]:
            raise AssertionError("no hidden states were seen")

        def forget(self, request_id: int) -> None: ...

    model, _ = load_model(tiny_model("lfm2"))

    def prefilled(chunks: Sequence[Prefill], watch: PromptWatch | None = None) -> Passes:
        layers = LayersInParts(model)
        made = MixedPrefiller(model, min_length_ratio=0.5, prefix_store=PrefixStore(), watch=watch, layers=layers)
        passes = made.prefill(chunks)
        assert made.grouped == len(chunks)
        return passes

    assert [type(each) for each in prefilled(CHUNKS)] == [PassInParts]
    assert [type(each) for each in prefilled([*CHUNKS[:2], whole(SUBMITS[2], order(3, 10))])] == [list]
    assert [type(each) for each in prefilled(CHUNKS, Watch())] == [list]


def test_a_group_beside_a_running_row_answers_as_each_prompt_alone(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member is dropped midway, another is saved there."""
    folder = tiny_model("falcon_h1")
    running = Generate(9, prompt(9, 6), 40)
    built: list[tuple[int, int]] = []
    plain_part = PassInParts.part

    def part(begun: PassInParts, first: int, stop: int) -> list[mx.array]:
        built.append((first, stop))
        return plain_part(begun, first, stop)

    monkeypatch.setattr(PassInParts, "part", part)
    tokens: dict[int, list[int]] = {}

    def run() -> None:
        backend = MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=8, like_gpu=True))
        backend.load()

        def step(plan: Plan) -> StepResult:
            result = backend.step(plan)
            assert not result.unsaved and not result.failed
            for row in result.rows:
                tokens.setdefault(row.request_id, []).extend(row.tokens)
            return result

        try:
            step(Plan(prefill=(whole(running),)))
            for _ in range(3):
                step(Plan(decode=(9,)))
            built.clear()
            assert step(Plan(decode=(9,), prefill=CHUNKS)).prefilling
            assert built == [(0, 1)], "the rest waits for other steps"
            backend.memory_bytes()
            assert step(Plan(decode=(9,), drop=(1,))).prefilling
            assert step(Plan(decode=(9,), save=(order(2, 10),), drop=(2,))).prefilling
            while step(Plan(decode=(9,))).prefilling:
                pass
            assert built == [(0, 1), (1, 2), (2, 3), (3, 4)]
            read = len(SUBMITS[1].prompt) - 1
            again = Prefill(SUBMITS[1], read, read, reuse=order(2, 10).handles, reuse_checkpoint=109)
            step(Plan(decode=(9, 3), prefill=(again,), complete_prefill=True))
            for _ in range(12):
                step(Plan(decode=(9, 3, 2)))
        finally:
            backend.close()

    with ThreadPoolExecutor(1) as owner:
        owner.submit(run).result()
    model, _ = load_model(folder)
    assert tokens.keys() == {2, 3, 9}
    for submit in (running, *SUBMITS[1:]):
        found = tokens[submit.request_id]
        steps = generate_step(mx.array(submit.prompt), model, max_tokens=len(found))
        assert len(found) >= 11 and found == [int(token) for token, _ in steps]
