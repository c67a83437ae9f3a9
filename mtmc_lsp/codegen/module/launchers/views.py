"""Leaves out views that only kernels read: a kernel gets an address, which is that of the tensor on which the view is based."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SAME_START = frozenset("view unsqueeze squeeze expand t transpose permute".split())
"""Views whose first element is that of the tensor on which they are based."""


@dataclass(frozen=True)
class View:
    """The statement of a launcher that makes a view."""

    statement: str
    source: str
    """The variable of the tensor on which the view is based."""


def without_views(
    lines: Sequence[str], views: Mapping[str, View], kernel_arguments: Mapping[str, int], others: str
) -> list[str]:
    """The statements without the views that nothing but kernels reads.

    Args:
        views: by variable, in the order of their statements.
        kernel_arguments: how often each variable is an argument of a kernel.
        others: the rest of the launcher's text, which may read variables as well.
    """
    result, counts = list(lines), dict(kernel_arguments)
    for name, view in reversed([*views.items()]):
        word = re.compile(rf"\b{name}\b")
        uses = sum(len(word.findall(line)) for line in result) - len(word.findall(view.statement))
        if result.count(view.statement) != 1 or uses != counts.get(name, 0) or word.search(others):
            continue
        result.remove(view.statement)
        result = [word.sub(view.source, line) for line in result]
        counts[view.source] = counts.get(view.source, 0) + uses
    return result
