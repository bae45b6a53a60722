"""Tokens that a kernel writes to the host's memory are read from there."""

from __future__ import annotations

import ctypes
import gc

import mlx.core as mx
import pytest

from millstream.backend.generation import batch as batch_module
from millstream.backend.generation.batch import Launched
from millstream.backend.generation.sampling import kernel_check
from millstream.backend.kernels import outbox as outbox_module
from millstream.backend.kernels import sample
from millstream.backend.kernels.outbox import NUMBERS, PLACES, Letter, Outbox


@pytest.fixture
def memory() -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * (PLACES * NUMBERS))()


@pytest.fixture
def box(memory: ctypes.Array[ctypes.c_int32]) -> Outbox:
    return Outbox(ctypes.addressof(memory))


def write(letter: Letter, numbers: list[int]) -> None:
    """As a kernel does."""
    (ctypes.c_int32 * len(numbers)).from_address(letter.address.tolist()[0])[:] = numbers  # type: ignore[index]


def test_launches_have_places_of_their_own(box: Outbox) -> None:
    letters = [box.take(3) for _ in range(PLACES)]
    assert box.take(3) is None, "all of them are on their way"
    for number, letter in enumerate(letters):
        assert letter is not None
        write(letter, [number, -1, 7])
    assert [letter.read(3) for letter in letters if letter is not None] == [[n, -1, 7] for n in range(PLACES)]
    del letter, letters
    gc.collect()
    assert len({id(each) for each in [box.take(NUMBERS) for _ in range(PLACES)]}) == PLACES
    assert box.take(NUMBERS + 1) is None, "no room"


def test_a_step_is_read_from_the_hosts_memory(box: Outbox) -> None:
    letter = box.take(2)
    assert letter is not None
    write(letter, [5, 6])
    launched = Launched((1, None), mx.array([8, 9]), None, letter)
    assert [row.tokens for row in launched.read({1})] == [(5,)]
    assert [row.tokens for row in Launched((1, None), mx.array([8, 9]), None).read({1})] == [(8,)]


@pytest.mark.parametrize("reaches", [True, False])
def test_a_load_sees_whether_writes_reach_the_host(reaches: bool, box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module._of_thread, "outbox", box, raising=False)

    def play(
        logits: mx.array, settings: mx.array, seeds: mx.array, positions: mx.array, letter: Letter | None
    ) -> tuple[mx.array, mx.array]:
        tokens = kernel_check.Sampler(kernel_check.ROWS)(logits, positions)
        assert letter is not None
        write(letter, tokens.tolist() if reaches else [0] * len(kernel_check.ROWS))  # type: ignore[arg-type]
        return tokens, positions + 1

    monkeypatch.setattr(sample, "sample", play)

    class Model:
        def parameters(self) -> dict[str, mx.array]:
            return {"weight": mx.zeros((1,))}

    assert kernel_check.kernel_agrees(Model()), "the kernel itself is right"
    assert (batch_module.outbox() is box) == reaches


def test_without_cuda_there_is_no_outbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(outbox_module._of_thread, "outbox", raising=False)
    monkeypatch.setattr(outbox_module, "_driver", lambda: None)
    assert batch_module.outbox() is None
    monkeypatch.delattr(outbox_module._of_thread, "outbox")

    class Refusing:
        def cuMemHostAlloc(self, *given: object) -> int:
            return 2

    monkeypatch.setattr(outbox_module, "_driver", Refusing)
    assert batch_module.outbox() is None
    monkeypatch.delattr(outbox_module._of_thread, "outbox")
