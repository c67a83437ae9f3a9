"""Captures, renders and checks many small targets in long-lived workers: one for the user's code, one for candidates."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.errors import TargetRaises
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import CheckStatus, KernelReport
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import CannotFuse, Region, RegionKind, analyse
from mtmc_lsp.process.worker.tensor_ipc import export_, import_
from mtmc_lsp.process.worker_process import RESULTS, Worker
from mtmc_lsp.schedule.configs import KernelConfig
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.messages import CandidateRequest, CandidateSource, CaseRequest, JudgeRequest, ReferenceRequest
from tests.worker_memory import close_large

SECONDS = 240.0
NOT_LAUNCHED = "no kernel was launched"


class Checker:
    """Runs candidates on single cases, without the cost of a full verification."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n")
        env = {"TRITON_INTERPRET": "1"}
        self._reference_worker, self._candidate_worker = (
            Worker(sys.executable, cwd=str(folder), env=env) for _ in range(2)
        )
        self._compile_worker = Worker(sys.executable, cwd=str(folder))
        self._files_written = 0
        self._expected, self._results = str(folder / "expected.pt"), folder / "results.pt"

    def close(self) -> None:
        """Stop the workers."""
        self._reference_worker.close()
        self._candidate_worker.close()
        self._compile_worker.close()

    def capture(self, text: str, name: str = "f") -> Capture:
        """Write ``text`` to a new file and capture its target ``name``."""
        close_large(self._reference_worker, self._candidate_worker, self._compile_worker)
        self._files_written += 1
        path = self.folder / f"target{self._files_written}.py"
        path.write_text(text)
        source = path.read_bytes()
        target = find_target(source, str(path), name)
        return run_capture(find_workload(str(path), source, target), source, self._reference_worker, SECONDS)

    def failures(self, capture: Capture, candidates: Sequence[Candidate], case: Case) -> list[str]:
        """The failure of each candidate on a case; an empty string for a correct one."""
        data = self._with_reference(capture, case)
        return [self._failure(data, candidate) for candidate in candidates]

    def first_failure(self, capture: Capture, candidate: Candidate, cases: Sequence[Case]) -> str:
        """The first failure over all cases; empty if there is none. The guard must accept the first case."""
        for position, case in enumerate(cases):
            try:
                data = self._with_reference(capture, case)
            except TargetRaises:
                # The user's code does not support these sizes. It must support those of its workload.
                assert position
                continue
            failure = self._failure(data, candidate)
            if failure and not (position and failure == NOT_LAUNCHED):
                return f"{failure} (on {case.label})"
        return ""

    def results(self, capture: Capture, candidate: Candidate, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Run a candidate on ``inputs`` and return its results.

        Raises:
            AssertionError: the candidate failed, or launched no kernel.
        """
        data = self._case_request(capture, Case(dict(capture.graph.sizes), "given", 0))
        export_(dict(inputs), data.inputs, in_memory=False)
        answer = self._candidate_worker.call(CandidateRequest(data, CandidateSource(candidate.source)), SECONDS)
        assert answer.status == "ran", answer.reason
        assert answer.launches, NOT_LAUNCHED
        self._candidate_worker.copy_file(RESULTS, self._results)
        results: list[torch.Tensor] = import_(str(self._results), "cpu")["results"]
        return results

    def _with_reference(self, capture: Capture, case: Case) -> CaseRequest:
        data = self._case_request(capture, case)
        self._reference_worker.call(ReferenceRequest(data, self._expected), SECONDS)
        return data

    def _case_request(self, capture: Capture, case: Case) -> CaseRequest:
        """Fields that all requests about a case share."""
        return CaseRequest(
            capture,
            user_source=Path(capture.workload.target.path).read_text(),
            case=case,
            inputs=str(self.folder / "inputs.pt"),
        )

    def compile_errors(self, capture: Capture, candidate: Candidate, archs: Sequence[str] = ("sm_90",)) -> list[str]:
        """Compiler errors of the candidate's kernels."""
        reports = self.reports(capture, candidate, archs)
        return [f"{report.kernel} for {report.arch}: {report.error}" for report in reports if report.error]

    def reports(self, capture: Capture, candidate: Candidate, archs: Sequence[str] = ("sm_90",)) -> list[KernelReport]:
        """Compiler reports of the candidate's kernels."""
        request = CompileRequest(
            path=capture.workload.target.path,
            name=capture.module_name,
            source=candidate.source,
            launches=candidate.launches,
            archs=tuple(archs),
            seconds=SECONDS,
        )
        kernels = self._compile_worker.call(request, 2 * SECONDS).kernels
        assert len(kernels) == len(candidate.launches) * len(archs)
        return list(kernels)

    def _failure(self, data: CaseRequest, candidate: Candidate) -> str:
        answer = self._candidate_worker.call(CandidateRequest(data, CandidateSource(candidate.source)), SECONDS)
        if answer.status != "ran":
            return answer.reason
        if not answer.launches:
            return NOT_LAUNCHED
        self._candidate_worker.copy_file(RESULTS, self._results)
        request = JudgeRequest(data, self._expected, str(self._results), precision="budget")
        checks = self._reference_worker.call(request, SECONDS).checks
        return "; ".join(f"{check.name}: {check.detail}" for check in checks if check.status is CheckStatus.FAILED)


def start(capture: Capture) -> Candidate:
    """The start candidate: the user's file without generated code."""
    return BuiltinCoder().start(capture, Path(capture.workload.target.path).read_text())


def with_kernel(
    capture: Capture,
    candidate: Candidate,
    nodes: Iterable[str],
    config: KernelConfig | Mapping[str, object] | None = None,
) -> Candidate:
    """Fuse ``nodes`` into one more kernel of the candidate.

    Raises:
        CannotCode: the nodes cannot be one kernel.
    """
    action = MacroAction(ActionKind.FUSE, tuple(nodes), (0, 0), {"config": to_json(config or {})})
    return BuiltinCoder().write(capture, candidate, action)


def planned(capture: Capture) -> Candidate:
    """The planner's best fusions, each kernel with its default configuration."""
    candidate = start(capture)
    ir = lower(capture.graph)
    for fusion in FusionSearch(ir, from_json(Schedule, candidate.schedule), planning_model(("sm_90",))).best():
        candidate = _with_kernel_if_legal(capture, candidate, fusion.region.nodes, fusion.config)
    return candidate


def greedy(capture: Capture, config: Mapping[str, object]) -> Candidate:
    """As few kernels as legality allows: each node joins the last kernel that accepts it, whatever the cost model
    says."""
    ir = lower(capture.graph)
    kernels: list[Region] = []
    for node in capture.graph.nodes:
        for i in reversed(range(len(kernels))):
            try:
                kernels[i] = analyse(ir, (*kernels[i].nodes, node.name))
                break
            except CannotFuse:
                continue
        else:
            try:
                kernels.append(analyse(ir, (node.name,)))
            except CannotFuse:
                continue
    candidate = start(capture)
    for region in kernels:
        # Only reductions support ``split``.
        region_config = {
            name: value for name, value in config.items() if name != "split" or region.kind is RegionKind.REDUCE
        }
        candidate = _with_kernel_if_legal(capture, candidate, region.nodes, region_config)
    return candidate


def _with_kernel_if_legal(
    capture: Capture, candidate: Candidate, nodes: Iterable[str], config: KernelConfig | Mapping[str, object]
) -> Candidate:
    try:
        return with_kernel(capture, candidate, nodes, config)
    except CannotCode:
        return candidate
