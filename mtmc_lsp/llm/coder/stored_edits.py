"""Edits of an earlier run, to be applied again without asking a model."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence

from mtmc_lsp.core.chat import BudgetSpent, Message, Reply
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.coder import editable_code_of
from mtmc_lsp.llm.coder.editable_text import EditableCode, source_of, split_code


def recorded_edits(capture: Capture, root: Candidate, steps: Sequence[Step]) -> dict[str, str]:
    """The change of each accepted step as search/replace hunks, by the key of its action."""
    edits: dict[str, str] = {}
    previous = root
    for step in steps:
        candidate = step.candidate
        if step.status is not StepStatus.ACCEPTED or candidate is None or candidate.code is None:
            continue
        try:
            edits[step.action.key] = "".join(_hunks(editable_code_of(capture, previous), split_code(candidate.code)))
        except CannotCode:
            return edits
        previous = candidate
    return edits


def _hunks(old: EditableCode, new: EditableCode) -> Iterator[str]:
    """Hunks for each function separately, so that they still apply when neighbouring functions differ."""
    old_functions, new_functions = _functions(old), _functions(new)
    for name, text in new_functions.items():
        if name not in old_functions:
            yield _hunk([], text)
        else:
            yield from _changes(old_functions[name], text)
    for name, text in old_functions.items():
        if name not in new_functions:
            yield _hunk(text, [])


def _functions(editable: EditableCode) -> dict[str, list[str]]:
    """The lines of each function. For the launcher only its body: its header is generated from the kernels it launches."""
    functions = {}
    for node in ast.parse(editable.text).body:
        assert isinstance(node, ast.FunctionDef), "editable code contains only functions"
        lines = source_of(editable.text, node).splitlines()
        functions[node.name] = editable.text.splitlines()[node.body[0].lineno - 1 : node.end_lineno]
        if node.name != editable.launcher:
            functions[node.name] = lines
    return functions


def _changes(old: list[str], new: list[str]) -> Iterator[str]:
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            # An insertion needs a preceding line as anchor; other changes are anchored by the lines they replace.
            anchor_lines = 1 if kind == "insert" and i1 else 0
            yield _hunk(old[i1 - anchor_lines : i2], new[j1 - anchor_lines : j2])


def _hunk(search: list[str], replace: list[str]) -> str:
    lines = ["<<<<<<< SEARCH", *search, "=======", *replace, ">>>>>>> REPLACE"]
    return "".join(f"{line}\n" for line in lines)


class NoModel:
    """Placeholder for runs that must not ask a model."""

    def ask(self, purpose: str, messages: Sequence[Message], **options: object) -> list[Reply]:
        """Refuse to ask."""
        raise BudgetSpent("this step needs a language model, but this run must not ask one")
