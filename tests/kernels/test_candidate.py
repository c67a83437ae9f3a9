"""The cases on which verification compares a launcher with its reference."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.kernels.candidate import LauncherInFile
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.trials import Trial
from tests.search.fakes import capture

TEXT = "BLOCK = 64\n"


def cases(text: str) -> tuple[Case, ...]:
    one = capture()
    target = replace(one.workload.target, kind=TargetKind.FUNCTION)
    candidate = LauncherInFile(one, target, text, original=TEXT)
    return candidate.cases(Trial(one), interpreted=True, seed=0)


def test_an_author_gets_contiguous_finite_arguments_with_elements() -> None:
    found = cases(TEXT)
    assert len(found) > 5
    assert {case.layout for case in found} == {""}
    assert not {case.distribution for case in found} & {"nan", "infinite", "denormal", "constant"}
    assert all(all(case.sizes.values()) for case in found)


def test_all_repairs_of_a_file_get_the_same_cases() -> None:
    assert cases(TEXT) == cases("BLOCK = 128\nlimit = 3.5\n")
