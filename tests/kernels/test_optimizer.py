"""The order in which edits are tried, with scripted observations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.results import CompileReport, Timing, Verdict
from mtmc_lsp.core.run import KernelLaunch, Step, StepStatus
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.kernels.messages import CaseTrace, LaunchWork, TraceCase
from mtmc_lsp.kernels.optimizer import SourceOptimizer
from tests.kernels.test_free_blocks import ROWS

CASE = TraceCase({})
LAUNCH = KernelLaunch("rows_kernel", {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3)
SOUND = CaseTrace(CASE, launches=(LaunchWork(LAUNCH, (8, 1, 1), 8, 8, 1e6, {"M": 512, "N": 512}),))


class Silent:
    def on_action(self, index: int, action: MacroAction) -> None: ...

    def on_step(self, step: Step) -> None: ...

    def on_stage(self, stage: str) -> None: ...


class Scripted:
    """Observes nothing: texts that contain a word do not end."""

    has_gpu = False
    device: DeviceModel = default_model()
    triton = (3, 6)

    def __init__(self, endless: str) -> None:
        self.endless = endless

    def observe(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        return () if self.endless and self.endless.encode() in text else (SOUND,)

    def work(self, text: bytes) -> CaseTrace | None:
        return SOUND

    def compiled(self, text: bytes, trace: CaseTrace) -> CompileReport:
        return CompileReport(())

    def verify(self, text: bytes) -> Verdict | None:
        return None

    def time(self, text: bytes, previous: bytes | None, bound_us: float, least_us: float) -> Timing | None:
        return None


@pytest.mark.parametrize(
    ("endless", "statuses", "blocks"),
    [
        ("", [StepStatus.ACCEPTED], True),
        ('"BLOCK_M": 128', [StepStatus.FAILED, StepStatus.ACCEPTED], False),
        ("triton.Config", [StepStatus.FAILED, StepStatus.FAILED], False),
    ],
)
def test_block_sizes_that_fail_leave_warps_to_be_tuned(endless: str, statuses: list[StepStatus], blocks: bool) -> None:
    optimizer = SourceOptimizer(
        "model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), Scripted(endless), Silent(), 60.0
    )
    text = optimizer.run().decode()
    tuned = [step for step in optimizer.steps if step.action.params["change"] == "autotune"]
    assert [step.status for step in tuned] == statuses
    assert ('"BLOCK_M"' in text) == blocks
    assert ("triton.autotune" in text) == (StepStatus.ACCEPTED in statuses)


@pytest.mark.parametrize(
    ("seconds_each", "has_gpu", "configurations"), [(0.1, True, 12), (9.0, True, 4), (9.0, False, 12)]
)
def test_kernels_that_compile_slowly_get_fewer_configurations(
    seconds_each: float, has_gpu: bool, configurations: int
) -> None:
    class Slow(Scripted):
        def compiled(self, text: bytes, trace: CaseTrace) -> CompileReport:
            return CompileReport((), seconds_each)

    tools = Slow("")
    tools.has_gpu = has_gpu
    optimizer = SourceOptimizer("model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), tools, Silent(), 30.0)
    optimizer.run()
    tuned = next(step for step in optimizer.steps if step.action.params["change"] == "autotune")
    assert tuned.candidate is not None
    assert tuned.candidate.source.count("triton.Config(") == configurations


def test_accepted_edits_stay_if_the_processes_end() -> None:
    class Ending(Scripted):
        def work(self, text: bytes) -> CaseTrace | None:
            if text != ROWS.encode():
                raise WorkerFailed("kernels.trace was cancelled", kind=FailureKind.CANCELLED)
            return SOUND

    tools = Ending("")
    tools.has_gpu = True
    optimizer = SourceOptimizer("model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), tools, Silent(), 30.0)
    assert "triton.autotune" in optimizer.run().decode()
    assert optimizer.end_reason == "kernels.trace was cancelled"
