"""Which modules a target is made of: another class, number or patch of these is another computation."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable
from types import ModuleType

import torch

from mtmc_lsp.capture.worker.side_effects import access_of
from mtmc_lsp.core.graph import UsedModule

HOLDERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def used_modules(
    instance: torch.nn.Module | None, file: ModuleType, called: Iterable[str], read: Iterable[str]
) -> tuple[UsedModule, ...]:
    """The target's own module, and each that it calls or reads from with all that hold it; holders come first.

    Args:
        instance: the target's own, None for a function.
        file: the user's module, whose names the generated code can use.
        called: accesses of the modules that ran.
        read: accesses of the tensors and plain values that are read.
    """
    if instance is None:
        return ()
    wanted = {"self"}
    for access in (*called, *(re.sub(r"(\.\w+|\[\d+\])$", "", access) for access in read)):
        wanted |= {access[: end.start()] for end in re.finditer(r"[.\[]|$", access)}
    found = []
    for name, module in instance.named_modules():
        access = access_of(name)
        kind = class_name(type(module), file)
        if access in wanted and kind:
            length = len(module) if isinstance(module, HOLDERS) else None
            found.append(UsedModule(access, kind, length))
    return tuple(found)


def shared_parts(instance: torch.nn.Module | None, used: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Further accesses of what is held in several places: a module that is called twice, tied weights, a common buffer.

    Args:
        instance: the target's own module, None for a function.
        used: accesses of the modules and tensors that the graph uses, the first of each.
    """
    if instance is None:
        return ()
    parts = [
        *instance.named_modules(remove_duplicate=False),
        *instance.named_parameters(remove_duplicate=False),
        *instance.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    found = []
    for name, part in parts:
        holder, _, own = name.rpartition(".")
        earlier = first.setdefault(id(part), name)
        # What a shared module holds is shared with it.
        is_inside = f"{again.get(holder, holder)}.{own}".removeprefix(".") == earlier
        if earlier != name:
            again[name] = earlier
        if earlier != name and not is_inside and access_of(earlier) in used:
            found.append((access_of(name), access_of(earlier)))
    return tuple(found)


def class_name(kind: type, file: ModuleType) -> str:
    """Python for a class: by the file's own name for it, by torch's, else what it is called in quotes; empty for a local one."""
    if getattr(torch.nn, kind.__name__, None) is kind:
        return f"torch.nn.{kind.__name__}"
    if kind.__module__ == file.__name__:
        # What a decorator put into another's place has no name here, and neither has a class in a function.
        found: object = file
        for part in kind.__qualname__.split("."):
            found = getattr(found, part, None)
        return kind.__qualname__ if found is kind else ""
    own = next((name for name, value in vars(file).items() if value is kind), None)
    holder = next((name for name, value in vars(file).items() if value is sys.modules.get(kind.__module__)), None)
    if own is None and holder is not None and getattr(vars(file)[holder], kind.__name__, None) is kind:
        return f"{holder}.{kind.__name__}"
    return own or repr(f"{kind.__module__}.{kind.__qualname__}")
