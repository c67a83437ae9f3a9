"""A candidate: an honest kernel, named edits of its text, and inputs on which the edited one is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REFERENCES = FOLDER / "references.py"
CLASSES = {"gated_norm": "GatedNorm"}
"""References that are classes; the others are functions with the name of the base kernel."""

Witness = Callable[[Any, Any], tuple[Any, Any]]
"""Calls the reference and the candidate on the same inputs and returns what each computed."""
Edit = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """One candidate. ``expected`` is ``refused``, ``caught`` (refused or labelled) or ``certified``."""

    kind: str
    name: str
    base: str
    edits: tuple[Edit, ...]
    witness: Witness | None
    expected: str = "refused"

    @property
    def reference(self) -> str:
        """The reference's name: what the base kernel's file is called before ``__``."""
        return self.base.partition("__")[0]

    @property
    def target(self) -> str:
        """The function or class that both files define."""
        return CLASSES.get(self.reference, self.reference)

    def text(self) -> str:
        """The candidate's source. Each edit must match exactly once; an edit of ``""`` appends."""
        text = (FOLDER / "kernels" / f"{self.base}.py").read_text()
        for old, new in self.edits:
            if not old:
                text += new
                continue
            if text.count(old) != 1:
                raise ValueError(f"{self.kind}/{self.name}: {text.count(old)} matches of {old!r} in {self.base}.py")
            text = text.replace(old, new)
        return text


def table(kind: str, rows: list[tuple[str, str, list[Edit], Witness]], expected: str = "refused") -> list[Case]:
    """The cases of one class from rows of name, base kernel, edits and witness."""
    return [Case(kind, name, base, tuple(edits), witness, expected) for name, base, edits, witness in rows]


def all_cases() -> list[Case]:
    """Every candidate of the suite, class by class."""
    from benchmarks.adversarial_second import (
        dtypes,
        fakes,
        harness,
        honest,
        layouts,
        probing,
        sizes,
        state,
        use,
        values,
    )

    parts = (sizes, layouts, values, dtypes, use, state, harness, probing, fakes, honest)
    return [case for part in parts for case in part.CASES]
