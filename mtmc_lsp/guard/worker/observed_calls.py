"""Observes what the guards of a target decide when it is called. Runs in workers."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.guard.conditions import DISPATCH, SUFFIX
from mtmc_lsp.guard.worker.phrases import phrase
from mtmc_lsp.guard.worker.refusal import find_refusal

UNKNOWN = "its guard refuses the call"


@dataclass(frozen=True)
class Decision:
    """What one guard decided."""

    guard: str
    """Its name."""
    reason: str = ""
    """Why it refuses the call, as a clause; empty if the kernels run."""
    condition: str = ""
    """The condition that does not hold, as Python."""


class _AllKnown(BaseException):
    """Ends a call whose guards have decided. User code that handles exceptions does not catch it."""


def guards_of(source: str, qualname: str) -> tuple[str, ...]:
    """The guards in the dispatch statements of a target, in the order of its text; for a module those of its ``forward``."""
    found: Any = ast.parse(source)
    for name in qualname.split("."):
        found = _definition(found, name)
    if isinstance(found, ast.ClassDef):
        found = _definition(found, "forward")
    lines = source.splitlines()
    # Where a class inherits ``forward``, the whole method is generated, and the mark is in its first line.
    is_generated = isinstance(found, ast.FunctionDef) and DISPATCH in lines[found.lineno - 1]
    calls = [node for node in ast.walk(found) if isinstance(node, ast.Call)] if found is not None else []
    names = [
        (call.lineno, call.func.id)
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id.endswith(SUFFIX)
        and (is_generated or _is_marked(lines, call))
    ]
    return tuple(dict.fromkeys(name for _, name in sorted(names)))


def _is_marked(lines: Sequence[str], call: ast.Call) -> bool:
    """Whether a call is part of a dispatch statement, which may be longer than a line."""
    return any(DISPATCH in line for line in lines[call.lineno - 1 : call.end_lineno])


def _definition(node: Any, name: str) -> ast.AST | None:
    """The last definition of this name in a body, also inside ``if`` and ``try``; ``None`` if there is none."""
    definition: ast.AST | None = None
    for child in ast.iter_child_nodes(node) if node is not None else ():
        if isinstance(child, (ast.Assign, ast.AnnAssign)) and isinstance(child.value, ast.Lambda):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            is_named = any(isinstance(item, ast.Name) and item.id == name for item in targets)
            definition = child if is_named else definition
        elif isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            definition = child if child.name == name else definition
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            definition = _definition(child, name) or definition
    return definition


def observe(module: Any, names: Sequence[str], call: Callable[[], object]) -> list[Decision]:
    """Call the target up to its last guard, or up to the first guard that refuses. Later code does not run.

    Args:
        module: the target's module.
        names: the guards of the target.
        call: calls it.
    """
    decisions: list[Decision] = []
    originals = {name: getattr(module, name) for name in names}

    def observed(name: str) -> Callable[..., Any]:
        guard = originals[name]

        @functools.wraps(guard)
        def decide(*arguments: Any, **named: Any) -> Any:
            result = guard(*arguments, **named)
            decisions.append(Decision(name) if accepts(result) else explain(guard, arguments, named))
            if decisions[-1].reason or {item.guard for item in decisions} == set(names):
                raise _AllKnown
            return result

        return decide

    for name in names:
        setattr(module, name, observed(name))
    try:
        call()
    except _AllKnown:
        pass
    finally:
        for name, guard in originals.items():
            setattr(module, name, guard)
    return decisions


def accepts(result: object) -> bool:
    """Whether the result of a guard lets the kernels run."""
    return result is not None and result is not False


def explain(guard: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Decision:
    """Why a guard refuses a call."""
    function = inspect.unwrap(guard)
    try:
        bound = inspect.signature(function).bind(*arguments, **named).arguments
        refusal = find_refusal(function, bound)
        if refusal is not None:
            return Decision(function.__name__, phrase(refusal), refusal.text)
    except Exception as error:  # the explanation must not break a program that runs without it
        return Decision(function.__name__, f"{UNKNOWN} ({type(error).__name__}: {error})")
    return Decision(function.__name__, UNKNOWN)
