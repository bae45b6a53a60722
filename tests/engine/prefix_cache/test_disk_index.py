"""The index of the disk tier, compared with a simple model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millstream.engine.prefix_cache.disk.index import DiskIndex, Piece
from support.tiers import examples

BUDGET = 100

letters = st.text("ab", min_size=1, max_size=7)


def keys_of(word: str) -> list[str]:
    """The keys of a word: each covers all letters before it, as block hashes do."""
    return [word[: end + 1] for end in range(len(word))]


class Index(RuleBasedStateMachine):
    """The model: files, oldest first, each with the letters of a word from `first`. A letter's key is the word up to
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex(BUDGET)
        self.files: dict[str, tuple[str, int, int]] = {}

    def make_recent(self, name: str) -> None:
        self.files[name] = self.files.pop(name)

    def ancestors(self, word: str) -> list[str]:
        """The files of the prefix that ends with this word, last first."""
        names = []
        while True:
            candidates = [(name, text) for name, (text, first, _) in self.files.items() if first < len(word)]
            holders = [name for name, text in candidates if text.startswith(word)]
            if not holders:
                return names
            names.append(max(holders, key=lambda name: (-self.files[name][1], name)))
            word = word[: self.files[names[-1]][1]]

    @rule(word=letters, first=st.integers(0, 6), size=st.integers(1, 60))
    def write(self, word: str, first: int, size: int) -> None:
        first = min(first, len(word) - 1)
        name = f"{word}-{first}"
        if name in self.files:
            return
        protected = self.ancestors(word[:first])
        available = BUDGET - sum(self.files[file][2] for file in protected)
        evicted = self.index.evict_for(size, word[:first])
        if size > available:
            assert evicted is None
            return
        assert evicted is not None
        expected = []
        for file in [file for file in self.files if file not in protected]:
            if sum(entry[2] for entry in self.files.values()) + size > BUDGET:
                expected.append(file)
                del self.files[file]
        assert evicted == expected
        touched = self.index.add(keys_of(word)[first:], name, size, word[:first])
        self.files[name] = (word, first, size)
        assert touched == protected
        for file in protected:
            self.make_recent(file)

    @rule(word=letters)
    def match(self, word: str) -> None:
        pieces = self.index.match(keys_of(word))
        start = 0
        for piece in pieces:
            text, first, _ = self.files[piece.name]
            assert piece.count > 0 and piece.blocks == len(text) - first
            assert piece.first == start - first
            assert text.startswith(word[: start + piece.count]), "a piece of another word"
            assert not any(self.matched(name, word, start) > piece.count for name in self.files), (
                "a longer piece exists"
            )
            start += piece.count
        assert start == len(word) or not any(self.matched(name, word, start) for name in self.files), "not the longest"
        names = [piece.name for piece in pieces]
        assert self.index.touch(names) == names[::-1]
        for name in names[::-1]:
            self.make_recent(name)

    def matched(self, name: str, word: str, start: int) -> int:
        """How many letters of the word, from position `start`, a file has."""
        text, first, _ = self.files[name]
        end = start
        while first <= start and end < min(len(text), len(word)) and text[: end + 1] == word[: end + 1]:
            end += 1
        return end - start

    @rule(word=letters)
    def find(self, word: str) -> None:
        piece = self.index.find(word)
        ends = {name for name, (text, _, _) in self.files.items() if text == word}
        assert (piece.name in ends and piece.reaches_end and piece.first == 0) if piece else not ends
        held = any(text.startswith(word) and first < len(word) for text, first, _ in self.files.values())
        assert self.index.holds(word) == held

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.files:
            name = data.draw(st.sampled_from(sorted(self.files)))
            assert self.index.remove(name)
            assert not self.index.remove(name)
            del self.files[name]

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == list(self.files)
        self.files.clear()

    @invariant()
    def same_as_the_model_and_within_budget(self) -> None:
        assert len(self.index) == len(self.files)
        assert self.index.bytes == sum(size for _, _, size in self.files.values()) <= BUDGET
        assert all(name in self.index for name in self.files)


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def test_a_shared_prefix_outlives_its_continuations() -> None:
    index = DiskIndex(10)
    index.add(["s", "sy"], "system", 4, "")
    for number in range(20):
        assert index.evict_for(3, "sy") is not None
        index.add([f"sy{number}"], f"tail-{number}", 3, "sy")
    assert index.match(["s", "sy", "sy19"]) == (Piece("system", 0, 2, 2), Piece("tail-19", 0, 1, 1))
    assert index.match(["s", "sy", "sy0"]) == (Piece("system", 0, 2, 2),)


def test_a_prefix_is_not_evicted_for_its_own_continuation() -> None:
    index = DiskIndex(10)
    index.add(["a"], "one", 6, "")
    assert index.evict_for(5, "a") is None
    assert index.evict_for(5) == ["one"]


def test_a_prefix_is_evicted_from_its_end() -> None:
    index = DiskIndex(3)
    for word in ("a", "aa", "aaa"):
        index.add([word], word, 1, word[:-1])
    index.touch(piece.name for piece in index.match(["a", "aa", "aaa"]))
    assert [index.evict_for(1 + number) for number in range(3)] == [["aaa"], ["aa"], ["a"]]


def test_blocks_without_their_prefix_do_not_match_until_it_is_back() -> None:
    index = DiskIndex(10)
    index.add(["a"], "one", 1, "")
    index.add(["ab"], "two", 1, "a")
    index.remove("one")
    assert index.match(["a", "ab"]) == ()
    assert index.find("ab") == Piece("two", 0, 1, 1)
    index.add(["a"], "one", 1, "")
    assert [piece.name for piece in index.match(["a", "ab"])] == ["one", "two"]
