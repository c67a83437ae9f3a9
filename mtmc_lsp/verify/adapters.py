"""The two kinds of candidates: a version of the user's file, and a foreign candidate in its own file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mtmc_lsp.capture.module_paths import package_of
from mtmc_lsp.codegen.module.cuda_graph import without_cuda_graph
from mtmc_lsp.core.results import Check
from mtmc_lsp.core.run import Placement
from mtmc_lsp.core.workload import Capture, Target
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.source.sibling.disk import read_kernels
from mtmc_lsp.source.sibling.pair import FilePair, kernels_path, separated, without_block
from mtmc_lsp.verify.cases import VALUES, Case, foreign_cases, verification_cases, version_cases
from mtmc_lsp.verify.edge_cases import edge_cases
from mtmc_lsp.verify.messages import CandidateSource, GuardRequest, KernelsFile, SeparateCandidate
from mtmc_lsp.verify.outcomes import LARGER, CaseOutcome, real_size_notes
from mtmc_lsp.verify.sizes.case_sizes import is_interpretable
from mtmc_lsp.verify.source_scan import scan
from mtmc_lsp.verify.trials import Trial, trials

KERNEL_DECORATOR = "@triton.jit"
"""The text above each kernel, with or without arguments after it."""
VERSION_REPEAT_SECONDS = 1.0
"""Time for the many calls of the smallest case of a version: ``optimize`` verifies many versions."""
FOREIGN_REPEAT_SECONDS = 3600.0
"""The same for a foreign candidate: all of them."""
BRIEF_CASES = 2
"""Cases of a brief verification, besides the smallest one."""
BRIEF_PART = 0.1
"""Share of the interpreter's limits for these cases."""
WAITING = "programs of {names} may wait for each other: they took turns, up to 16 at a time, begun in the usual order"
"""The note on launches whose programs may not run in any order; the number is
:data:`~mtmc_lsp.verify.worker.interpreter.grids.MOST_WAITING`."""
FULL_SIZE_FACTOR = 4.0
"""Factor on the time limit of a case with full-size parameters under the interpreter."""


class Adapter(Protocol):
    """What the engine needs to know about a candidate."""

    @property
    def capture(self) -> Capture:
        """Of the reference."""

    @property
    def needs_kernel(self) -> bool:
        """Whether the first case must launch a Triton kernel."""

    @property
    def replays_launches(self) -> bool:
        """Whether it replays its launches as a CUDA graph, by generated code that computes from each call's arguments."""

    @property
    def draws_same_numbers(self) -> bool:
        """Whether its random numbers are those of the reference."""

    @property
    def takes_constructor_arguments(self) -> bool:
        """Whether it is constructed with the reference's arguments, which :meth:`trials` then needs."""

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else wrote it. Then its kept state and other surroundings are tried, and torch's work is counted."""

    @property
    def is_used(self) -> bool:
        """Whether to use it in further ways, as a user's program does: hooks, modes, state dicts, copies."""

    @property
    def repeat_seconds(self) -> float:
        """Time for the many calls of the smallest case."""

    @property
    def guarded_call(self) -> GuardRequest | None:
        """The user's call, which the candidate's guard must accept; ``None`` if it has no guard."""

    def text_checks(self) -> tuple[Check, ...]:
        """The checks on its text, before anything runs."""

    def trials(self, init: str, *, interpreted: bool) -> list[Trial]:
        """The ways to run it, to be tried in order; none if it is too large for the interpreter."""

    def cases(self, trial: Trial, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
        """The cases; the first is the workload."""

    def source(self, trial: Trial) -> CandidateSource:
        """How the candidate process loads it."""

    def notes(
        self, trial: Trial, outcomes: Sequence[CaseOutcome], isolation: Isolation, *, interpreted: bool
    ) -> list[str]:
        """What the verdict leaves out."""


def kernels_file(path: Path, qualname: str, pair: FilePair) -> KernelsFile | None:
    """The file of kernels of a user's file, for a request about one target; None if there is none."""
    if pair.kernels is None:
        return None
    others = without_block(pair.kernels, qualname) or b""
    return KernelsFile(str(kernels_path(path)), pair.kernels.decode(), others.decode())


@dataclass(frozen=True)
class VersionInFile:
    """A version of the user's file, as ``optimize`` creates it: a guard calls its kernels, or else the user's code."""

    capture: Capture
    user_source: str
    """The user's file."""
    text: str
    """The file with the version."""
    place: Placement = Placement.END
    """Where the version's code goes when it is delivered."""

    draws_same_numbers = True
    is_foreign = False
    is_used = False
    takes_constructor_arguments = False
    repeat_seconds = VERSION_REPEAT_SECONDS

    @property
    def needs_kernel(self) -> bool:
        """Whether the version has a kernel. A rewrite of the formula may come first, with torch calls alone."""
        return self.text.count(KERNEL_DECORATOR) > self.user_source.count(KERNEL_DECORATOR)

    @property
    def replays_launches(self) -> bool:
        """Whether the text has the function that replays launches, exactly as it is generated."""
        return without_cuda_graph(self.text) != self.text

    @property
    def guarded_call(self) -> GuardRequest | None:
        """The call of the workload, in the files as they are delivered.

        Raises:
            RequestError: the code cannot go to its place.
        """
        request = GuardRequest(self.capture.workload, self.capture.module_name, self.user_source, self.text)
        if self.place is not Placement.SIBLING:
            return request
        target, text = self.capture.workload.target, self.text.encode()
        path = Path(target.path)
        present = read_kernels(path)
        pair = separated(text, target.qualname, path, package_of(path)[0], present)
        return replace(request, source=pair.user.decode(), kernels=kernels_file(path, target.qualname, pair))

    def text_checks(self) -> tuple[Check, ...]:
        """The checks on the text that is not the user's."""
        return scan(self.text, self.capture.workload.target.path, self.user_source)

    def trials(self, init: str, *, interpreted: bool) -> list[Trial]:
        """One, with the user's parameters."""
        return [Trial(self.capture)] if not interpreted or is_interpretable(self.capture, is_version=True) else []

    def cases(self, trial: Trial, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
        """With calls outside the guard."""
        return version_cases(trial.capture, interpreted=interpreted, seed=seed)

    def source(self, trial: Trial) -> CandidateSource:
        """The version stands in for the user's file."""
        return CandidateSource(self.text)

    def notes(
        self, trial: Trial, outcomes: Sequence[CaseOutcome], isolation: Isolation, *, interpreted: bool
    ) -> list[str]:
        """Isolation, and cases in which the guard chose the user's code."""
        notes = []
        if not isolation.is_full:
            notes.append(f"isolation of the candidate: {isolation.text}")
        # Guards may refuse unusual layouts.
        count = _without_kernel([outcome for outcome in outcomes if not outcome.case.layout])
        if count:
            notes.append(f"the guard chose the original code in {count} of the cases")
        return notes


@dataclass(frozen=True)
class BrieflyVerifiedVersion(VersionInFile):
    """A version that is verified on few small cases: its verdict is right far more often than not, but is no guarantee.

    The cases are the workload, sizes that no tile divides, and the smallest one, which is called several times. Calls outside
    the guard, unusual values and layouts, and the call that is tried before delivery are left out.
    """

    repeat_seconds = 0.0

    @property
    def guarded_call(self) -> GuardRequest | None:
        """None: the first case shows whether a kernel runs."""
        return None

    def cases(self, trial: Trial, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
        """The first two cases, at small sizes under the interpreter."""
        part = BRIEF_PART if interpreted else 1.0
        cases = verification_cases(trial.capture, interpreted=interpreted, seed=seed, part=part)
        return cases[:BRIEF_CASES]


@dataclass(frozen=True)
class ForeignCandidate:
    """A candidate in its own file, as ``mtmc verify`` judges it."""

    capture: Capture
    target: Target
    """The candidate."""
    text: str
    """The candidate's file."""
    needs_kernel: bool = True
    takes_empty: bool = True
    """Whether it must accept inputs without elements if the reference does."""

    replays_launches = False
    guarded_call = None
    draws_same_numbers = False
    is_foreign = True
    takes_constructor_arguments = True
    repeat_seconds = FOREIGN_REPEAT_SECONDS

    @property
    def is_used(self) -> bool:
        """Yes, unless a part of a body or explicit state makes it no function or module that a user could call."""
        workload = self.capture.workload
        return workload.target.region is None and not workload.state

    def text_checks(self) -> tuple[Check, ...]:
        """The checks on the whole file."""
        return scan(self.text, self.target.path)

    def trials(self, init: str, *, interpreted: bool) -> list[Trial]:
        """With full-size parameters, or for the interpreter with smaller ones."""
        return trials(self.capture, init, interpreted=interpreted)

    def cases(self, trial: Trial, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
        """Without calls that only a guard handles."""
        usual = foreign_cases(
            trial.capture, interpreted=interpreted, seed=seed, few=trial.few, takes_empty=self.takes_empty
        )
        if trial.few:
            return usual
        model = replace(usual[-1], layout="", kind=VALUES)
        first = max(case.seed for case in usual) + 1
        return (*usual, *edge_cases(trial.capture, self.text, model, interpreted=interpreted, seed=first))

    def source(self, trial: Trial) -> CandidateSource:
        """The candidate's file, with the reference's constructor arguments."""
        return CandidateSource(self.text, SeparateCandidate(self.target, trial.init))

    def notes(
        self, trial: Trial, outcomes: Sequence[CaseOutcome], isolation: Isolation, *, interpreted: bool
    ) -> list[str]:
        """The limits of this verification: what the workload excludes, and the isolation."""
        notes = [trial.note] if trial.note else []
        if not trial.capture.variable_sizes:
            notes.append("the workload has no variable sizes, so only its shapes were tested")
        if not any(tensor.requires_grad for tensor in trial.capture.workload.tensors.values()):
            notes.append("the workload asks for no gradients, so none were compared")
        if not self.takes_empty:
            notes.append("inputs without elements were left out, as requested")
        refused = {
            check.detail: outcome.case for outcome in outcomes for check in outcome.checks if check.name == LARGER
        }
        notes += [f"on {case.text(trial.capture.graph)} {detail}" for detail, case in refused.items()]
        count = _without_kernel(outcomes)
        if count and self.needs_kernel:
            notes.append(f"no kernel was launched in {count} of the cases")
        notes.append(f"isolation of the candidate: {isolation.text}")
        if unused := sorted({name for outcome in outcomes for name in outcome.unused_kernels}):
            notes.append(f"the results on the first case are the same without {' and without '.join(unused)}")
        notes += real_size_notes(outcomes, trial.capture.graph)
        if waiting := sorted({name for outcome in outcomes for name in outcome.waiting}):
            notes.append(WAITING.format(names=" and ".join(waiting)))
        if interpreted:
            notes.append("an interpreter run is no proof for a GPU: not all races show")
        return notes


def _without_kernel(outcomes: Sequence[CaseOutcome]) -> int:
    """The number of cases inside the guard that ran and launched no kernel."""
    return sum(o.case.expects_kernel and o.ran and not o.launches for o in outcomes)
