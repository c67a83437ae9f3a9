"""Versions run as they would on a GPU, one configuration after the other; here under Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.kernels.messages import (
    VARIES,
    CaseTrace,
    Configs,
    FaultKind,
    KernelCheckRequest,
    ProgramRequest,
    TraceCase,
)
from mtmc_lsp.kernels.worker.check_command import ZeroIndices, poisoned
from mtmc_lsp.process.worker.kernel_compilation import share_kernels
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive
from tests.kernels.observing import HEADER

TUNED = (
    HEADER
    + """\
@triton.autotune(configs=[
    triton.Config({"BLOCK": 32}, num_warps=4),
], key=["n"])
@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(out_ptr + offsets, 2 * x, mask=offsets < n)


# mtmc: x=f32[N] N=100
def double(x):
    out = torch.empty_like(x)
    double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out
"""
)
CASE = TraceCase({"N": 100})


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(sys.executable, cwd=str(tmp_path_factory.mktemp("check")), env={"TRITON_INTERPRET": "1"}) as started:
        yield started


def checked(worker: Worker, source: str, original: str = TUNED, configs: Configs = Configs.FIRST) -> CaseTrace:
    target = find_target(original.encode(), "model.py", "double")
    workload = parse_directive(original.encode(), target, "model.py")
    assert workload is not None
    answer = worker.call(KernelCheckRequest(workload, original, source, (CASE,), configs), 120)
    assert not answer.problem
    return answer.cases[0]


def with_configuration(text: str) -> str:
    first = '    triton.Config({"BLOCK": 32}, num_warps=4),\n'
    return TUNED.replace(first, f"{first}    {text},\n")


def test_the_file_as_it_stands_tells_its_launches(worker: Worker) -> None:
    trace = checked(worker, TUNED)
    assert trace.is_sound
    assert [work.grid for work in trace.launches] == [(4, 1, 1)]
    assert trace.launches[0].launch.kernel == "double_kernel"
    assert trace.launches[0].launch.constexprs["BLOCK"] == 32
    assert trace.launches[0].numbers["n"] == 100


def test_every_new_configuration_is_compared(worker: Worker) -> None:
    sound = with_configuration('triton.Config({"BLOCK": 64}, num_warps=4)')
    assert checked(worker, sound, configs=Configs.OTHERS).is_sound
    wrong = with_configuration('triton.Config({"BLOCK": 64}, num_warps=4)')
    wrong = wrong.replace("tl.store(out_ptr + offsets, 2 * x", "tl.store(out_ptr + offsets, (2 + BLOCK // 64) * x")
    assert checked(worker, wrong).is_sound, "the first configuration is right"
    fault = checked(worker, wrong, configs=Configs.OTHERS).faults[0]
    assert fault.kind is FaultKind.WRONG_VALUES
    assert fault.detail.endswith("on the GPU with configuration 2")


def test_a_first_configuration_that_is_too_large_is_left_out(worker: Worker) -> None:
    failing = """
class OutOfResources(Exception):
    pass


def too_large(args):
    if args["BLOCK"] == 32:
        raise OutOfResources("shared memory")
    return False


"""
    text = with_configuration('triton.Config({"BLOCK": 64}, num_warps=4)').replace(
        "@triton.autotune", failing + "@triton.autotune"
    )
    text = text.replace("@triton.jit", '@triton.heuristics({"OTHER": too_large})\n@triton.jit')
    text = text.replace("BLOCK: tl.constexpr)", "BLOCK: tl.constexpr, OTHER: tl.constexpr)")
    original = checked(worker, text, text)
    assert original.is_sound and original.launches[0].launch.constexprs["BLOCK"] == 64
    assert checked(worker, text.replace("2 * x", "x + x"), text).is_sound
    wrong = checked(worker, text.replace("2 * x", "3 * x"), text).faults[0]
    assert wrong.kind is FaultKind.WRONG_VALUES
    none = text.replace('args["BLOCK"] == 32', 'args["BLOCK"]')
    assert checked(worker, none, text).faults[0].kind is FaultKind.RAISES
    assert "OutOfResources" in checked(worker, none, none).faults[0].detail


def test_an_exception_of_a_version_is_a_fault(worker: Worker) -> None:
    fault = checked(worker, TUNED.replace("    return out\n", "    return out + missing\n")).faults[0]
    assert fault.kind is FaultKind.RAISES
    assert "missing" in fault.detail


def test_a_program_runs_as_main_and_its_output_comes_back(worker: Worker, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("if __name__ == '__main__':\n    print('result', 3)\n")
    assert worker.call(ProgramRequest(str(file)), 60).output == "result 3\n"
    file.write_text("print('begun')\nraise ValueError('no input')\n")
    answer = worker.call(ProgramRequest(str(file)), 60)
    assert (answer.output, answer.problem) == ("begun\n", "ValueError: no input")


def test_a_file_whose_results_vary_is_not_compared(worker: Worker) -> None:
    varying = TUNED.replace("    return out\n", "    return out + next(numbers)\n").replace(
        "# mtmc:", "from itertools import count\n\nnumbers = count()\n\n\n# mtmc:"
    )
    trace = checked(worker, varying.replace("out + next", "5 + out + next"), varying)
    assert trace.refusal == VARIES


def test_a_program_uses_kernels_that_were_compiled_for_versions_of_its_file(tmp_path: Path) -> None:
    program = TUNED + "\n\nif __name__ == '__main__':\n    print(double_kernel.fn.cache_key)\n"
    file = tmp_path / "program.py"
    keys = []
    # Above the kernel, the file as it stands has fewer lines.
    for text in (program, program.replace("import triton\n", "import triton\n\n\n", 1)):
        file.write_text(text)
        with Worker(sys.executable, cwd=str(tmp_path), env={"TRITON_INTERPRET": "0"}) as compiling:
            keys.append(compiling.call(ProgramRequest(str(file)), 60).output)
    assert len(keys[0].strip()) > 20
    assert keys[0] == keys[1]
    version = load_user_module(str(file), program, "version_of_program")
    share_kernels(version)
    if isinstance(version.double_kernel.fn, JITFunction):
        assert version.double_kernel.fn.cache_key == keys[0].strip()


def test_new_integers_may_be_zero_while_other_new_tensors_stay_poisoned() -> None:
    with poisoned():
        assert torch.empty(3, dtype=torch.int32).tolist() == [2**31 - 1] * 3
        with ZeroIndices():
            for integers in (torch.empty(3, dtype=torch.int32), torch.empty_like(torch.ones(3, dtype=torch.int64))):
                assert integers.tolist() == [0] * 3
            assert torch.ones(3, dtype=torch.int32).new_empty(3).tolist() == [0] * 3
            assert torch.empty(3).isnan().all() and torch.ones(3).new_empty(3).isnan().all()
            assert torch.ones(3, dtype=torch.int32).tolist() == [1] * 3
