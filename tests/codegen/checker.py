"""Captures, renders and checks many small targets in two long-lived workers: the user's code in one, candidates in another."""

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

SECONDS = 60.0
NOT_LAUNCHED = "no kernel was launched"


class Checker:
    """Runs candidates on single cases, without the cost of a measurer of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n")
        env = {"TRITON_INTERPRET": "1"}
        self._own, self._runner = (Worker(sys.executable, cwd=str(folder), env=env) for _ in range(2))
        self._compiler = Worker(sys.executable, cwd=str(folder))
        self._written = 0
        self._expected, self._results = str(folder / "expected.pt"), folder / "results.pt"

    def close(self) -> None:
        """End the workers."""
        self._own.close()
        self._runner.close()
        self._compiler.close()

    def capture(self, text: str, name: str = "f") -> Capture:
        """Capture a target of a file of its own."""
        self._written += 1
        path = self.folder / f"target{self._written}.py"
        path.write_text(text)
        source = path.read_bytes()
        target = find_target(source, str(path), name)
        return run_capture(find_workload(str(path), source, target), source, self._own, SECONDS)

    def wrong(self, capture: Capture, candidates: Sequence[Candidate], case: Case) -> list[str]:
        """For each candidate what is wrong with it on the case; empty texts where nothing is."""
        data = self._referenced(capture, case)
        return [self._wrong(data, candidate) for candidate in candidates]

    def first_wrong(self, capture: Capture, candidate: Candidate, cases: Sequence[Case]) -> str:
        """What is wrong on the first case where something is. The guard must hold on the first of them."""
        for number, case in enumerate(cases):
            try:
                data = self._referenced(capture, case)
            except TargetRaises:
                # The user's own code does not take these sizes; it takes those of its workload.
                assert number
                continue
            wrong = self._wrong(data, candidate)
            if wrong and not (number and wrong == NOT_LAUNCHED):
                return f"{wrong} (on {case.label})"
        return ""

    def results(self, capture: Capture, candidate: Candidate, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What a candidate returns for given inputs.

        Raises:
            AssertionError: it failed, or launched no kernel.
        """
        data = self._data(capture, Case(dict(capture.graph.sizes), "given", 0))
        export_(dict(inputs), data.inputs, in_memory=False)
        answer = self._runner.call(CandidateRequest(data, CandidateSource(candidate.source)), SECONDS)
        assert answer.status == "ran", answer.reason
        assert answer.launches, NOT_LAUNCHED
        self._runner.copy_file(RESULTS, self._results)
        results: list[torch.Tensor] = import_(str(self._results), "cpu")["results"]
        return results

    def _referenced(self, capture: Capture, case: Case) -> CaseRequest:
        data = self._data(capture, case)
        self._own.call(ReferenceRequest(data, self._expected), SECONDS)
        return data

    def _data(self, capture: Capture, case: Case) -> CaseRequest:
        """What all requests about a case share."""
        return CaseRequest(
            capture,
            own=Path(capture.workload.target.path).read_text(),
            case=case,
            inputs=str(self.folder / "inputs.pt"),
            widened=any(item.type.dtype == "bfloat16" for item in capture.graph.inputs),
        )

    def compile_errors(self, capture: Capture, candidate: Candidate, archs: Sequence[str] = ("sm_90",)) -> list[str]:
        """What the compiler says against the candidate's kernels."""
        reports = self.reports(capture, candidate, archs)
        return [f"{report.kernel} for {report.arch}: {report.error}" for report in reports if report.error]

    def reports(self, capture: Capture, candidate: Candidate, archs: Sequence[str] = ("sm_90",)) -> list[KernelReport]:
        """What the compiler makes of the candidate's kernels."""
        request = CompileRequest(
            path=capture.workload.target.path,
            name=capture.module_name,
            source=candidate.source,
            launches=candidate.launches,
            archs=tuple(archs),
            seconds=SECONDS,
        )
        kernels = self._compiler.call(request, 2 * SECONDS).kernels
        assert len(kernels) == len(candidate.launches) * len(archs)
        return list(kernels)

    def _wrong(self, data: CaseRequest, candidate: Candidate) -> str:
        answer = self._runner.call(CandidateRequest(data, CandidateSource(candidate.source)), SECONDS)
        if answer.status != "ran":
            return answer.reason
        if not answer.launches:
            return NOT_LAUNCHED
        self._runner.copy_file(RESULTS, self._results)
        request = JudgeRequest(data, self._expected, str(self._results), precision="budget")
        checks = self._own.call(request, SECONDS).checks
        return "; ".join(f"{check.name}: {check.detail}" for check in checks if check.status is CheckStatus.FAILED)


def start(capture: Capture) -> Candidate:
    """The user's own file as the candidate that everything begins with."""
    return BuiltinCoder().start(capture, Path(capture.workload.target.path).read_text())


def with_kernel(
    capture: Capture,
    candidate: Candidate,
    nodes: Iterable[str],
    config: KernelConfig | Mapping[str, object] | None = None,
) -> Candidate:
    """The candidate with one more kernel.

    Raises:
        CannotCode: these nodes are none.
    """
    action = MacroAction(ActionKind.FUSE, tuple(nodes), (0, 0), {"config": to_json(config or {})})
    return BuiltinCoder().write(capture, candidate, action)


def planned(capture: Capture) -> Candidate:
    """What the planner fuses, each kernel in its default configuration."""
    candidate = start(capture)
    ir = lower(capture.graph)
    for fusion in FusionSearch(ir, from_json(Schedule, candidate.schedule), planning_model(("sm_90",))).best():
        candidate = _tried(capture, candidate, fusion.region.nodes, fusion.config)
    return candidate


def greedy(capture: Capture, config: Mapping[str, object]) -> Candidate:
    """Everything in as few kernels as legality allows: each node joins the last kernel that takes it, whatever the gain."""
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
        # Only reductions have parts.
        own = {name: value for name, value in config.items() if name != "split" or region.kind is RegionKind.REDUCE}
        candidate = _tried(capture, candidate, region.nodes, own)
    return candidate


def _tried(
    capture: Capture, candidate: Candidate, nodes: Iterable[str], config: KernelConfig | Mapping[str, object]
) -> Candidate:
    try:
        return with_kernel(capture, candidate, nodes, config)
    except CannotCode:
        return candidate
