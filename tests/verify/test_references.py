"""References that are computed ahead: in order, each seen as soon as it is there, and none twice."""

from __future__ import annotations

import threading

import pytest

from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.verification import Prepared, References

CASES = [Case({"N": n}, "normal", n) for n in range(5)]


def test_a_case_is_there_before_the_next_ones_reference_is_computed() -> None:
    go_on = threading.Event()

    def prepare(case: Case, number: int) -> Prepared:
        if number == 1:
            assert go_on.wait(10)
        return Prepared(number, case, False)

    references = References(CASES, prepare)
    computing = threading.Thread(target=references.compute)
    computing.start()
    seen = iter(references)
    assert next(seen).case is CASES[0]
    go_on.set()
    assert [made.case for made in seen] == CASES[1:]
    computing.join()
    assert [made.case for made in references] == CASES, "the next candidate finds them all"


def test_cases_that_the_users_code_does_not_take_leave_no_gap_in_the_numbers() -> None:
    references = References(CASES, lambda case, number: Prepared(number, case, False) if case.seed % 2 else None)
    references.compute()
    assert [(made.number, made.case.seed) for made in references] == [(0, 1), (1, 3)]


def test_what_ends_the_computing_is_raised_after_what_was_made_before() -> None:
    def prepare(case: Case, number: int) -> Prepared:
        if number == 2:
            raise WorkerFailed("cancelled", kind=FailureKind.CANCELLED)
        return Prepared(number, case, False)

    references = References(CASES, prepare)
    references.compute()
    for _ in range(2):
        seen = iter(references)
        assert [next(seen).number, next(seen).number] == [0, 1]
        with pytest.raises(WorkerFailed, match="cancelled"):
            next(seen)


def test_while_something_is_compared_no_further_reference_is_begun() -> None:
    begun: list[int] = []
    references = References(CASES, lambda case, number: begun.append(number) or Prepared(number, case, False))
    with references.comparing(), references.comparing():
        computing = threading.Thread(target=references.compute)
        computing.start()
        computing.join(0.2)
        assert not begun
    computing.join(10)
    assert begun == list(range(5))


def test_in_step_a_reference_is_computed_when_it_is_asked_for() -> None:
    begun: list[int] = []

    def prepare(case: Case, number: int) -> Prepared | None:
        begun.append(case.seed)
        return Prepared(number, case, False) if case.seed != 2 else None

    references = References(CASES, prepare, in_step=lambda: True)
    computing = threading.Thread(target=references.compute)
    computing.start()
    seen = iter(references)
    for expected in ([0], [0, 1], [0, 1, 2, 3]):
        next(seen)
        computing.join(0.1)
        assert begun == expected, "beside a candidate nothing is computed; what is not taken leaves no gap"
    references.end()
    computing.join(10)
    assert not computing.is_alive() and begun == [0, 1, 2, 3]
    assert [made.case.seed for made in references] == [0, 1, 3]
