"""Reads from the bytecode of a function which globals, imported modules and attributes it uses."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any


def global_reads(code: CodeType) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The global names that a function reads, with the attributes read from them: ``cfg.a.b`` gives ``(a, b)``."""
    instructions = list(dis.get_instructions(code))
    for i, item in enumerate(instructions):
        if item.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(item.argval), _attributes(instructions, i + 1)


def _attributes(instructions: list[dis.Instruction], start: int) -> tuple[str, ...]:
    steps = []
    for item in instructions[start:]:
        if item.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(str(item.argval))
        elif item.opname not in ("CACHE", "PUSH_NULL"):
            break
    return tuple(steps)


def imported_reads(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[tuple[ModuleType, tuple[str, ...]]]:
    """The attributes that a function reads from modules that it imports itself."""
    instructions = list(dis.get_instructions(code))
    module: ModuleType | None = None
    aliases: dict[str, ModuleType] = {}
    for i, item in enumerate(instructions):
        if item.opname == "IMPORT_NAME":
            module = _module(str(item.argval), namespace)
            if module is not None and instructions[i + 1].opname == "STORE_FAST":
                # `import a.b` binds `a`.
                top = _module(str(item.argval).split(".")[0], namespace)
                aliases[str(instructions[i + 1].argval)] = top or module
        elif item.opname == "IMPORT_FROM" and module is not None:
            yield module, (str(item.argval),)
        elif item.opname.startswith("LOAD_FAST"):
            name = item.argval[-1] if isinstance(item.argval, tuple) else item.argval
            if name in aliases:
                yield aliases[name], _attributes(instructions, i + 1)


def _module(name: str, namespace: Mapping[str, Any]) -> ModuleType | None:
    package = namespace.get("__package__") or ""
    module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
    return module if isinstance(module, ModuleType) else None
