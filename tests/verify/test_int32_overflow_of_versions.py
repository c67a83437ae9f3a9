"""The final version of an optimisation beyond 2^31 elements: wrong versions fail, and what cannot run is skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pairs import REFERENCE

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.errors import FailureKind, OutOfMemory, WorkerFailed
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.measure.local_measurer import LocalMeasurer
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.adapters import VersionInFile
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.int32_overflow import FAR
from mtmc_lsp.verify.messages import CandidateAnswer, CandidateRequest, JudgeAnswer, ReferenceAnswer
from mtmc_lsp.verify.reference import Reference

RAN = CandidateAnswer("ran", launches=1)
AGREES = JudgeAnswer((), 1e-7, 1e-7)
DIFFERS = JudgeAnswer((Check("result 0 values", CheckStatus.FAILED, "", "far off"),))


class FakeProcesses:
    """Stands for the processes: each command has an answer, or raises an error."""

    gpu = ""

    def __init__(self, free_bytes: float, answers: Any) -> None:
        self.free_bytes = free_bytes
        self.answers = {
            "verify.reference": ReferenceAnswer(True, False),
            "verify.candidate": RAN,
            "verify.judge": AGREES,
        }
        self.answers |= {f"verify.{name}": answer for name, answer in answers.items()}
        self.requests: list[Any] = []

    def call(self, request: Any, seconds: float, *_: object) -> Any:
        self.requests.append(request)
        answer = self.answers[request.command]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take_results(self, to: Path) -> None:
        """There are none."""

    def next(self) -> None:
        """Nothing runs."""

    def release_memory(self, seconds: float) -> None:
        """There is none."""

    kill = close = next


def far_check(
    judge: Any, /, *, free_bytes: float = 1e12, has_gpu: bool = True, **answers: Any
) -> tuple[Check, FakeProcesses]:
    """The check of a version, and the processes that stood in."""
    processes: Any = FakeProcesses(free_bytes, answers)
    capture = judge.capture(REFERENCE, "rms")
    with Reference(capture, REFERENCE, sys.executable, seed=3, worker=processes) as reference:
        engine = VerificationEngine(reference, processes)
        engine.has_gpu = has_gpu
        return engine.verify_int32_offsets(VersionInFile(capture, REFERENCE, "@triton.jit")), processes


def test_a_version_is_called_once_with_more_elements_than_32_bits_count(judge: Any) -> None:
    check, processes = far_check(judge)
    assert (check.name, check.status) == ("offsets beyond 2^31", CheckStatus.PASSED)
    (request,) = [request for request in processes.requests if isinstance(request, CandidateRequest)]
    assert (request.calls.repeats, request.calls.changes_contents) == (0, False)
    sizes = request.data.case.sizes
    assert sizes["N"] * sizes["D"] > FAR


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"judge": DIFFERS}, "result 0 values: far off"),
        ({"candidate": CandidateAnswer("runtime_error", "an illegal memory access")}, "illegal memory access"),
        ({"candidate": WorkerFailed("the process ended with SIGSEGV", kind=FailureKind.CRASHED)}, "SIGSEGV"),
    ],
    ids=["values", "access", "crash"],
)
def test_what_is_wrong_there_fails(answers: Any, said: str, judge: Any) -> None:
    check, _ = far_check(judge, **answers)
    assert check.status is CheckStatus.FAILED
    assert said in check.detail
    assert "N=" in check.case


LATE = WorkerFailed("the time limit of the whole run was reached", kind=FailureKind.DEADLINE)
NO_MEMORY = CandidateAnswer("runtime_error", "it ran out of memory", FailureKind.GPU_OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"has_gpu": False}, "there is no GPU"),
        ({"free_bytes": 1e9}, "GB are needed"),
        ({"candidate": CandidateAnswer("ran", launches=0)}, "no kernel runs at such sizes"),
        ({"candidate": NO_MEMORY}, "out of memory"),
        ({"reference": OutOfMemory("the GPU is out of memory")}, "the reference does not accept such sizes"),
        ({"reference": LATE}, "the time limit of the whole run"),
        ({"candidate": WorkerFailed("took longer than 5 s", kind=FailureKind.TIMEOUT)}, "took longer"),
    ],
    ids=["no GPU", "little memory", "guard", "candidate's memory", "reference's memory", "deadline", "slow"],
)
def test_what_cannot_run_is_skipped_with_its_reason(answers: Any, said: str, judge: Any) -> None:
    check, _ = far_check(judge, **answers)
    assert check.status is CheckStatus.SKIPPED
    assert said in check.detail


def test_a_run_that_is_cancelled_there_is_cancelled(judge: Any) -> None:
    with pytest.raises(WorkerFailed, match="cancelled"):
        far_check(judge, candidate=WorkerFailed("it was cancelled", kind=FailureKind.CANCELLED))


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
    if x.is_cuda and x.is_contiguous() and not x.requires_grad:
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
