"""Drops tensors of a launcher after their last use, so that later tensors get their memory.

Python keeps a local variable until the function returns. Eager mode has no names for most intermediate values, and its modules
overwrite theirs (``x = layer(x)``), so a launcher without ``del`` would need more memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mtmc_lsp.codegen.kernel.snippets import filled
from mtmc_lsp.tuning.lifetimes import Lifetime, released

ASSIGNED = re.compile(r"(\w+(?:, \w+)*) = ")
WORD = re.compile(r"\w+")


@dataclass
class _Named(Lifetime):
    """A tensor, and the variables of the tensor and of its views."""

    names: list[str] = field(default_factory=list)


def with_releases(
    lines: Sequence[str], sizes: Mapping[str, float], bases: Mapping[str, str], kept: Collection[str]
) -> list[str]:
    """The statements of a launcher, with ``del`` after the last use of large tensors if that lowers the peak.

    Args:
        sizes: bytes of the tensors by variable, at the sizes of the workload.
        bases: by variable of a view, the variable of the tensor on which it is based.
        kept: variables that the launcher returns.
    """
    statements = _statements(lines)
    dropped: dict[int, list[str]] = {}
    for tensor in released(_tensors(statements, sizes, bases, set(kept))):
        assert isinstance(tensor, _Named)
        dropped.setdefault(tensor.last, []).extend(tensor.names)
    result = []
    for i, statement in enumerate(statements):
        result += statement
        result += [f"del {line.rstrip(',')}" for line in filled(dropped.get(i, []), "")]
    return result


def _statements(lines: Sequence[str]) -> list[list[str]]:
    """The lines of each statement, with the comments before it."""
    statements: list[list[str]] = []
    is_comment = False
    for line in lines:
        if statements and (is_comment or line.startswith((" ", ")", "]", "else:"))):
            statements[-1].append(line)
        else:
            statements.append([line])
        is_comment = line.startswith("#")
    return statements


def _tensors(
    statements: Sequence[Sequence[str]], sizes: Mapping[str, float], bases: Mapping[str, str], kept: Collection[str]
) -> list[_Named]:
    """The tensors that the statements create. Names that only a nested statement assigns do not count."""
    tensors: dict[str, _Named] = {}
    for i, statement in enumerate(statements):
        assigned = [match[1] for line in statement if (match := ASSIGNED.match(line))]
        for name in (name for names in assigned for name in names.split(", ")):
            base = bases.get(name, name)
            if base in tensors:
                tensors[base].names += [name] if name not in tensors[base].names else []
            elif name in sizes and name == base:
                tensors[name] = _Named(sizes[name], i, i, names=[name])
        for word in {word for line in statement for word in WORD.findall(line)}:
            if (tensor := tensors.get(bases.get(word, word))) is not None:
                tensor.last = i
                tensor.is_kept |= word in kept
    return list(tensors.values())
