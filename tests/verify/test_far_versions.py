"""The final version of an optimisation beyond 2^31 elements: what is wrong there is found, what cannot be seen is no fault."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pairs import REFERENCE

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.errors import FailureKind, OutOfMemory, WorkerFailed
from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.measure.local_measurer import LocalMeasurer
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.int32_overflow import FAR
from mtmc_lsp.verify.verification import Verification

PLENTY = 1e12
RAN = {"status": "ran", "launches": 1, "differing": []}
AGREES: dict[str, Any] = {"checks": [], "error": 1e-7, "reference_error": 1e-7, "differing": []}
DIFFERS = {**AGREES, "checks": [{"name": "result 0 values", "status": "failed", "detail": "far off"}]}


class Told:
    """Stands for the processes: each command has an answer, or raises one."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"reference": {"coarse": False, "large": False}, "candidate": RAN, "compare": AGREES, **answers}
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(self, worker: Any, command: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        name = command.rpartition(".")[2]
        self.asked.append((name, request))
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def take_results(self, to: Path) -> None:
        """As the candidate's process has it."""


def looked(judge: Any, told: Told, folder: Path, *, free_bytes: float = PLENTY, has_gpu: bool = True) -> Any:
    """What becomes of a version; the check."""
    one: Any = told
    verification = Verification(
        judge.capture(REFERENCE, "rms"), one, one, one,
        own=None, seed=3, precision="budget", has_gpu=has_gpu, secret=folder, inputs=folder, seconds=5.0,
    )  # fmt: skip
    return verification.verify_int32_offsets(Candidate("c", None, None, "text", None, None), free_bytes)


def test_a_version_is_called_once_with_more_elements_than_32_bits_count(judge: Any, tmp_path: Path) -> None:
    told = Told()
    check = looked(judge, told, tmp_path)
    assert (check.name, check.status) == ("offsets beyond 2^31", CheckStatus.PASSED)
    (request,) = [request for name, request in told.asked if name == "candidate"]
    assert request["repeats"] == 1
    sizes = request["case"]["sizes"]
    assert sizes["N"] * sizes["D"] > FAR


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"compare": DIFFERS}, "result 0 values: far off"),
        (
            {
                "candidate": {
                    "status": "runtime_error",
                    "reason": "an illegal memory access",
                    "failure": "gpu_context_lost",
                }
            },
            "illegal memory access",
        ),
        ({"candidate": WorkerFailed("its process ended with SIGSEGV", kind=FailureKind.CRASHED)}, "SIGSEGV"),
    ],
    ids=["values", "access", "crash"],
)
def test_what_is_wrong_there_fails(answers: Any, said: str, judge: Any, tmp_path: Path) -> None:
    check = looked(judge, Told(**answers), tmp_path)
    assert check.status is CheckStatus.FAILED
    assert said in check.detail
    assert "N=" in check.case


@pytest.mark.parametrize(
    ("answers", "more", "said"),
    [
        ({}, {"has_gpu": False}, "there is no GPU"),
        ({}, {"free_bytes": 1e9}, "GB are needed"),
        ({"candidate": {**RAN, "launches": 0}}, {}, "the guard leaves such sizes to the original code"),
        (
            {
                "candidate": {
                    "status": "runtime_error",
                    "reason": "it ran out of memory, which is limited",
                    "failure": "gpu_out_of_memory",
                }
            },
            {},
            "memory",
        ),
        ({"reference": OutOfMemory("the GPU's memory does not hold it")}, {}, "your own code does not take such sizes"),
        (
            {"reference": WorkerFailed("the time for the whole run was up", kind=FailureKind.DEADLINE)},
            {},
            "the time for the whole run",
        ),
        ({"candidate": WorkerFailed("took longer than 5 s", kind=FailureKind.TIMEOUT)}, {}, "took longer"),
    ],
    ids=["no GPU", "little memory", "guard", "candidate's memory", "reference's memory", "deadline", "slow"],
)
def test_what_cannot_be_seen_is_skipped_with_its_reason(
    answers: Any, more: Any, said: str, judge: Any, tmp_path: Path
) -> None:
    check = looked(judge, Told(**answers), tmp_path, **more)
    assert check.status is CheckStatus.SKIPPED
    assert said in check.detail


def test_a_run_that_is_cancelled_there_is_cancelled(judge: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="cancelled"):
        looked(judge, Told(candidate=WorkerFailed("it was cancelled", kind=FailureKind.CANCELLED)), tmp_path)


DOUBLED = """\
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = OFFSET * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count) * 2, mask=at < count)


# mtmc: x=f16[N,D] N=4096 D=1024
def doubled(x):
    if x.is_cuda and not x.requires_grad:
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out
    return x * 2
"""
NEAR, WIDE = "tl.program_id(0)", "tl.program_id(0).to(tl.int64)"


@pytest.mark.gpu
def test_a_kernel_with_offsets_of_32_bits_is_right_on_the_workload_and_wrong_beyond(tmp_path: Path) -> None:
    own = "import torch\n\n\n# mtmc: x=f16[N,D] N=4096 D=1024\ndef doubled(x):\n    return x * 2\n"
    path = tmp_path / "model.py"
    path.write_text(own)
    target = find_target(own.encode(), str(path), "doubled")
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        capture = run_capture(find_workload(str(path), own.encode(), target), own.encode(), worker, 120)
    measurer = LocalMeasurer(capture, sys.executable)
    try:
        for offset, status in ((NEAR, CheckStatus.FAILED), (WIDE, CheckStatus.PASSED)):
            candidate = Candidate(offset, None, None, DOUBLED.replace("OFFSET", offset), None, None)
            assert measurer.verify(candidate).is_correct
            check = measurer.verify_int32_offsets(candidate)
            if check.status is CheckStatus.SKIPPED:
                pytest.skip(check.detail)
            assert check.status is status, check
    finally:
        measurer.close()
