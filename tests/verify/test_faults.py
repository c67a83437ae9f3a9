"""What a candidate does to its process, or tries to do to the machine, is a failed step; the next candidate runs as ever."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handwritten import RMS
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction, Stop
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch
from mtmc_lsp.verify.candidate_process import CandidateProcess

RUN_SECONDS = 120.0
HANG_SECONDS = 8.0
"""Of the one that hangs: whatever the limit is, it is waited for."""
MEMORY = 2 << 30
END = "    return out\n"
FAULTS = {
    "writes to the home folder": ("    (__import__('pathlib').Path.home() / 'mtmc-was-here').write_text('x')\n", "PermissionError"),
    "opens a socket": ("    from socket import socket\n    socket()\n", "PermissionError"),
    "ends its process": ("    import os\n    os._exit(3)\n", "exit code 3"),
    "hangs": ("    import threading\n    threading.Event().wait()\n", "took longer than"),
    "prints 1 GB": ("    for _ in range(1000):\n        print('x' * 1_000_000)\n    raise ValueError('printed')\n", "printed"),
    "crashes": ("    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n", "SIGSEGV"),
    "forks": ("    import os\n    os.fork()\n", "start processes"),
    "starts a program": ("    import subprocess\n    subprocess.run(['sleep', '60'])\n", "start processes"),
    "takes all memory": ("    held = [bytearray(1 << 28) for _ in range(1000)]\n", "out of memory"),
    "takes all memory in tensors": ("    held = [torch.ones(1 << 26) for _ in range(1000)]\n", "memory"),
    "fills the disk": ("    import os\n    open(os.environ['TMPDIR'] + '/x', 'wb').truncate(1 << 40)\n", "File too large"),
}  # fmt: skip
FAILED = (VerdictStatus.RUNTIME_ERROR, VerdictStatus.CRASHED, VerdictStatus.TIMEOUT)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_failed_verification_with_its_reason(
    fault: str, judge: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan of the text is left out here: it must not be all that stands in the way."""
    monkeypatch.setattr("mtmc_lsp.verify.adapters.scan", lambda *_: ())
    lines, said = FAULTS[fault]
    text = changed(HONEST, (END, lines + END))
    seconds = HANG_SECONDS if fault == "hangs" else RUN_SECONDS
    verdict = judge(REFERENCE, "rms", text, "fast", memory_bytes=MEMORY, run_seconds=seconds)
    assert verdict.status in FAILED
    assert said in verdict.reason
    assert not (Path.home() / "mtmc-was-here").exists()


class Script:
    """Proposes the given texts in turn, and writes them: a planner and a coder of one mind."""

    def __init__(self, candidates: dict[str, Candidate]) -> None:
        self._candidates = candidates

    def propose(self, state: State) -> MacroAction | Stop:
        left = list(self._candidates)[len(state.history) :]
        return (
            MacroAction(ActionKind.FUSE, (left[0],), (1, 1), {}, left[0], Expected(10.0))
            if left
            else Stop("all are tried")
        )

    def start(self, capture: Capture, source: str) -> Candidate:
        return Candidate("root", None, None, source, None, None)

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        return self._candidates[action.region[0]]


@pytest.fixture
def measurer(capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalMeasurer]:
    monkeypatch.setattr("mtmc_lsp.verify.candidate_process.INTERPRETER_MEMORY", MEMORY)
    one = LocalMeasurer(capture_of(RMS), sys.executable, MeasureOptions(archs=("sm_90",), run_seconds=RUN_SECONDS))
    yield one
    one.close()


def test_every_fault_is_a_failed_step_of_a_search_and_an_honest_step_after_it_is_kept(
    measurer: LocalMeasurer, capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmc_lsp.search.loop.MAX_FAILURES", len(FAULTS) + 1)
    monkeypatch.setattr("mtmc_lsp.verify.adapters.scan", lambda *_: ())
    candidates = {name: RMS.candidate((END, lines + END)) for name, (lines, _) in FAULTS.items()}
    script = Script({**candidates, "honest": RMS.candidate()})
    steps: list[Step] = []
    events = Events(on_step=steps.append)
    limits = Limits(seconds=600.0, steps=len(FAULTS) + 1)
    components = SearchComponents(script, script, measurer, False, limits)
    search = GreedySearch(capture_of(RMS), RMS.text, components, events)
    search.run("run", "hash")
    assert [step.status for step in steps] == [StepStatus.FAILED] * len(FAULTS) + [StepStatus.ACCEPTED]
    for (name, (_, said)), step in zip(FAULTS.items(), steps[:-1], strict=True):
        assert said in step.reason, name
    assert not (Path.home() / "mtmc-was-here").exists()


def test_what_a_candidate_changes_in_its_process_does_not_reach_the_next(measurer: LocalMeasurer) -> None:
    """One that makes every later kernel right by itself, or wrong, would decide about others."""
    spoils = RMS.candidate((END, "    torch.empty_like = lambda x: torch.zeros_like(x) - 1\n" + END))
    assert measurer.verify(spoils).status is not VerdictStatus.COMPILE_ERROR
    assert measurer.verify(RMS.candidate()).is_correct


def test_a_candidate_cannot_write_to_inputs_that_others_get(measurer: LocalMeasurer) -> None:
    line = f"    import glob\n    [open(p, 'wb') for p in glob.glob({str(measurer._reference._inputs)!r} + '/*')]\n"
    verdict = measurer.verify(RMS.candidate((END, line + END)))
    assert "PermissionError" in verdict.reason


def test_what_is_not_locked_in_is_refused_where_that_is_asked_for(
    capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = capture_of(RMS).environment
    process = CandidateProcess(sys.executable, str(tmp_path), environment, has_gpu=False, needs_sandbox=True)
    process._worker = process._unlocked
    with pytest.raises(Exception, match=r"a complete sandbox .* is not possible here; the level is: none"):
        process.start()
    process.close()
