"""The index of the prefix cache, compared with a simple model."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millstream.engine.prefix_cache.index import Hit, PrefixIndex
from support.tiers import examples

BLOCK = 3
MAX_BLOCKS = 6

prompts = st.lists(st.integers(0, 2), max_size=14).map(tuple)
contents = st.lists(st.tuples(st.integers(0, 13), st.sampled_from("ab")), max_size=2, unique_by=lambda pair: pair[0])


class Index(RuleBasedStateMachine):
    """A dictionary stands in for the backend: each handle maps to the tokens and media up to the end of its block."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(block=BLOCK, block_bytes=10, budget=MAX_BLOCKS * 10 + 9)
        self.store: dict[int, tuple[object, ...]] = {}
        self.hits: list[Hit] = []

    @staticmethod
    def meaning(tokens: tuple[int, ...], media: list[tuple[int, str]], end: int) -> tuple[object, ...]:
        return tokens[:end], tuple(sorted((position, name) for position, name in media if position < end))

    @rule(tokens=prompts, media=contents)
    def insert(self, tokens: tuple[int, ...], media: list[tuple[int, str]]) -> None:
        media = sorted(media)
        inserted = self.index.insert(tokens, media)
        for number, handle in enumerate(inserted.handles, inserted.first):
            assert handle not in self.store
            self.store[handle] = self.meaning(tokens, media, (number + 1) * BLOCK)
        for handle in inserted.evicted:
            del self.store[handle]
        assert inserted.first + len(inserted.handles) <= len(tokens) // BLOCK
        if not self.hits:
            assert inserted.first + len(inserted.handles) == min(len(tokens) // BLOCK, MAX_BLOCKS)

    @rule(tokens=prompts, media=contents)
    def match(self, tokens: tuple[int, ...], media: list[tuple[int, str]]) -> None:
        media = sorted(media)
        hit = self.index.match(tokens, media)
        assert hit.tokens == len(hit.handles) * BLOCK <= len(tokens)
        for number, handle in enumerate(hit.handles, 1):
            assert self.store[handle] == self.meaning(tokens, media, number * BLOCK), "a handle of another prefix"
        longer = self.meaning(tokens, media, hit.tokens + BLOCK)
        assert hit.tokens + BLOCK > len(tokens) or longer not in self.store.values(), "a longer prefix is cached"
        self.hits.append(hit)

    @rule()
    def release(self) -> None:
        if self.hits:
            self.index.release(self.hits.pop())

    @rule()
    def clear(self) -> None:
        assert set(self.index.clear()) == set(self.store)
        self.store.clear()
        self.hits.clear()

    @invariant()
    def within_budget_and_no_eviction_in_use(self) -> None:
        assert len(self.store) == len(self.index) <= MAX_BLOCKS
        assert all(handle in self.store for hit in self.hits for handle in hit.handles), "a prefix in use was evicted"


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=examples(300), stateful_step_count=40)


class Checkpoints(RuleBasedStateMachine):
    """An index that continues from checkpoints only: blocks of 4 bytes and checkpoints of 10."""

    BUDGET = 60

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(block=BLOCK, block_bytes=4, budget=self.BUDGET, from_checkpoints=True)
        self.blocks: dict[int, tuple[object, ...]] = {}
        self.checkpoints: dict[int, tuple[object, ...]] = {}
        self.hits: list[Hit] = []

    def evict(self, handles: Iterable[int]) -> None:
        for handle in handles:
            del (self.blocks if handle in self.blocks else self.checkpoints)[handle]

    @rule(tokens=prompts, media=contents, save=st.booleans(), fails=st.booleans())
    def insert(self, tokens: tuple[int, ...], media: list[tuple[int, str]], save: bool, fails: bool) -> None:
        media = sorted(media)
        inserted = self.index.insert(tokens, media, 10 if save else None)
        for number, handle in enumerate(inserted.handles, inserted.first):
            self.blocks[handle] = Index.meaning(tokens, media, (number + 1) * BLOCK)
        if inserted.checkpoint is not None:
            assert save
            self.checkpoints[inserted.checkpoint] = Index.meaning(tokens, media, len(tokens))
        self.evict(inserted.evicted)
        if fails and inserted.checkpoint is not None:
            self.evict([inserted.checkpoint, *self.index.remove([inserted.checkpoint])])

    @rule(tokens=prompts, media=contents)
    def match(self, tokens: tuple[int, ...], media: list[tuple[int, str]]) -> None:
        media = sorted(media)
        hit = self.index.match(tokens, media)
        self.hits.append(hit)
        for number, handle in enumerate(hit.handles, 1):
            assert self.blocks[handle] == Index.meaning(tokens, media, number * BLOCK), "a handle of another prefix"
        assert hit.shared <= len(tokens)
        if hit.checkpoint is None:
            assert hit.tokens == 0 and not hit.handles
        else:
            assert self.checkpoints[hit.checkpoint] == Index.meaning(tokens, media, hit.tokens)
            assert len(hit.handles) == hit.tokens // BLOCK
        cached = set(self.checkpoints.values())
        longer = [end for end in range(hit.tokens + 1, len(tokens) + 1) if Index.meaning(tokens, media, end) in cached]
        assert not longer, "a later checkpoint is cached"

    @rule()
    def release(self) -> None:
        if self.hits:
            self.index.release(self.hits.pop())

    @rule(choice=st.integers(0, 100))
    def remove(self, choice: int) -> None:
        """The backend could not save a block: its continuations are removed as well."""
        unused = [handle for handle in self.blocks if not any(handle in hit.handles for hit in self.hits)]
        if unused:
            lost = unused[choice % len(unused)]
            self.evict([lost, *self.index.remove([lost])])

    @invariant()
    def within_budget_and_no_eviction_in_use(self) -> None:
        assert len(self.blocks) + len(self.checkpoints) == len(self.index)
        assert 4 * len(self.blocks) + 10 * len(self.checkpoints) == self.index.nbytes <= self.BUDGET
        assert all(handle in self.blocks for hit in self.hits for handle in hit.handles), "a prefix in use was evicted"
        used = [hit.checkpoint for hit in self.hits if hit.checkpoint is not None]
        assert all(handle in self.checkpoints for handle in used), "a prefix in use was evicted"


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=examples(300), stateful_step_count=40)


def test_a_shared_prefix_outlives_its_continuations() -> None:
    index = PrefixIndex(block=1, block_bytes=1, budget=5)
    for tail in range(10, 60, 3):
        index.insert((1, 2, 3, tail, tail + 1))
    hit = index.match((1, 2, 3, 99))
    assert hit.tokens == 3


def test_too_few_new_blocks_are_not_saved() -> None:
    index = PrefixIndex(block=1, block_bytes=1, budget=100, least=3)
    assert index.insert((1, 2)).handles == ()
    assert len(index.insert((1, 2, 3)).handles) == 3
    assert index.insert((1, 2, 3, 4, 5)).handles == ()
    assert index.insert((1, 2, 3, 4, 5, 6)).first == 3
    assert index.match((1, 2, 3, 4, 5, 6, 7)).tokens == 6


def test_prompts_with_another_image_share_only_the_blocks_before_it() -> None:
    index = PrefixIndex(block=2, block_bytes=1, budget=100)
    tokens = (1, 2, 9, 9, 3, 4)
    index.insert(tokens, [(2, "cat")])
    assert index.match(tokens, [(2, "cat")]).tokens == 6
    assert index.match(tokens, [(2, "dog")]).tokens == 2
    assert index.match(tokens).tokens == 2
