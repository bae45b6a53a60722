"""Block hashes: equal only for equal prefixes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.prefix_cache.block_hash import BlockHashes, block_hash, block_hashes, root_hash

ROOT = root_hash("a model")
tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)
words = st.tuples(st.integers(0, 8), st.text("ab\0é", max_size=3))
contents = st.lists(
    st.tuples(st.integers(0, 8), st.text("ab\0é", max_size=3)), max_size=2, unique_by=lambda pair: pair[0]
)


@settings(deadline=None)
@given(st.tuples(tokens, contents), st.tuples(tokens, contents))
def test_two_blocks_have_the_same_hash_only_if_they_are_equal(
    one: tuple[list[int], list[tuple[int, str]]], other: tuple[list[int], list[tuple[int, str]]]
) -> None:
    equal = one[0] == other[0] and sorted(one[1]) == sorted(other[1])
    assert (block_hash(ROOT, *one) == block_hash(ROOT, *other)) == equal


@settings(deadline=None)
@given(tokens, contents, st.integers(1, 4), st.integers(0, 9))
def test_hashes_can_be_computed_in_parts(
    tokens: list[int], media: list[tuple[int, str]], block: int, blocks: int
) -> None:
    cut = min(blocks, len(tokens) // block) * block
    media = [(position, name) for position, name in media if position < len(tokens)]
    whole = block_hashes(ROOT, tokens, media, block)
    first = block_hashes(ROOT, tokens[:cut], [item for item in media if item[0] < cut], block)
    rest = [(position - cut, name) for position, name in media if position >= cut]
    assert whole == first + block_hashes(first[-1] if first else ROOT, tokens[cut:], rest, block)
    assert len(whole) == -(-len(tokens) // block)


@settings(deadline=None)
@given(tokens, contents, st.integers(1, 4), st.lists(st.integers(0, 9), max_size=5))
def test_a_prefix_that_grows_has_the_same_hashes(
    tokens: list[int], media: list[tuple[int, str]], block: int, lengths: list[int]
) -> None:
    hashes = BlockHashes(ROOT, media, block)
    for length in lengths:
        part = tokens[:length]
        whole = len(part) // block * block
        inside = [(position, name) for position, name in media if position < whole]
        assert hashes.keys(part) == [ROOT, *block_hashes(ROOT, part[:whole], inside, block)]


def test_a_hash_depends_on_model_tokens_media_and_parent() -> None:
    keys = [
        block_hash(ROOT, (1, 2)),
        block_hash(root_hash("another model"), (1, 2)),
        block_hash(ROOT, (1, 2, 0)),
        block_hash(ROOT, (12,)),
        block_hash(ROOT, (2, 1)),
        block_hash(ROOT, (1, 2), [(0, "cat")]),
        block_hash(ROOT, (1, 2), [(1, "cat")]),
        block_hash(ROOT, (1, 2), [(0, "dog")]),
        block_hash(block_hash(ROOT, (1,)), (2,)),
    ]
    assert all(one != other for one, other in itertools.combinations(keys, 2))
    assert block_hash(ROOT, (1, 2), [(1, "b"), (0, "a")]) == block_hash(ROOT, (1, 2), [(0, "a"), (1, "b")])


def test_hashes_are_the_same_in_every_process() -> None:
    """They are file names on disk: changing them invalidates every cache there, so it must be deliberate."""
    assert root_hash("a model") == "4b4a3da38812a6e19542e0aacb80638cc65dfaea"
    assert block_hash(ROOT, (1, 2, 3), [(1, "cat")]) == "21a8309d74e7d2950ee69138c823813a75f11949"


def test_a_parent_that_is_not_a_hash_raises() -> None:
    with pytest.raises(ValueError, match="hex"):
        block_hash("not hex", (1,))
