"""Finds the modules that a target consists of. The graph is valid only for these modules."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from types import FunctionType, ModuleType

import torch

from mtmc_lsp.capture.accesses import owner_of, prefixes
from mtmc_lsp.capture.worker.modules.members import access_of
from mtmc_lsp.core.graph import ModuleHook, UsedModule

HOOKS_OF_PARAMETERS = "torch.nn.utils."
"""Beginning of the module names of hook classes that compute a parameter: weight and spectral norm, and pruning."""
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def used_modules(
    instance: torch.nn.Module | None, file: ModuleType, called: Iterable[str], read: Iterable[str]
) -> tuple[UsedModule, ...]:
    """The target's module, and the modules that it calls or reads from with their containers. Containers come first.

    Args:
        instance: the target's module, ``None`` for a function.
        file: the user's module; generated code can use its names.
        called: accesses of the modules whose ``forward`` ran.
        read: accesses of the tensors and plain values that were read.
    """
    if instance is None:
        return ()
    accesses = {"self"}
    for access in (*called, *map(owner_of, read)):
        accesses |= {*prefixes(access)}
    modules = []
    for name, module in instance.named_modules():
        access = access_of(instance, name)
        kind = class_name(type(module), file)
        if access in accesses and kind:
            length = len(module) if isinstance(module, (*CONTAINERS, torch.nn.ParameterList)) else None
            # The target's own hooks run outside of it.
            hooks = _hooks_of(module, file) if access != "self" else ()
            modules.append(UsedModule(access, kind, length, hooks, _keys_of(module)))
    return tuple(modules)


def _keys_of(module: torch.nn.Module) -> tuple[str, ...] | None:
    """The names of a container's items, which a loop reads in their order; ``None`` if they are only numbers."""
    if isinstance(module, torch.nn.ParameterDict):
        return tuple(module.keys())
    if not isinstance(module, CONTAINERS):
        return None
    keys = tuple(module._modules)
    return keys if keys != tuple(map(str, range(len(keys)))) else None


def _hooks_of(module: torch.nn.Module, file: ModuleType) -> tuple[ModuleHook, ...]:
    """The module's hooks, if the exported graph contains the effect of all of them and a guard can recognise them.

    They are functions that the file has a name for, whose other effects are refused and whose code is a dependency like that of
    other functions, and hooks of torch's utilities that compute a parameter from others, such as ``weight_norm``.
    """
    stores = ((module._forward_pre_hooks, True), (module._forward_hooks, False))
    hooks = [_known_hook(hook, file, is_before) for store, is_before in stores for hook in store.values()]
    return tuple(hook for hook in hooks if hook is not None) if None not in hooks else ()


def _known_hook(hook: object, file: ModuleType, is_before: bool) -> ModuleHook | None:
    if isinstance(hook, FunctionType):
        name = next((name for name, value in vars(file).items() if value is hook), None)
        return ModuleHook(name, None, is_before) if name is not None and hook.__closure__ is None else None
    kind = type(hook)
    settings = dict(getattr(hook, "__dict__", {}))
    is_plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in settings.values())
    if not kind.__module__.startswith(HOOKS_OF_PARAMETERS) or not is_plain:
        return None
    return ModuleHook(f"{kind.__module__}.{kind.__qualname__}", settings, is_before)


def aliases_in(instance: torch.nn.Module | None, used: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Aliases: further accesses of modules, parameters and buffers that occur several times, such as tied weights.

    Args:
        instance: the target's module, ``None`` for a function.
        used: accesses in the graph; the first access of each module and tensor.
    """
    if instance is None:
        return ()
    parts = [
        *instance.named_modules(remove_duplicate=False),
        *instance.named_parameters(remove_duplicate=False),
        *instance.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    result = []
    for name, part in parts:
        parent, _, attribute = name.rpartition(".")
        earlier = first.setdefault(id(part), name)
        # The contents of a shared module are shared with it.
        is_inside = f"{aliases.get(parent, parent)}.{attribute}".removeprefix(".") == earlier
        if earlier != name:
            aliases[name] = earlier
        if earlier != name and not is_inside and access_of(instance, earlier) in used:
            result.append((access_of(instance, name), access_of(instance, earlier)))
    return tuple(result)


def class_name(kind: type, file: ModuleType) -> str:
    """Python expression for a class in the file, or its qualified name in quotes. Empty for a class inside a function."""
    if getattr(torch.nn, kind.__name__, None) is kind:
        return f"torch.nn.{kind.__name__}"
    if kind.__module__ == file.__name__:
        # A decorated class and a class inside a function have no name here.
        result: object = file
        for part in kind.__qualname__.split("."):
            result = getattr(result, part, None)
        return kind.__qualname__ if result is kind else ""
    local_name = next((name for name, value in vars(file).items() if value is kind), None)
    module = next((name for name, value in vars(file).items() if value is sys.modules.get(kind.__module__)), None)
    if local_name is None and module is not None and getattr(vars(file)[module], kind.__name__, None) is kind:
        return f"{module}.{kind.__name__}"
    return local_name or repr(f"{kind.__module__}.{kind.__qualname__}")
