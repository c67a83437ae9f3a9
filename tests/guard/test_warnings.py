"""``MTMC_GUARD=warn``: the user's program says once for each reason why the kernels do not run."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from types import ModuleType

import pytest

TEXT = """
import torch


# mtmc: x=f32[N,16] gain=f32[16] N=6
def gained(x, gain):
    return torch.relu(x) * gain + 1
"""
PROGRAM = """
import torch
from model import gained

torch.manual_seed(0)
x, gain = torch.randn(3, 16), torch.randn(16)
expected = torch.relu(x) * gain + 1
assert torch.allclose(gained(x, gain), expected)
for _ in range(3):
    assert torch.allclose(gained(x.double(), gain.double()), expected.double())
    assert torch.equal(gained(x.half(), gain.half()), torch.relu(x.half()) * gain.half() + 1)
    assert torch.allclose(gained(x, gain.clone().requires_grad_()), expected)
print("done")
"""
Run = Callable[..., "CompletedProcess[str]"]


def test_each_reason_is_reported_once_with_file_and_target(run_program: Run) -> None:
    done = run_program(TEXT, "gained", PROGRAM, MTMC_GUARD="warn")
    assert done.stdout == "done\n"
    reported = [line.partition("KernelsDoNotRun: ")[2] for line in done.stderr.splitlines() if "KernelsDo" in line]
    assert reported == [
        "model.py::gained runs its original code: x is float64; the kernels were made for float32",
        "model.py::gained runs its original code: gradients are recorded for gain: "
        "call it under torch.no_grad() or torch.inference_mode()",
    ]
    assert "model.py:" in done.stderr and "# mtmc: dispatch" in done.stderr, "the line of the dispatch statement"


def test_nothing_is_reported_without_the_variable(run_program: Run) -> None:
    done = run_program(TEXT, "gained", PROGRAM, MTMC_GUARD="")
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_without_the_variable_the_guard_is_the_function_itself(load: Callable[[str, str], ModuleType]) -> None:
    """So it costs nothing at run time."""
    guard = load(TEXT, "gained").gained_fits
    assert not hasattr(guard, "__wrapped__") and guard.__code__.co_name == "gained_fits"


COMPILED = """
import torch
from model import gained

torch.manual_seed(0)
x, gain = torch.randn(3, 16), torch.randn(16)
compiled = torch.compile(gained, backend="eager", fullgraph=True)
assert torch.allclose(compiled(x.double(), gain.double()), (torch.relu(x) * gain + 1).double())
print("done")
"""


@pytest.mark.slow
def test_a_compiled_caller_is_traced_as_without_the_variable(run_program: Run) -> None:
    done = run_program(TEXT, "gained", COMPILED, MTMC_GUARD="warn")
    assert done.stdout == "done\n"
    assert "KernelsDoNotRun" not in done.stderr
