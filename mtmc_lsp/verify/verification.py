"""Runs a candidate on every case and has what it gives compared with the user's own code, in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.errors import FailureKind, HandoverFailed, MtmcError, WorkerFailed
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.results import Check, CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.cases import Case, is_interpretable, verification_cases
from mtmc_lsp.verify.int32_overflow import FAR_CHECK, FAR_SEED, far_sizes
from mtmc_lsp.verify.observations import checks_of

FAR_NUMBER = 1000
"""The number of the case beyond 2^31, which is none of the usual ones."""
GIVEN_BYTES = 1e9
"""Workloads that move more take long to make once more."""

TIGHT_PART = 0.05
"""The part of a GPU's free memory from which on inputs leave no room: references have them in float64, and keep those of several
cases, and a candidate holds them more than once (weights of 8.7 GB took 77 GB here and 53 GB there on an H200)."""

NOTHING_SAID = (
    "your own code's rounding errors are as large as this result on all inputs tried, so zeros would pass as well"
)

Call = Callable[[Worker | CandidateProcess, str, Mapping[str, object], float], dict[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """A case whose reference is there."""

    number: int
    case: Case
    large: bool
    """Whether the candidate's process takes the inputs from the GPU memory of the reference's."""


class References:
    """Cases whose references are computed one after the other, ahead of the candidates that run on them."""

    def __init__(
        self,
        cases: Sequence[Case],
        prepare: Callable[[Case, int], Prepared | None],
        *,
        in_step: Callable[[], bool] = lambda: False,
    ) -> None:
        """Nothing is computed yet.

        Args:
            cases: in order.
            prepare: computes one; None for a case that the user's own code does not take.
            in_step: whether each is computed only when it is asked for, since there is no memory for it beside a candidate.
        """
        self._cases, self._prepare, self._in_step = cases, prepare, in_step
        self._asked_for, self._is_over = 0, False
        self._made: list[Prepared] = []
        self._ended = False
        self._failed: MtmcError | None = None
        self._comparisons = 0
        self._changed = threading.Condition()

    def compute(self) -> None:
        """Compute them all; a comparison that waits for the same process goes before the next."""
        try:
            for case in self._cases:
                with self._changed:
                    self._changed.wait_for(self._may_go_on)
                    if self._is_over:
                        break
                made = self._prepare(case, len(self._made))
                with self._changed:
                    self._made += [made] if made is not None else []
                    self._changed.notify_all()
        except MtmcError as error:
            self._failed = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        is_wanted = len(self._made) <= self._asked_for or not self._in_step()
        return self._is_over or (is_wanted and not self._comparisons)

    def end(self) -> None:
        """Compute no more: nobody will ask."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Prepared]:
        """The cases in order, each as soon as it is there.

        Raises:
            MtmcError: what ended the computing of references.
        """
        for number in itertools.count():
            made = self._get(number)
            if made is None:
                return
            yield made

    def _get(self, number: int) -> Prepared | None:
        with self._changed:
            self._asked_for = max(self._asked_for, number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or len(self._made) > number)
        if number < len(self._made):
            return self._made[number]
        if self._failed is not None:
            raise self._failed
        return None

    @contextlib.contextmanager
    def comparing(self) -> Iterator[None]:
        """While something is compared no further reference is begun."""
        with self._changed:
            self._comparisons += 1
        try:
            yield
        finally:
            with self._changed:
                self._comparisons -= 1
                self._changed.notify_all()


class Verification:
    """Verifies candidates of one capture; the references are computed once."""

    def __init__(
        self,
        capture: Capture,
        call: Call,
        reference: Worker,
        runner: CandidateProcess,
        *,
        own: str | None,
        seed: int,
        precision: str,
        has_gpu: bool,
        secret: Path,
        inputs: Path,
        seconds: float,
    ) -> None:
        """Nothing runs yet.

        Args:
            capture: what is verified.
            call: has a worker do something within limits.
            reference: where the user's own code runs.
            runner: where candidates run.
            own: the user's own text, where it is not what the file holds now.
            seed: of the inputs.
            precision: ``budget`` or ``strict``, as in the settings.
            measured: whether all runs on a GPU, else by Triton's interpreter.
            secret: a folder that candidates cannot read.
            inputs: a folder that candidates can read.
            seconds: limit for one case.
        """
        self._capture, self._call, self._reference, self._runner = capture, call, reference, runner
        self._capture_json = to_json(capture)
        self._own, self._precision, self._has_gpu = own, precision, has_gpu
        # bfloat16 may also occur inside kernels only, so its replacement does not depend on the inputs.
        self._widened = not has_gpu
        self._secret, self._inputs, self._seconds = secret, inputs, seconds
        self._mode = "gpu" if has_gpu else "interpreter"
        self._handed = has_gpu
        self._coarse = 0
        self._cases = verification_cases(capture, interpreted=not has_gpu, seed=seed)
        self._references = References(self._cases, self._prepared, in_step=self._is_tight)
        self._begun = False
        self._far_case: tuple[Prepared | None, str] | None = None
        self._seed = seed

    def _is_tight(self) -> bool:
        """Whether inputs take so much of the GPU that a candidate and a reference do not run side by side."""
        sizes = self._capture.graph.sizes
        types = [item.type for item in self._capture.graph.inputs]
        held = sum(kind.numel.value(sizes) * itemsize(kind.dtype) for kind in types)
        return self._has_gpu and held > TIGHT_PART * self._runner.free_bytes > 0

    def begin(self, background: Executor) -> None:
        """Let the references be computed; the first call alone does."""
        if not self._begun:
            self._begun = True
            background.submit(self._references.compute)

    def end(self) -> None:
        """Compute no more references."""
        self._references.end()

    @contextlib.contextmanager
    def given(self) -> Iterator[str]:
        """Where another process finds the workload's own inputs while this lasts; empty where it makes them as fast itself."""
        if not self._handed or self._capture.bytes < GIVEN_BYTES:
            yield ""
            return
        first = next(iter(self._references))
        request = {**self._request(first.case, first.number), "to": str(self._inputs / "given.pt")}
        with self._references.comparing():
            self._call(self._reference, "measure.offer", request, self._seconds)
        try:
            yield str(request["to"])
        finally:
            with self._references.comparing():
                self._call(self._reference, "measure.take_back", request, self._seconds)

    @property
    def other_sizes(self) -> list[dict[str, int]]:
        """Sizes that a kernel is verified at, beside the workload's own."""
        sizes = [dict(case.sizes) for case in self._cases if case.is_kernels_ground]
        return [own for i, own in enumerate(sizes) if own not in sizes[:i] and own != dict(self._capture.graph.sizes)]

    def verify(self, candidate: Candidate) -> Verdict:
        """Run the candidate on every case and compare with the oracle; ends with the first case that fails."""
        if not self._has_gpu and not is_interpretable(self._capture):
            reason = "the sizes that cannot vary are too large for Triton's interpreter; verify on a GPU"
            return Verdict(VerdictStatus.UNCERTIFIABLE, (), self._mode, reason=reason)
        checks: list[Check] = []
        worst = (0.0, 0.0)
        fallbacks = 0
        silent, told = set[str](), set[str]()
        for prepared in self._references:
            case = prepared.case
            try:
                seen, compared = self._tried(candidate, prepared)
            except WorkerFailed as error:
                status = (
                    VerdictStatus.TIMEOUT
                    if error.kind in (FailureKind.TIMEOUT, FailureKind.DEADLINE)
                    else VerdictStatus.CRASHED
                )
                verdict = self._verdict(status, checks, worst, f"{error.message} (on {case.label})")
                return replace(verdict, failure=error.kind)
            if seen["status"] != "ran":
                status, reason = VerdictStatus(seen["status"]), f"{seen['reason']} (on {case.label})"
                return replace(self._verdict(status, checks, worst, reason), failure=FailureKind(seen["failure"]))
            if prepared.number == 0 and not seen["launches"]:
                reason = f"no Triton kernel was launched (on {case.label})"
                return self._verdict(VerdictStatus.RUNTIME_ERROR, checks, worst, reason)
            fallbacks += case.is_kernels_ground and not seen["launches"]
            if compared is None:
                continue
            checks += checks_of(case, seen, compared)
            if case.is_kernels_ground:
                silent.update(compared["silent"])
                told.update(set(compared["results"]) - set(compared["silent"]))
            if compared["error"] > worst[0]:
                worst = (compared["error"], compared["reference_error"])
            failed = next((c for c in checks if c.status is CheckStatus.FAILED), None)
            if failed is not None:
                reason = f"{failed.name}: {failed.detail} (on {failed.case})"
                return self._verdict(VerdictStatus.INCORRECT, checks, worst, reason)
        if silent - told:
            reason = f"{', '.join(sorted(silent - told))}: {NOTHING_SAID}"
            return self._verdict(VerdictStatus.UNCERTIFIABLE, checks, worst, reason, fallbacks)
        return self._verdict(VerdictStatus.CORRECT, checks, worst, "", fallbacks)

    def verify_int32_offsets(self, candidate: Candidate, free_bytes: float) -> Check:
        """Whether a version also holds where offsets of elements pass 2^31: one call, on a GPU that has the memory.

        Args:
            candidate: has been verified.
            free_bytes: the GPU's free memory.

        Returns:
            The check: skipped, with the reason, where nothing can be seen; failed with what is wrong.
        """
        label = ""
        try:
            if self._far_case is None:
                self._far_case = self._prepared_far(free_bytes)
            prepared, why = self._far_case
            if prepared is None:
                return Check(FAR_CHECK, CheckStatus.SKIPPED, label, why)
            label = prepared.case.label
            seen, compared = self._tried(candidate, prepared, once=True)
        except WorkerFailed as error:
            if error.kind is FailureKind.CANCELLED:
                raise
            # What ends its process is wrong; that the time or the memory is up says nothing of the code.
            crashed = bool(label) and error.kind in (FailureKind.CRASHED, FailureKind.BAD_ANSWER)
            return Check(FAR_CHECK, CheckStatus.FAILED if crashed else CheckStatus.SKIPPED, label, error.message)
        except MtmcError as error:
            return Check(FAR_CHECK, CheckStatus.SKIPPED, label, error.message)
        if seen["status"] != "ran":
            # That there is too little memory says nothing of the code.
            lacks = FailureKind(seen["failure"]).is_out_of_memory
            return Check(FAR_CHECK, CheckStatus.SKIPPED if lacks else CheckStatus.FAILED, label, str(seen["reason"]))
        if not seen["launches"] or compared is None:
            return Check(FAR_CHECK, CheckStatus.SKIPPED, label, "the guard leaves such sizes to the original code")
        wrong = next((c for c in checks_of(prepared.case, seen, compared) if c.status is CheckStatus.FAILED), None)
        if wrong is not None:
            return Check(FAR_CHECK, CheckStatus.FAILED, label, f"{wrong.name}: {wrong.detail}")
        return Check(FAR_CHECK, CheckStatus.PASSED, label)

    def _prepared_far(self, free_bytes: float) -> tuple[Prepared | None, str]:
        sizes, why = far_sizes(self._capture, free_bytes) if self._has_gpu else ({}, "there is no GPU")
        if why:
            return None, why
        prepared = self._prepared(Case(sizes, "normal", self._seed + FAR_SEED), FAR_NUMBER)
        return prepared, "" if prepared is not None else "your own code does not take such sizes here"

    def _tried(
        self, candidate: Candidate, prepared: Prepared, *, once: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What was seen of the candidate on one case, and what comparing its results says; None without results."""
        try:
            return self._run(candidate, prepared, once=once)
        except HandoverFailed:
            # From now on by files, the inputs of this case as well.
            before, self._handed = self._handed, False
            self._call(self._reference, "measure.reference", self._with_expected(prepared), self._seconds)
            try:
                return self._run(candidate, prepared, once=once)
            except HandoverFailed as error:
                # It is what the candidate left, and not how.
                self._handed = before
                return {"status": "runtime_error", "reason": f"its results cannot be read: {error.message}"}, None

    def _run(
        self, candidate: Candidate, prepared: Prepared, *, once: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        case, request = prepared.case, self._request(prepared.case, prepared.number)
        if prepared.large and self._handed:
            with self._references.comparing():
                self._call(self._reference, "measure.offer", request, self._seconds)
        # The interpreter runs one program after the other: one repeat shows state that is kept between calls.
        repeats = 2 if (self._has_gpu or prepared.number == 0) and not once else 1
        asked = {**request, "source": candidate.source, "repeats": repeats}
        seen = self._call(self._runner, "measure.candidate", asked, self._seconds)
        if seen["status"] != "ran" or (prepared.number == 0 and not seen["launches"]):
            return seen, None
        if case.is_kernels_ground and not seen["launches"] and self._capture.uses_random:
            # The user's own code ran, with torch's own random numbers: there is nothing to compare.
            return seen, None
        results = self._secret / "results.pt"
        self._runner.take_results(results)
        given = {"results": str(results), "precision": self._precision, "differing": seen["differing"]}
        with self._references.comparing():
            compared = self._call(
                self._reference, "measure.compare", {**self._with_expected(prepared), **given}, self._seconds
            )
        return seen, compared

    def _prepared(self, case: Case, number: int) -> Prepared | None:
        """Have the reference computed; None where the user's own code does not take the case."""
        prepared = Prepared(number, case, False)
        try:
            made = self._call(self._reference, "measure.reference", self._with_expected(prepared), self._seconds)
        except MtmcError as error:
            # The first case is the workload itself.
            if not number or (
                isinstance(error, WorkerFailed) and error.kind in (FailureKind.CANCELLED, FailureKind.DEADLINE)
            ):
                raise
            if error.kind.is_gpu_failure:
                # A failed kernel leaves the process's GPU context unusable.
                self._reference.close()
            return None
        self._coarse += bool(made["coarse"])
        return Prepared(number, case, bool(made["large"]))

    def _request(self, case: Case, number: int) -> dict[str, object]:
        return {
            "capture": self._capture_json,
            "own": self._own,
            "widened": self._widened,
            "handed": self._handed,
            "case": {**to_json(case), "label": case.label, "first": number == 0},
            "inputs": str(self._inputs / f"inputs-{number}.pt"),
        }

    def _with_expected(self, prepared: Prepared) -> dict[str, object]:
        request = self._request(prepared.case, prepared.number)
        return {**request, "expected": str(self._secret / f"expected-{prepared.number}.pt")}

    def _verdict(
        self, status: VerdictStatus, checks: list[Check], worst: tuple[float, float], reason: str, fallbacks: int = 0
    ) -> Verdict:
        return Verdict(status, tuple(checks), self._mode, *worst, reason, self._notes(fallbacks))

    def _notes(self, fallbacks: int) -> tuple[str, ...]:
        notes = []
        if not self._has_gpu:
            sizes = next(iter(self._references)).case.sizes
            if dict(sizes) != dict(self._capture.graph.sizes):
                shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
                notes.append(f"sizes reduced to {shown} for Triton's interpreter")
            types = [kind for node in self._capture.graph.nodes for kind in node.outputs]
            types += [item.type for item in self._capture.graph.inputs]
            if any(kind.dtype == "bfloat16" for kind in types):
                notes.append("bfloat16 replaced by float32: the interpreter computes bfloat16 wrongly")
        if not self._runner.isolation.is_full:
            notes.append(f"isolation of the candidate: {self._runner.isolation.text}")
        if self._coarse:
            notes.append(
                f"float64 did not fit into memory in {self._coarse} of the cases: compared with your own code's"
            )
        if fallbacks:
            notes.append(f"the guard chose the original code in {fallbacks} of the cases")
        return tuple(notes)
