"""Cache attribute lookups of modules and tensors in generated code with assignment expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.module.naming import identifier

PATH = re.compile(r"\bself(?:\.\w+|\[\d+\])+")
"""An attribute or item path that starts at ``self``."""


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
    cacheable = {tuple(parts(access)) for access in accesses if access.startswith("self.")}
    counts: dict[tuple[str, ...], int] = {}
    for match in PATH.finditer(text):
        for prefix in _prefixes(parts(match.group())):
            counts[prefix] = counts.get(prefix, 0) + (prefix in cacheable)
    names: dict[tuple[str, ...], str] = {}

    def named(path: list[str]) -> str:
        prefix = next((p for p in reversed(_prefixes(path)) if counts.get(p, 0) > 1), None)
        if prefix is None:
            return "".join(path)
        remainder = "".join(path[len(prefix) :])
        if prefix in names:
            return names[prefix] + remainder
        last = prefix[-1]
        if prefix in stores and last.startswith("."):
            last = f'.{stores[prefix]}.get("{last[1:]}")'
        inner = named([*prefix[:-1]]) + last
        name = identifier("_".join(re.findall(r"\w+", "".join(prefix[1:]))))
        while name in used_names or name in names.values():
            name += "_"
        names[prefix] = name
        return f"({name} := {inner}){remainder}"

    return PATH.sub(lambda match: named(parts(match.group())), text)


def parts(path: str) -> list[str]:
    """``self.a[0].b`` as ``self``, ``.a``, ``[0]``, ``.b``."""
    return re.findall(r"^self|\.\w+|\[\d+\]", path)


def _prefixes(path: Sequence[str]) -> list[tuple[str, ...]]:
    """All prefixes of a path, shortest first, without ``self`` alone."""
    return [tuple(path[:end]) for end in range(2, len(path) + 1)]
