"""Admission: which requests an engine accepts, and how it rejects the others."""

from __future__ import annotations

import pytest

from millstream.errors import BadRequest, EngineBusy
from millstream.service.admission import Admission


def test_capacity_and_queue_are_limited_and_released() -> None:
    admission = Admission(capacity=2, queue=1, fail_fast=False)
    admission.admit([1, 2, 3])
    assert (admission.active, admission.waiting) == (2, 1)
    with pytest.raises(EngineBusy) as refused:
        admission.admit([4])
    assert (refused.value.active, refused.value.waiting, refused.value.retry_after) == (2, 1, 1)
    admission.release(2)
    assert (admission.active, admission.waiting) == (2, 0)
    admission.admit([4])


def test_a_rejection_lists_active_requests() -> None:
    admission = Admission(capacity=1, queue=8, fail_fast=True)
    admission.admit([17])
    with pytest.raises(EngineBusy, match=r"1 active \(request 17 for 0.0 s\), 0 waiting"):
        admission.check(1)


def test_a_rejection_lists_only_a_few_requests() -> None:
    admission = Admission(capacity=6, queue=0, fail_fast=True)
    admission.admit([1, 2, 3, 4, 5, 6])
    with pytest.raises(EngineBusy, match=r"6 active \(request 1 for .*, request 3 for .* s, 3 more\)"):
        admission.check(1)


def test_check_admits_nothing() -> None:
    admission = Admission(capacity=1, queue=0, fail_fast=False)
    admission.check(1)
    admission.check(1)
    admission.admit([1])
    with pytest.raises(EngineBusy):
        admission.check(1)


def test_requests_are_admitted_all_or_none() -> None:
    admission = Admission(capacity=2, queue=0, fail_fast=False)
    admission.admit([1])
    with pytest.raises(EngineBusy):
        admission.admit([2, 3])
    assert admission.active == 1
    with pytest.raises(BadRequest, match="at most 2"):
        admission.admit([2, 3, 4])
