"""Dataclasses that are made quickly are the same as others, but for the time it takes to make one."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace

import pytest

from millstream.types import pickled_by_value, quickly_made


@quickly_made
@dataclass(frozen=True, slots=True)
class Base:
    number: int


@pickled_by_value
@quickly_made
@dataclass(frozen=True, slots=True)
class Derived(Base):
    text: str = "plain"
    items: list[int] = field(default_factory=list, hash=False)
    secret: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Slow(Base):
    more: int = 2


def test_arguments_and_defaults() -> None:
    made = Derived(1)
    assert (made.number, made.text, made.items, made.secret) == (1, "plain", [], ())
    assert made.items is not Derived(1).items
    assert Derived(1, "x", [2], (3,)) == Derived(secret=(3,), items=[2], text="x", number=1)
    with pytest.raises(TypeError, match="number"):
        Derived()  # type: ignore[call-arg]


def test_they_compare_hash_copy_and_pickle() -> None:
    made = Derived(1, "x", [2], (3,))
    assert replace(made, number=7) == Derived(7, "x", [2], (3,))
    assert made != Base(1)
    assert hash(Derived(1)) == hash(Derived(1))
    assert pickle.loads(pickle.dumps(made)) == made
    assert pickle.loads(pickle.dumps(Base(4))) == Base(4)
    assert repr(made) == "Derived(number=1, text='x', items=[2])"


def test_a_class_that_is_not_marked_may_be_derived() -> None:
    assert (Slow(1).number, Slow(1, 5).more) == (1, 5)
    assert pickle.loads(pickle.dumps(Slow(3))) == Slow(3)
