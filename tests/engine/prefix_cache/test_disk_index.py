"""The index of files on disk, against a plain model of it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millstream.engine.prefix_cache.disk.index import DiskIndex, Piece
from support.tiers import examples

BUDGET = 100

letters = st.text("ab", min_size=1, max_size=7)


def chain(word: str) -> list[str]:
    """A key says all that is before it, as real ones do."""
    return [word[: end + 1] for end in range(len(word))]


class Index(RuleBasedStateMachine):
    """The model: files oldest first, each a word's letters from `first` on. The key of a letter is the word so far."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex(BUDGET)
        self.files: dict[str, tuple[str, int, int]] = {}

    def recent(self, name: str) -> None:
        self.files[name] = self.files.pop(name)

    def lineage(self, word: str) -> list[str]:
        """Names of the files that a block on this word stands on, end first."""
        names = []
        while True:
            held = [(name, text) for name, (text, first, _) in self.files.items() if first < len(word)]
            holders = [name for name, text in held if text.startswith(word)]
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
        spared = self.lineage(word[:first])
        room = BUDGET - sum(self.files[file][2] for file in spared)
        leaving = self.index.evict_for(size, word[:first])
        if size > room:
            assert leaving is None
            return
        assert leaving is not None
        expected = []
        for file in [file for file in self.files if file not in spared]:
            if sum(entry[2] for entry in self.files.values()) + size > BUDGET:
                expected.append(file)
                del self.files[file]
        assert leaving == expected
        touched = self.index.add(chain(word)[first:], name, size, word[:first])
        self.files[name] = (word, first, size)
        assert touched == spared
        for file in spared:
            self.recent(file)

    @rule(word=letters)
    def look(self, word: str) -> None:
        pieces = self.index.match(chain(word))
        at = 0
        for piece in pieces:
            text, first, _ = self.files[piece.name]
            assert piece.count > 0 and piece.blocks == len(text) - first
            assert piece.first == at - first
            assert text.startswith(word[: at + piece.count]), "a piece of something else"
            assert not any(self.reach(name, word, at) > piece.count for name in self.files), "a longer piece is there"
            at += piece.count
        assert at == len(word) or not any(self.reach(name, word, at) for name in self.files), "more is there"
        names = [piece.name for piece in pieces]
        assert self.index.touch(names) == names[::-1]
        for name in names[::-1]:
            self.recent(name)

    def reach(self, name: str, word: str, at: int) -> int:
        """How many letters of the word, from place `at` on, a file has."""
        text, first, _ = self.files[name]
        end = at
        while first <= at and end < min(len(text), len(word)) and text[: end + 1] == word[: end + 1]:
            end += 1
        return end - at

    @rule(word=letters)
    def find(self, word: str) -> None:
        piece = self.index.find(word)
        ends = {name for name, (text, _, _) in self.files.items() if text == word}
        assert (piece.name in ends and piece.to_the_end and piece.first == 0) if piece else not ends
        held = any(text.startswith(word) and first < len(word) for text, first, _ in self.files.values())
        assert self.index.holds(word) == held

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
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
    def the_same_and_bounded(self) -> None:
        assert len(self.index) == len(self.files)
        assert self.index.bytes == sum(size for _, _, size in self.files.values()) <= BUDGET
        assert all(name in self.index for name in self.files)


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def test_a_shared_beginning_outlives_the_tails_that_stand_on_it() -> None:
    index = DiskIndex(10)
    index.add(["s", "sy"], "system", 4, "")
    for number in range(20):
        assert index.evict_for(3, "sy") is not None
        index.add([f"sy{number}"], f"tail-{number}", 3, "sy")
    assert index.match(["s", "sy", "sy19"]) == (Piece("system", 0, 2, 2), Piece("tail-19", 0, 1, 1))
    assert index.match(["s", "sy", "sy0"]) == (Piece("system", 0, 2, 2),)


def test_a_beginning_does_not_leave_for_its_own_continuation() -> None:
    index = DiskIndex(10)
    index.add(["a"], "one", 6, "")
    assert index.evict_for(5, "a") is None
    assert index.evict_for(5) == ["one"]


def test_a_chain_leaves_from_its_end() -> None:
    index = DiskIndex(3)
    for word in ("a", "aa", "aaa"):
        index.add([word], word, 1, word[:-1])
    index.touch(piece.name for piece in index.match(["a", "aa", "aaa"]))
    assert [index.evict_for(1 + number) for number in range(3)] == [["aaa"], ["aa"], ["a"]]


def test_a_lost_beginning_hides_what_stands_on_it_until_it_is_back() -> None:
    index = DiskIndex(10)
    index.add(["a"], "one", 1, "")
    index.add(["ab"], "two", 1, "a")
    index.remove("one")
    assert index.match(["a", "ab"]) == ()
    assert index.find("ab") == Piece("two", 0, 1, 1)
    index.add(["a"], "one", 1, "")
    assert [piece.name for piece in index.match(["a", "ab"])] == ["one", "two"]
