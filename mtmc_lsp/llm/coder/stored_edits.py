"""The edits of an earlier run, to be made again without asking anybody."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence

from mtmc_lsp.core.chat import BudgetSpent, Exchange
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.coder import sheet_of
from mtmc_lsp.llm.coder.editable_text import Sheet, source_of, taken_apart
from mtmc_lsp.llm.endpoint.ledger import Ledger, Question


def edits_of(capture: Capture, root: Candidate, steps: Sequence[Step]) -> dict[str, str]:
    """What each accepted step changed, by the key of its action, as hunks with which a model might have answered."""
    found: dict[str, str] = {}
    before = root
    for step in steps:
        made = step.candidate
        if step.status is not StepStatus.ACCEPTED or made is None or made.code is None:
            continue
        try:
            found[step.action.key] = "".join(_hunks(sheet_of(capture, before), taken_apart(made.code)))
        except CannotCode:
            return found
        before = made
    return found


def _hunks(old: Sheet, new: Sheet) -> Iterator[str]:
    """Function by function, so that a hunk holds nothing of its neighbours and also fits where those differ."""
    before, after = _functions(old), _functions(new)
    for name, text in after.items():
        if name not in before:
            yield _hunk([], text)
        else:
            yield from _changes(before[name], text)
    for name, text in before.items():
        if name not in after:
            yield _hunk(text, [])


def _functions(sheet: Sheet) -> dict[str, list[str]]:
    """The lines of each function; of the launcher without its head, which is written anew from what it launches."""
    found = {}
    for node in ast.parse(sheet.text).body:
        assert isinstance(node, ast.FunctionDef), "a sheet holds functions alone"
        lines = source_of(sheet.text, node).splitlines()
        found[node.name] = sheet.text.splitlines()[node.body[0].lineno - 1 : node.end_lineno]
        if node.name != sheet.launcher:
            found[node.name] = lines
    return found


def _changes(old: list[str], new: list[str]) -> Iterator[str]:
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            # An insertion needs a line to stand at; others stand at what they replace.
            k = 1 if kind == "insert" and i1 else 0
            yield _hunk(old[i1 - k : i2], new[j1 - k : j2])


def _hunk(search: list[str], replace: list[str]) -> str:
    lines = ["<<<<<<< SEARCH", *search, "=======", *replace, ">>>>>>> REPLACE"]
    return "".join(f"{line}\n" for line in lines)


class NoModel(Ledger):
    """Stands where no model may be asked."""

    def _answers(self, question: Question) -> list[tuple[Exchange, MtmcError | None]]:
        raise BudgetSpent("a language model would have to be asked, and none may be")
