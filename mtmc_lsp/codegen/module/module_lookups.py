"""Modules and their tensors, each looked up once in a function that speaks of many."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.module.naming import identifier

PATH = re.compile(r"\bself(?:\.\w+|\[\d+\])+")
"""What is looked up in a module, and in what that gives."""


def looked_up_once(
    text: str, accesses: Sequence[str], parameters: Sequence[str], stores: Mapping[tuple[str, ...], str]
) -> str:
    """The statements with each module and tensor looked up once, where its name stands first.

    A module finds its parts and tensors in Python, which for a whole network takes as long as its kernels. Every first place is
    always reached: the statements are one chain of conditions, which ends the function where one does not hold.

    Args:
        text: statements that look things up from ``self`` on.
        accesses: what may have a name: modules and tensors, from ``self`` on.
        parameters: of the function that the statements are in.
        stores: the dictionaries to look in, where these are known; what is in none is ``None`` then.
    """
    # A part may be called as a function or a class is that the statements speak of: ``type``, ``all``, ``Block``.
    taken = {*parameters, *re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)}
    known = {tuple(parts(access)) for access in accesses if access.startswith("self.")}
    counts: dict[tuple[str, ...], int] = {}
    for match in PATH.finditer(text):
        for prefix in _prefixes(parts(match.group())):
            counts[prefix] = counts.get(prefix, 0) + (prefix in known)
    names: dict[tuple[str, ...], str] = {}

    def named(path: list[str]) -> str:
        prefix = next((p for p in reversed(_prefixes(path)) if counts.get(p, 0) > 1), None)
        if prefix is None:
            return "".join(path)
        rest = "".join(path[len(prefix) :])
        if prefix in names:
            return names[prefix] + rest
        last = prefix[-1]
        if prefix in stores and last.startswith("."):
            last = f'.{stores[prefix]}.get("{last[1:]}")'
        inner = named([*prefix[:-1]]) + last
        name = identifier("_".join(re.findall(r"\w+", "".join(prefix[1:]))))
        while name in taken or name in names.values():
            name += "_"
        names[prefix] = name
        return f"({name} := {inner}){rest}"

    return PATH.sub(lambda match: named(parts(match.group())), text)


def parts(path: str) -> list[str]:
    """``self.a[0].b`` as ``self``, ``.a``, ``[0]``, ``.b``."""
    return re.findall(r"^self|\.\w+|\[\d+\]", path)


def _prefixes(path: Sequence[str]) -> list[tuple[str, ...]]:
    """Every path on the way to one, shortest first; ``self`` alone left out."""
    return [tuple(path[:end]) for end in range(2, len(path) + 1)]
