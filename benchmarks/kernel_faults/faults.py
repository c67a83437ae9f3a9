"""The planted faults: one change of a sound kernel each, as an author makes it by mistake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.kernel_faults.first_faults import FIRST_FAULTS
from benchmarks.kernel_faults.fourth_faults import FOURTH_FAULTS
from benchmarks.kernel_faults.kernels import source
from benchmarks.kernel_faults.second_faults import SECOND_FAULTS
from benchmarks.kernel_faults.third_faults import THIRD_FAULTS


@dataclass(frozen=True)
class Planted:
    """A fault in one kernel."""

    name: str
    kernel: str
    changes: tuple[tuple[str, str], ...]
    """Texts and their replacements; each text occurs once in the file."""

    @property
    def text(self) -> str:
        """The file with the fault."""
        text = source(self.kernel)
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        return text


def planted(table: Iterable[Sequence[str]]) -> tuple[Planted, ...]:
    """The faults of a table with rows of a name, a kernel, then each text and its replacement."""
    return tuple(
        Planted(name, kernel, tuple(zip(texts[::2], texts[1::2], strict=True))) for name, kernel, *texts in table
    )


TABLES = {
    "first": planted(FIRST_FAULTS),
    "second": planted(SECOND_FAULTS),
    "third": planted(THIRD_FAULTS),
    "fourth": planted(FOURTH_FAULTS),
}
"""The faults by the group of their kernels."""
FAULTS = tuple(fault for table in TABLES.values() for fault in table)
"""97 faults in 25 kernels."""
