"""Who may enter, and what those are told who may not."""

from __future__ import annotations

import pytest

from millstream.errors import BadRequest, EngineBusy
from millstream.service.admission import Admission


def test_places_are_given_and_given_back() -> None:
    admission = Admission(capacity=2, queue=1, fail_fast=False)
    admission.admit([1, 2, 3])
    assert (admission.active, admission.waiting) == (2, 1)
    with pytest.raises(EngineBusy) as refused:
        admission.admit([4])
    assert (refused.value.active, refused.value.waiting, refused.value.retry_after) == (2, 1, 1)
    admission.release(2)
    assert (admission.active, admission.waiting) == (2, 0)
    admission.admit([4])


def test_a_refusal_names_who_is_active() -> None:
    admission = Admission(capacity=1, queue=8, fail_fast=True)
    admission.admit([17])
    with pytest.raises(EngineBusy, match=r"1 active \(request 17 for 0.0 s\), 0 waiting"):
        admission.check(1)


def test_of_many_it_names_a_few() -> None:
    admission = Admission(capacity=6, queue=0, fail_fast=True)
    admission.admit([1, 2, 3, 4, 5, 6])
    with pytest.raises(EngineBusy, match=r"6 active \(request 1 for .*, request 3 for .* s, 3 more\)"):
        admission.check(1)


def test_checking_takes_nothing() -> None:
    admission = Admission(capacity=1, queue=0, fail_fast=False)
    admission.check(1)
    admission.check(1)
    admission.admit([1])
    with pytest.raises(EngineBusy):
        admission.check(1)


def test_all_or_none() -> None:
    admission = Admission(capacity=2, queue=0, fail_fast=False)
    admission.admit([1])
    with pytest.raises(EngineBusy):
        admission.admit([2, 3])
    assert admission.active == 1
    with pytest.raises(BadRequest, match="at most 2"):
        admission.admit([2, 3, 4])
