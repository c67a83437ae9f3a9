"""Verifies any candidate against any reference: two callables in files of their own, neither of them ours."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.capture.loading_paths import project_root
from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError, WorkerFailed
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.results import Check, CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.sandbox import Isolation
from mtmc_lsp.core.template import Template
from mtmc_lsp.core.worker import Sandbox, Worker
from mtmc_lsp.core.workload import Capture, Target, WorkloadSource
from mtmc_lsp.measure.cases import VALUES, Case, is_interpretable
from mtmc_lsp.measure.local import INTERPRETER_MEMORY, RUN_SECONDS
from mtmc_lsp.measure.pair_cases import VALUE_CASES, is_exact, pair_cases
from mtmc_lsp.measure.scanning import scan

SHRINK_TRIES = 8
"""How often a failing case is tried on smaller sizes."""


@dataclass(frozen=True)
class Pair:
    """What is compared."""

    capture: Capture
    """Of the reference."""
    own: str
    """The reference file's text."""
    target: Target
    """The candidate."""
    source: str
    """The candidate file's text."""


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    case: Case
    status: VerdictStatus
    checks: tuple[Check, ...] = ()
    reason: str = ""
    error: float = 0.0
    reference_error: float = 0.0
    launches: int = 0
    trivial: frozenset[str] | None = None
    """Answers without any work that pass here too; ``None`` where the case says nothing about them."""


@dataclass(frozen=True)
class PairVerdict:
    """The verdict, and the file that reproduces a failure."""

    verdict: Verdict
    reproduction: str = ""


class PairVerifier:
    """Runs one candidate on every case, in a process of its own, and has another process judge."""

    def __init__(
        self,
        pair: Pair,
        python: str,
        *,
        seed: int | None = None,
        precision: str = "budget",
        needs_kernel: bool = True,
        needs_sandbox: bool = False,
        run_seconds: float = RUN_SECONDS,
        workers: tuple[Worker, Worker] | None = None,
        template: Template | None = None,
    ) -> None:
        """Prepare the processes; they start when first used.

        Args:
            pair: what is compared.
            python: the user's interpreter.
            seed: of the inputs; by default one that no candidate can know.
            precision: ``budget`` or ``strict``, as in the settings.
            needs_kernel: whether a candidate that launches no Triton kernel is refused.
            needs_sandbox: whether to refuse where the candidate's process cannot be locked in completely.
            run_seconds: limit for one case.
            workers: processes of the caller's, where several candidates share them: for the reference, for candidates.
            template: what the processes become copies of, where there is one.
        """
        pair = replace(pair, capture=_with_fixed_parameters(pair.capture))
        capture = pair.capture
        self._pair, self._precision, self._needs_kernel = pair, precision, needs_kernel
        self._run_seconds = run_seconds
        self._seed = secrets.randbelow(2**31) if seed is None else seed
        self.measured = bool(capture.environment.gpu) and capture.workload.device == "cuda"
        environment = {} if self.measured else {"TRITON_INTERPRET": "1"}
        memory = None if self.measured else INTERPRETER_MEMORY
        self._secret = Path(tempfile.mkdtemp(prefix="mtmc-expected-"))
        self._inputs = Path(tempfile.mkdtemp(prefix="mtmc-inputs-"))
        self._results = Path(tempfile.mkdtemp(prefix="mtmc-results-"))
        root = project_root(Path(capture.workload.target.path))
        self._own_workers = workers is None
        # The expected results are out of reach too, not only unnamed.
        locked = Sandbox((str(self._results),), str(self._secret))
        there = project_root(Path(pair.target.path))
        self._reference, self._runner = workers or (
            Worker(python, cwd=str(root), env=environment, template=template),
            Worker(python, cwd=str(there), env=environment, memory_bytes=memory, sandbox=locked, template=template),
        )
        self._number = 0
        self._init = "[[], {}]"
        self._needs_sandbox, self._isolation = needs_sandbox, Isolation()

    def close(self) -> None:
        """End the processes and remove their files."""
        for worker in (self._reference, self._runner) if self._own_workers else ():
            worker.kill()
            worker.close()
        for folder in (self._secret, self._inputs, self._results):
            shutil.rmtree(folder, ignore_errors=True)

    def verify(self, reproduction: Path | None = None, on_case: Callable[[Case], None] = lambda _: None) -> PairVerdict:
        """Run every case, until one ends the candidate's process; of those that fail the smallest is kept.

        Args:
            reproduction: where to write the smallest failing case.
            on_case: told of each case before it runs.
        """
        refused = self._refused()
        if refused:
            return PairVerdict(self._verdict([], VerdictStatus.UNCERTIFIABLE, refused))
        text_checks = scan(self._pair.source, self._pair.target.path)
        wrong = next((check for check in text_checks if check.status is CheckStatus.FAILED), None)
        if wrong is not None:
            return PairVerdict(self._verdict([], VerdictStatus.INCORRECT, f"{wrong.name}: {wrong.detail}", text_checks))
        self._start()
        outcomes, failed = self._run_all(on_case)
        if failed is None:
            status, reason = self._conclusion(outcomes)
            return PairVerdict(self._verdict(outcomes, status, reason, text_checks))
        smallest = self._shrunk(failed) if failed.status is not VerdictStatus.COMPILE_ERROR else failed
        reason = f"{smallest.reason} (on {smallest.case.label})"
        verdict = self._verdict(outcomes, smallest.status, reason, text_checks)
        written = self._reproduce(smallest, reason, reproduction) if reproduction is not None else ""
        return PairVerdict(verdict, written)

    def _refused(self) -> str:
        """Why nothing could be concluded from running the pair; empty where it can."""
        if self._pair.capture.uses_random:
            return "the reference draws random numbers, and a candidate may draw others in another order"
        if not self.measured and not is_interpretable(self._pair.capture):
            return "the workload is too large for Triton's interpreter; verify on a GPU, or name sizes that can vary"
        return ""

    def _start(self) -> None:
        """Both processes import torch at once; and the reference's constructor arguments are asked for."""
        with ThreadPoolExecutor(1) as background:
            other = background.submit(self._runner.call, "measure.start", {"gpu": self.measured}, self._run_seconds)
            if self._pair.capture.workload.source is WorkloadSource.GET_INPUTS:
                found = self._reference.call("measure.constructor", self._request(), self._run_seconds)
                self._init = found["init"]
            self._isolation = from_json(Isolation, other.result()["isolation"])
        if self._needs_sandbox and not self._isolation.is_full:
            raise EnvironmentNotAble(
                f"the candidate's process cannot be locked in here; the level is {self._isolation.text}",
                remedy="Use Linux 5.13 or newer with Landlock and seccomp, or leave out --require-sandbox.",
            )

    def _run_all(self, on_case: Callable[[Case], None]) -> tuple[list[Outcome], Outcome | None]:
        """Every outcome, and the smallest failing one."""
        outcomes: list[Outcome] = []
        failed: Outcome | None = None
        cases = pair_cases(self._pair.capture, interpreted=not self.measured, seed=self._seed)
        last = min((c for c in cases if all(c.sizes.values())), key=self._elements, default=cases[0])
        # Once one fails, only smaller ones are of interest.
        for case in (*cases, replace(last, seed=self._seed + len(cases) + 100)):
            if failed is not None and self._elements(case) >= self._elements(failed.case):
                continue
            on_case(case)
            outcome = self._outcome(case, drift=bool(outcomes) and case.seed == self._seed + len(cases) + 100)
            if outcome is None:
                skipped = Check("reference", CheckStatus.SKIPPED, case.label, "the reference does not take this")
                outcome = Outcome(case, VerdictStatus.CORRECT, (skipped,))
            outcomes.append(outcome)
            if outcome.status is not VerdictStatus.CORRECT:
                failed = outcome
                if outcome.status not in (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR):
                    break
                if outcome.reason.startswith("no Triton kernel"):
                    break
        return outcomes, failed

    def _elements(self, case: Case) -> int:
        inputs = self._pair.capture.graph.inputs
        return sum(i.type.numel.value(case.sizes) for i in inputs if i.kind is InputKind.ARGUMENT)

    def _conclusion(self, outcomes: list[Outcome]) -> tuple[VerdictStatus, str]:
        """Correct, unless an answer without any work would have been found correct as well."""
        telling = [outcome.trivial for outcome in outcomes if outcome.trivial is not None]
        trivial = sorted(frozenset.intersection(*telling)) if telling else ["anything"]
        if trivial:
            reason = f"{' and '.join(trivial)} would pass on this workload too, so that passing says nothing"
            return VerdictStatus.UNCERTIFIABLE, reason
        return VerdictStatus.CORRECT, ""

    def _shrunk(self, failed: Outcome) -> Outcome:
        """The same failure on smaller sizes, the largest halved first, as long as something fails."""
        variable = [n for n in self._pair.capture.variable_sizes if n in failed.case.sizes]
        done: set[str] = set()
        for _ in range(SHRINK_TRIES if failed.status in (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR) else 0):
            left = [name for name in variable if failed.case.sizes[name] > 1 and name not in done]
            if not left:
                break
            name = max(left, key=lambda n: failed.case.sizes[n])
            case = replace(failed.case, sizes={**failed.case.sizes, name: failed.case.sizes[name] // 2})
            try:
                outcome = self._outcome(case)
            except MtmcError:
                outcome = None
            if outcome is None or outcome.status is not failed.status:
                done.add(name)
            else:
                failed = outcome
        return failed

    def _request(self, case: Case | None = None) -> dict[str, object]:
        common: dict[str, object] = {
            "capture": to_json(self._pair.capture),
            "own": self._pair.own,
            "widened": not self.measured,
            "target": to_json(self._pair.target),
            "init": self._init,
            "precision": self._precision,
        }
        if case is not None:
            common["case"] = {**to_json(case), "label": case.label}
            common["inputs"] = str(self._inputs / f"inputs-{self._number}.pt")
        return common

    def _outcome(self, case: Case, *, drift: bool = False) -> Outcome | None:
        """What comes of a case; None where the reference does not take it (the workload itself it must)."""
        first = self._number == 0
        self._number += 1
        request = self._request(case)
        expected = str(self._secret / f"expected-{self._number}.pt")
        try:
            self._reference.call("measure.reference", {**request, "expected": expected}, self._run_seconds)
        except MtmcError as error:
            if first or (isinstance(error, WorkerFailed) and error.kind == "cancelled"):
                raise
            return None
        results = str(self._results / f"results-{self._number}.pt")
        more = {"source": self._pair.source, "results": results, "decoy": first, "drift": drift}
        try:
            seen = self._runner.call("measure.pair", {**request, **more}, self._run_seconds)
        except WorkerFailed as error:
            status = VerdictStatus.TIMEOUT if error.kind == "timeout" else VerdictStatus.CRASHED
            return Outcome(case, status, reason=error.message)
        if seen["status"] != "ran":
            return Outcome(case, VerdictStatus(seen["status"]), reason=seen["reason"])
        if first and self._needs_kernel and not seen["launches"]:
            return Outcome(case, VerdictStatus.RUNTIME_ERROR, reason="no Triton kernel was launched")
        files = {"expected": expected, "results": results, "exact": is_exact(self._pair.capture)}
        judged = self._reference.call("measure.judge", {**request, **files}, self._run_seconds)
        checks = [Check(c["name"], CheckStatus(c["status"]), case.label, c["detail"]) for c in judged["checks"]]
        checks += _seen_checks(seen, case, decoy=first, drift=drift)
        wrong = next((check for check in checks if check.status is CheckStatus.FAILED), None)
        status = VerdictStatus.CORRECT if wrong is None else VerdictStatus.INCORRECT
        reason = f"{wrong.name}: {wrong.detail}" if wrong is not None else ""
        # A NaN or an infinity alone tells a constant answer apart, though nothing was computed.
        tells = case.kind == VALUES and all(case.sizes.values()) and case.distribution not in VALUE_CASES
        trivial = frozenset(judged["trivial"]) if tells else None
        errors = (judged["error"], judged["reference_error"])
        return Outcome(case, status, tuple(checks), reason, *errors, seen["launches"], trivial)

    def _reproduce(self, outcome: Outcome, reason: str, path: Path) -> str:
        request = {**self._request(outcome.case), "path": str(path), "reason": reason}
        # The inputs of the smallest case may have been followed by those of others.
        again = {**request, "expected": str(self._secret / "last.pt")}
        self._reference.call("measure.reference", again, self._run_seconds)
        return str(self._reference.call("measure.reproduce", request, self._run_seconds)["path"])

    def _verdict(
        self, outcomes: list[Outcome], status: VerdictStatus, reason: str, text_checks: tuple[Check, ...] = ()
    ) -> Verdict:
        checks = (*text_checks, *(check for outcome in outcomes for check in outcome.checks))
        worst = max(outcomes, key=lambda outcome: outcome.error, default=None)
        errors = (worst.error, worst.reference_error) if worst is not None else (0.0, 0.0)
        return Verdict(
            status, checks, "gpu" if self.measured else "interpreter", *errors, reason, self._notes(outcomes)
        )

    def _notes(self, outcomes: list[Outcome]) -> tuple[str, ...]:
        capture = self._pair.capture
        notes = []
        if outcomes and dict(outcomes[0].case.sizes) != dict(capture.graph.sizes):
            shown = ", ".join(f"{name}={value}" for name, value in outcomes[0].case.sizes.items())
            notes.append(f"sizes reduced to {shown} for Triton's interpreter")
        if not capture.variable_sizes:
            notes.append("the workload names no sizes that vary, so only its own shapes were tried")
        if not any(a.tensor is not None and a.tensor.requires_grad for a in capture.workload.arguments):
            notes.append("the workload asks for no gradients, so none were compared")
        without = sum(o.case.is_kernels_ground and not o.launches and bool(o.checks) for o in outcomes)
        if without and self._needs_kernel:
            notes.append(f"no kernel was launched in {without} of the cases")
        if outcomes:
            notes.append(f"isolation of the candidate: {self._isolation.text}")
        if not self.measured:
            notes.append("an interpreter run is no proof for a GPU: bfloat16 ran as float32, and races cannot show")
        return tuple(notes)


def _with_fixed_parameters(capture: Capture) -> Capture:
    """The capture without other sizes of parameters: the candidate was constructed with these."""
    held = [item for item in capture.graph.inputs if item.kind is not InputKind.ARGUMENT]
    fixed = {name for item in held for size in item.type.shape for name in size.symbols()}
    return replace(capture, variable_sizes=tuple(name for name in capture.variable_sizes if name not in fixed))


def _seen_checks(seen: dict[str, object], case: Case, *, decoy: bool, drift: bool) -> list[Check]:
    """What the candidate's process saw beside results."""

    def check(name: str, passed: object, wrong: str) -> Check:
        status = CheckStatus.PASSED if passed else CheckStatus.FAILED
        return Check(name, status, case.label, "" if passed else wrong)

    wrong = "calls on the same inputs give different results"
    checks = [check("many calls" if drift else "determinism", seen["repeats"], wrong)]
    checks.append(check("no threads left", not seen["threads"], f"{seen['threads']} still run"))
    if decoy:
        wrong = "the results are the same when its kernels do nothing: they come from elsewhere"
        checks.append(check("kernel's result used", seen["used"], wrong))
    return checks
