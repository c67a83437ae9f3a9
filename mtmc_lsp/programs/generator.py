"""Generates PyTorch programs: the same seed and count give the same files.

Programs of the families take turns. Two programs with the same text up to sizes and dtypes are written only if a family has
nothing else to offer.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass

import mtmc_lsp.programs.families  # noqa: F401  (registers the families)
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.programs.draft import Draft
from mtmc_lsp.programs.family import FAMILIES, Family
from mtmc_lsp.programs.rendering import rendered

NEW_FORM_ATTEMPTS = 40
"""After this many consecutive duplicates, programs may differ in sizes and dtypes only."""
ATTEMPTS = 80
"""After this many consecutive duplicates, a family is exhausted."""
NAME_DIGITS = 8
DIRECTIVE = re.compile(r"^# mtmc: .*\n", re.MULTILINE)


@dataclass(frozen=True)
class GeneratedProgram:
    """A file with one target."""

    family: str
    name: str
    """Unique: the family and a hash of the text."""
    target: str
    """The function or class."""
    source: str

    @property
    def file(self) -> str:
        """The file's path in a folder of programs."""
        return f"{self.family}/{self.name}.py"


def family_names() -> tuple[str, ...]:
    """The names of all families, in alphabetical order."""
    return tuple(sorted(FAMILIES))


def generate(count: int, seed: int, family: str = "") -> list[GeneratedProgram]:
    """Different programs, the families in turns.

    Args:
        family: only programs of this family.

    Raises:
        RequestError: there is no such family, or it has fewer programs.
    """
    if family and family not in FAMILIES:
        raise RequestError(f"there is no family {family}", remedy=f"Name one of: {', '.join(family_names())}.")
    sources = [_Source(FAMILIES[name], seed) for name in ([family] if family else family_names())]
    programs: list[GeneratedProgram] = []
    while len(programs) < count and sources:
        remaining = []
        for source in sources:
            if len(programs) == count:
                break
            program = source.next()
            if program is not None:
                programs.append(program)
                remaining.append(source)
        sources = remaining
    if len(programs) < count:
        raise RequestError(f"only {len(programs)} different programs exist", remedy="Ask for fewer programs.")
    return programs


class _Source:
    """The programs of one family."""

    def __init__(self, family: Family, seed: int) -> None:
        self._family = family
        # A text as seed does not depend on the order of families or on hash randomisation.
        self._random = random.Random(f"{seed}/{family.name}")
        self._texts: set[str] = set()
        self._forms: set[str] = set()

    def next(self) -> GeneratedProgram | None:
        """A program that differs from all before; None if there are no more."""
        for attempt in range(ATTEMPTS):
            program = write_program(self._family, self._random)
            form = DIRECTIVE.sub("", program.source)
            if program.source in self._texts or (form in self._forms and attempt < NEW_FORM_ATTEMPTS):
                continue
            self._texts.add(program.source)
            self._forms.add(form)
            return program
        return None


def write_program(family: Family, source: random.Random) -> GeneratedProgram:
    """One program of a family."""
    draft = Draft(source, is_module=None if not family.form else family.form == "module")
    result = family.rule(draft)
    outputs = result if isinstance(result, tuple) else (result,)
    draft.finish(outputs)
    target = _camel_case(family.name) if draft.is_module else family.name
    text = rendered(draft, target, outputs)
    digest = hashlib.sha256(text.encode()).hexdigest()[:NAME_DIGITS]
    return GeneratedProgram(family.name, f"{family.name}_{digest}", target, text)


def _camel_case(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
