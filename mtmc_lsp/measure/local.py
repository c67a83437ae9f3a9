"""Checks and times candidates in worker processes on this machine."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtmc_lsp.capture.loading_paths import project_root
from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError, WorkerFailed
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.results import (
    Check,
    CheckStatus,
    CompileReport,
    Device,
    KernelReport,
    Timing,
    Verdict,
    VerdictStatus,
)
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.worker import Worker
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.cases import Case, is_interpretable, verification_cases
from mtmc_lsp.measure.devices import bound_us, data_sheet

RUN_SECONDS = 120.0
COMPILE_SECONDS = 180.0
TIME_SECONDS = 300.0


class LocalMeasurer:
    """A :class:`~mtmc_lsp.core.protocols.Measurer` on this machine: on its GPU, else by Triton's interpreter."""

    def __init__(
        self,
        capture: Capture,
        python: str,
        *,
        archs: tuple[str, ...] = ("sm_80", "sm_90", "gfx942"),
        seed: int | None = None,
    ) -> None:
        """Prepare the workers; they start when first used.

        Args:
            capture: what is measured.
            python: the user's interpreter.
            archs: what to cross-compile for.
            seed: of the verification inputs; by default one that no candidate can know.
        """
        self._capture = capture
        self._archs = archs
        self.measured = bool(capture.environment.gpu) and capture.workload.device == "cuda"
        self._seed = secrets.randbelow(2**31) if seed is None else seed
        # bfloat16 may also occur inside kernels only, so its replacement does not depend on the inputs.
        self._widened = not self.measured
        cwd = str(project_root(Path(capture.workload.target.path)))
        environment = {} if self.measured else {"TRITON_INTERPRET": "1"}
        self._reference = Worker(python, cwd=cwd, env=environment)
        self._runner = Worker(python, cwd=cwd, env=environment)
        self._compiler = Worker(python, cwd=cwd)
        self._timer = Worker(python, cwd=cwd)
        self._folder = Path(tempfile.mkdtemp(prefix="mtmc-verify-"))
        self._prepared: list[Case] | None = None
        self._device: Device | None = None

    def device(self) -> Device:
        """Measured ceilings on a GPU, else those of a data sheet."""
        if self._device is None:
            if self.measured:
                self._device = from_json(Device, self._timer.call("measure.device", {}, RUN_SECONDS))
            else:
                self._device = data_sheet(self._archs)
        return self._device

    def close(self) -> None:
        """End the workers and remove their files."""
        for worker in (self._reference, self._runner, self._compiler, self._timer):
            worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Verification ------------------------------------------------------------------------------------------------

    def verify(self, candidate: Candidate) -> Verdict:
        """Run the candidate on every case, in a process of its own, and compare with the oracle."""
        checks: list[Check] = []
        worst = (0.0, 0.0)
        if not self.measured and not is_interpretable(self._capture):
            reason = "the sizes that cannot vary are too large for Triton's interpreter; verify on a GPU"
            return Verdict(VerdictStatus.TIMEOUT, (), "interpreter", reason=reason)
        mode = "gpu" if self.measured else "interpreter"
        launched = 0
        for number, case in enumerate(self._cases()):
            try:
                seen = self._run_candidate(candidate, number, case)
            except WorkerFailed as error:
                status = VerdictStatus.TIMEOUT if error.kind == "timeout" else VerdictStatus.CRASHED
                return Verdict(status, tuple(checks), mode, *worst, f"{error.message} on {case.label}", self._notes())
            if seen["status"] != "ran":
                status = VerdictStatus(seen["status"])
                return Verdict(
                    status, tuple(checks), mode, *worst, f"{seen['reason']} (on {case.label})", self._notes()
                )
            launched += int(str(seen["launches"]))
            compared = self._compare(number)
            checks += self._checks(case, seen, compared)
            if compared["error"] > worst[0]:
                worst = (compared["error"], compared["reference_error"])
            failed = next((c for c in checks if c.status is CheckStatus.FAILED), None)
            if failed is not None:
                reason = f"{failed.name}: {failed.detail} (on {failed.case})"
                return Verdict(VerdictStatus.INCORRECT, tuple(checks), mode, *worst, reason, self._notes())
        if not launched:
            reason = "no Triton kernel was launched"
            return Verdict(VerdictStatus.RUNTIME_ERROR, tuple(checks), mode, *worst, reason, self._notes())
        return Verdict(VerdictStatus.CORRECT, tuple(checks), mode, *worst, "", self._notes())

    def _cases(self) -> list[Case]:
        """The cases whose reference is computed; made once, before any candidate runs."""
        if self._prepared is None:
            self._prepared = []
            for case in verification_cases(self._capture, interpreted=not self.measured, seed=self._seed):
                number = len(self._prepared)
                request = {
                    "capture": to_json(self._capture),
                    "widened": self._widened,
                    "case": {**to_json(case), "label": case.label},
                    "inputs": str(self._folder / f"inputs-{number}.pt"),
                    "expected": str(self._folder / f"expected-{number}.pt"),
                }
                try:
                    self._reference.call("measure.reference", request, RUN_SECONDS)
                except MtmcError:
                    # A failed kernel leaves the process's GPU context unusable.
                    self._reference.close()
                    # The user's own code does not take these sizes; the first case is the workload itself.
                    if not self._prepared:
                        raise
                    continue
                self._prepared.append(case)
        return self._prepared

    def _run_candidate(self, candidate: Candidate, number: int, case: Case) -> dict[str, Any]:
        request = {
            "capture": to_json(self._capture),
            "source": candidate.source,
            "widened": self._widened,
            "case": {**to_json(case), "label": case.label},
            "inputs": str(self._folder / f"inputs-{number}.pt"),
            "results": str(self._folder / f"results-{number}.pt"),
        }
        return self._runner.call("measure.candidate", request, RUN_SECONDS)

    def _compare(self, number: int) -> dict[str, Any]:
        request = {
            "expected": str(self._folder / f"expected-{number}.pt"),
            "results": str(self._folder / f"results-{number}.pt"),
        }
        return self._reference.call("measure.compare", request, RUN_SECONDS)

    def _checks(self, case: Case, seen: dict[str, Any], compared: dict[str, Any]) -> list[Check]:
        checks = [Check(c["name"], CheckStatus(c["status"]), case.label, c["detail"]) for c in compared["checks"]]
        for name, passed, detail in (
            ("plain tensors", seen["plain"], "a result is no plain torch.Tensor"),
            ("determinism", seen["repeats"], "two runs on the same inputs differ"),
        ):
            checks.append(
                Check(name, CheckStatus.PASSED if passed else CheckStatus.FAILED, case.label, "" if passed else detail)
            )
        return checks

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if not self.measured:
            cases = self._prepared or []
            shown = ", ".join(f"{k}={v}" for k, v in (cases[0].sizes if cases else {}).items())
            if cases and dict(cases[0].sizes) != dict(self._capture.graph.sizes):
                notes.append(f"sizes reduced to {shown} for Triton's interpreter")
            if any(item.type.dtype == "bfloat16" for item in self._capture.graph.inputs):
                notes.append("bfloat16 replaced by float32: the interpreter computes bfloat16 wrongly")
        return tuple(notes)

    # Compilation and timing --------------------------------------------------------------------------------------

    def compile(self, candidate: Candidate) -> CompileReport:
        """Cross-compile every kernel for every architecture."""
        archs = [self._capture.environment.capability] if self.measured else list(self._archs)
        request = {
            "path": self._capture.workload.target.path,
            "name": self._capture.module_name,
            "source": candidate.source,
            "launches": to_json(candidate.launches),
            "archs": archs,
        }
        try:
            data = self._compiler.call("measure.compile", request, COMPILE_SECONDS)
        except WorkerFailed as error:
            return CompileReport((KernelReport("", archs[0], error=error.message),))
        return CompileReport(tuple(from_json(KernelReport, item) for item in data["kernels"]))

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        """Paired timing; None without a GPU."""
        if not self.measured:
            return None
        request = {
            "capture": to_json(self._capture),
            "source": candidate.source,
            "previous": previous.source if previous is not None and previous.code is not None else None,
            "bound_us": bound_us(self._capture, self.device()),
        }
        return from_json(Timing, self._timer.call("measure.time", request, TIME_SECONDS))

    def quick(self, candidates: Sequence[Candidate]) -> list[float | None]:
        """Rank candidates on the GPU: median microseconds each, None for those that fail."""
        if not self.measured:
            raise EnvironmentNotAble("ranking needs a CUDA GPU")
        request = {"capture": to_json(self._capture), "sources": [candidate.source for candidate in candidates]}
        medians: list[float | None] = self._timer.call("measure.quick", request, TIME_SECONDS)["medians"]
        return medians
