"""A report of ``compute-sanitizer`` becomes checks; what runs under it here is a program that writes such reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.verify.sanitizer import Sanitizer, error_in_report, find_sanitizer, findings
from tests.cli.runner import mtmc

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at scale_kernel(float *, int)+0x1d0 in fast.py:12
=========     by thread (31,0,0) in block (3,0,0)
=========     Address 0x7f5dcfa00fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f5dcfa00000 of size 4,000 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x331b45] in libcuda.so.1
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call to cuCtxSynchronize.
=========     Saved host backtrace up to driver entry point at error
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
OLDER = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at 0xd80 in /home/user/fast.py:7:scale_kernel(__half *, int)
=========     by thread (63,0,0) in block (506,0,0)
=========     Address 0x7fcd07a0312c is out of bounds
========= ERROR SUMMARY: 1 error
"""
UNINITIALISED = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at scale_kernel+0x70 in fast.py:9
=========     by thread (31,0,0) in block (1,0,0)
=========     Access to 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at scale_kernel+0x460 in fast.py:14
=========     and Read access at scale_kernel+0x7a0 in fast.py:15 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NO_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
CRASH = """========= COMPUTE-SANITIZER
========= Error: process didn't terminate successfully
========= Target application returned an error
========= ERROR SUMMARY: 0 errors
"""
NOTHING_SEEN = """========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= ERROR SUMMARY: 0 errors
"""

PROGRAM = """#!{python}
import pathlib, subprocess, sys
words = sys.argv[1:]
tool, log = words[words.index("--tool") + 1], pathlib.Path(words[words.index("--log-file") + 1])
target = words[words.index("application-only") + 1 :]
code = subprocess.run(target).returncode
with open({ran!r}, "a") as ran:
    ran.write(f"{{tool}} {{code}}\\n")
report = {reports!r}.get(tool)
if report is None:
    sys.exit(9)
log.write_text(report)
sys.exit(code)
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[dict[str, str]], tuple[Path, Path]]:
    """Makes a ``compute-sanitizer`` that runs its target and then reports what it is told to, by tool."""

    def make(reports: dict[str, str]) -> tuple[Path, Path]:
        folder, ran = tmp_path / "bin", tmp_path / "ran"
        folder.mkdir()
        path = folder / "compute-sanitizer"
        path.write_text(PROGRAM.format(python=sys.executable, ran=str(ran), reports=reports))
        path.chmod(0o755)
        return path, ran

    return make


@pytest.fixture
def sanitized(program: Any, judge: Any, tmp_path: Path) -> Callable[..., tuple[Verdict, str]]:
    """The verdict on a candidate that is run under such a program too, and what the program ran."""

    def verdict(reports: dict[str, str], candidate: str = HONEST) -> tuple[Verdict, str]:
        path, ran = program(reports)
        sanitizer = Sanitizer(str(path), sys.executable, str(tmp_path), gpu=False)
        found = judge(REFERENCE, "rms", candidate, "fast", sanitizer=sanitizer)
        return found, ran.read_text() if ran.exists() else ""

    return verdict


def test_clean_reports_are_checks_that_passed(sanitized: Callable[..., tuple[Verdict, str]]) -> None:
    verdict, ran = sanitized({"memcheck": CLEAN, "initcheck": CLEAN, "racecheck": NO_RACE})
    assert verdict.is_correct, verdict.reason
    names = {check.name for check in verdict.checks if check.status is CheckStatus.PASSED}
    assert {f"compute-sanitizer {tool}" for tool in ("memcheck", "initcheck", "racecheck")} <= names
    assert ran == "memcheck 0\ninitcheck 0\nracecheck 0\n", "the candidate ran each time, locked in"


def test_an_error_is_a_failed_check_with_kernel_line_and_address(sanitized: Callable[..., tuple[Verdict, str]]) -> None:
    verdict, ran = sanitized({"memcheck": OUT_OF_BOUNDS})
    assert verdict.status is VerdictStatus.INCORRECT
    for said in ("memcheck", "Invalid __global__ write", "scale_kernel", "fast.py:12", "0x7f5dcfa00fa0", "4,000 bytes"):
        assert said in verdict.reason
    assert ran == "memcheck 0\n"


def test_a_candidate_that_fails_under_it_alone_is_refused(sanitized: Callable[..., tuple[Verdict, str]]) -> None:
    fails = changed(
        HONEST,
        ("    return out\n", "    import os\n    if 'PYTORCH_NO_CUDA_MEMORY_CACHING' in os.environ:\n        os._exit(11)\n    return out\n"),
    )  # fmt: skip
    verdict, ran = sanitized({"memcheck": CRASH}, fails)
    assert "failed under memcheck (exit code 11)" in verdict.reason
    assert ran == "memcheck 11\n"


def test_a_program_that_looks_at_nothing_is_an_error_of_the_environment(
    sanitized: Callable[..., tuple[Verdict, str]],
) -> None:
    with pytest.raises(EnvironmentNotAble, match="observed no kernel"):
        sanitized({"memcheck": NOTHING_SEEN})


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (OLDER, "read of size 2 bytes in scale_kernel (/home/user/fast.py:7), Address 0x7fcd07a0312c is out of bounds"),
        (UNINITIALISED, "memory read of size 4 bytes in scale_kernel (fast.py:9), Access to 0x7f3c7ec000fc"),
        (RACE, "in scale_kernel (fast.py:14)"),
    ],
)
def test_other_forms_of_reports_are_read(report: str, said: str) -> None:
    assert said in error_in_report("any", report, 1)


def test_what_follows_from_an_error_is_not_told_first() -> None:
    assert len(findings(OUT_OF_BOUNDS)) == 2
    assert "Program hit" not in error_in_report("memcheck", OUT_OF_BOUNDS, 1)


def test_without_the_program_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "candidate.py").write_text(HONEST)
    monkeypatch.setattr("mtmc_lsp.verify.sanitizer.DEFAULT_FOLDER", "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentNotAble, match="not installed"):
        find_sanitizer()
    answer = mtmc(tmp_path, "verify", "reference.py::rms", "candidate.py::fast", "--sanitize", "--json")
    assert answer.code == 3
    assert "CUDA toolkit" in answer.out + answer.err
