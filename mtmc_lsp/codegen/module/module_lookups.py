"""Look up each module and tensor of a guard once, by assignment expressions, and check many modules at once."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence

from mtmc_lsp.capture.accesses import PATH, is_indexed, is_of_module, owner_of, prefixes, quoted, steps, words
from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.guard_helpers import ARE_UNCHANGED_MODULES, HAS_CAPTURED_HOOKS, IS_UNCHANGED_MODULE
from mtmc_lsp.codegen.module.naming import identifier
from mtmc_lsp.core.graph import ModuleHook, UsedModule

LEAST_MODULES_IN_GROUP = 3
"""Minimum number of modules that one helper checks together."""


def cache_lookups(
    text: str, accesses: Sequence[str], parameters: Sequence[str], stores: Mapping[tuple[str, ...], str]
) -> str:
    """Rewrite statements so that each module and tensor is looked up once, at its first use.

    ``torch.nn.Module`` attribute lookup runs in Python. For a large network it takes as long as the kernels. The first use always
    executes before the others, because the statements are a chain of conditions that returns at the first failure.

    Args:
        text: statements with paths that start at ``self``.
        accesses: paths of modules and tensors that may be cached in variables.
        parameters: parameters of the function that contains the statements.
        stores: the module dictionary that stores each path, if known; a missing entry then evaluates to ``None``.
    """
    # Avoid names of functions and classes in the statements, such as ``type``, ``all`` or ``Block``.
    used_names = {*parameters, *re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)}
    cacheable = {tuple(parts(access)) for access in accesses if is_of_module(access)}
    counts: dict[tuple[str, ...], int] = {}
    for match in PATH.finditer(text):
        for prefix in _prefixes(parts(match.group())):
            counts[prefix] = counts.get(prefix, 0) + (prefix in cacheable)
    names: dict[tuple[str, ...], str] = {}

    def stored(path: tuple[str, ...]) -> str:
        return f".{stores[path]}.get({quoted(str(steps(path[-1])[0].key))})"

    def named(path: list[str]) -> str:
        if counts.get(tuple(path), 0) == 1 and tuple(path) in stores:
            return f"{named(path[:-1])}{stored(tuple(path))}"
        prefix = next((p for p in reversed(_prefixes(path)) if counts.get(p, 0) > 1), None)
        if prefix is None:
            return "".join(path)
        remainder = "".join(path[len(prefix) :])
        if prefix in names:
            return names[prefix] + remainder
        inner = named([*prefix[:-1]]) + (stored(prefix) if prefix in stores else prefix[-1])
        name = identifier(words("".join(prefix)))
        while name in used_names or name in names.values() or keyword.iskeyword(name):
            name += "_"
        names[prefix] = name
        return f"({name} := {inner}){remainder}"

    return PATH.sub(lambda match: named(parts(match.group())), text)


def parts(path: str) -> list[str]:
    """``self.a[0].b`` as ``self``, ``.a``, ``[0]``, ``.b``."""
    return [prefixes(path)[0], *(step.text for step in steps(path))]


def _prefixes(path: Sequence[str]) -> list[tuple[str, ...]]:
    """All prefixes of a path, shortest first, without ``self`` alone."""
    return [tuple(path[:end]) for end in range(2, len(path) + 1)]


def unchanged_modules(modules: Sequence[UsedModule], *, in_groups: bool) -> list[str]:
    """The conditions that submodules run the captured code.

    In groups, one call checks all modules of a class at a depth. Containers come first, because a condition reads submodules of
    modules that earlier conditions accepted.
    """
    if not in_groups:
        return [condition for module in modules for condition in _of_module(module)]
    lists = module_lists(modules)
    groups: dict[tuple[int, str, int | None, str], list[UsedModule]] = {}
    for module in modules:
        is_single = (
            module.hooks or module.keys is not None or (module.length is not None and module.access not in lists)
        )
        key = len(parts(module.access)), module.kind, module.length, module.access if is_single else ""
        groups.setdefault(key, []).append(module)
    conditions: list[str] = []
    for (_, kind, length, single), group in sorted(groups.items(), key=lambda item: item[0][0]):
        if single or (length is None and len(group) < LEAST_MODULES_IN_GROUP):
            conditions += [condition for module in group for condition in _of_module(module)]
        else:
            indices = "None" if length is None else f"range({length})"
            accesses = [module.access for module in group]
            conditions.append(call_text(ARE_UNCHANGED_MODULES, [kind, indices, *accesses], "        "))
    return conditions


def module_lists(modules: Sequence[UsedModule]) -> set[str]:
    """The accesses of the containers whose modules are read by their index, and whose indices a condition checks."""
    indexed = {owner_of(module.access) for module in modules if is_indexed(module.access)}
    return {module.access for module in modules if module.length is not None and not module.hooks} & indexed - {"self"}


def _of_module(module: UsedModule) -> list[str]:
    """The conditions that a submodule runs the captured code, and that a container has the captured items."""
    return [_is_unchanged(module), *([_has_keys(module)] if module.keys is not None else [])]


def has_items(module: UsedModule) -> list[str]:
    """The condition that the target's module, if it is a container, has the captured items."""
    if module.keys is not None:
        return [_has_keys(module)]
    return [f"len({module.access}) == {module.length}"] if module.length is not None else []


def _has_keys(module: UsedModule) -> str:
    """The condition that the items of a container have the captured names, in this order."""
    names = f"{module.access}.keys()" if module.length is None else f"{module.access}._modules"
    return f"[*{names}] == {list(module.keys or ())!r}"


def _is_unchanged(module: UsedModule) -> str:
    """The condition that a submodule runs the captured code: its class, and the hooks whose effect is in the graph."""
    if module.hooks:
        before, after = (
            f"[{', '.join(_hook(hook) for hook in module.hooks if hook.is_before == is_before)}]"
            for is_before in (True, False)
        )
        return f"{HAS_CAPTURED_HOOKS}({module.access}, {module.kind}, {before}, {after})"
    length = f", {module.length}" if module.length is not None else ""
    return f"{IS_UNCHANGED_MODULE}({module.access}, {module.kind}{length})"


def _hook(hook: ModuleHook) -> str:
    return hook.kind if hook.settings is None else f'("{hook.kind}", {dict(hook.settings)!r})'
