"""A launcher of the user's file as a candidate for verification."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.results import Check
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.cases import SPECIAL_DISTRIBUTIONS, VALUES, Case
from mtmc_lsp.verify.source_scan import scan
from mtmc_lsp.verify.trials import Trial


@dataclass(frozen=True)
class LauncherInFile(ForeignCandidate):
    """A function that launches kernels, in another version of the user's file than the reference.

    It is the author's code, which states what it accepts by how it is written: it gets contiguous tensors with elements and
    finite values. Layouts that its workload does not name, and calls in other modes, are left out. So are sizes of 1, at which
    the reference may return a view of its argument: observation compares results there. Constant arguments are left out, too:
    the variance of equal values is rounding alone.
    """

    original: str = ""
    """The user's file."""
    takes_empty: bool = False
    # The author of the file deceives nobody, so the checks for candidates that count calls or read clocks are left out.
    is_foreign = False
    repeat_seconds = 1.0

    @property
    def is_used(self) -> bool:
        """No: other modes, copies and threads are no matter of a kernel."""
        return False

    def text_checks(self) -> tuple[Check, ...]:
        """The checks on the text that is not the user's."""
        return scan(self.text, self.target.path, self.original)

    def cases(self, trial: Trial, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
        """Those with contiguous arguments and finite values, the same for all texts of one file."""
        # Cases depend on the numbers in a text: with those of a repair, the case that failed before might be missing.
        first = ForeignCandidate(self.capture, self.target, self.original, takes_empty=self.takes_empty)
        cases = first.cases(trial, interpreted=interpreted, seed=seed)
        usual = trial.capture.graph.sizes
        return tuple(
            case
            for case in cases
            if case.kind == VALUES
            and not case.layout
            and case.distribution not in (*SPECIAL_DISTRIBUTIONS, "constant")
            and not any(size == 1 != usual.get(name) for name, size in case.sizes.items())
        )
