"""Arguments that contain tensors, in the guard: conditions for their structure, and local variables for their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mtmc_lsp.codegen.kernel.snippets import LINE
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import CapturedArgument, Container, ContainerKind


@dataclass(frozen=True)
class Unpacking:
    """What a guard needs to read the tensors inside its arguments."""

    conditions: tuple[str, ...] = ()
    """Conditions under which the paths of the tensors exist, outer containers first."""
    statements: tuple[str, ...] = ()
    """Assignments of the tensors to local variables."""
    names: dict[str, str] = field(default_factory=dict)
    """The local variable of each graph input that is inside a container."""


def unpacking(graph: Graph, arguments: Sequence[CapturedArgument]) -> Unpacking:
    """How to unpack the arguments of a captured call."""
    conditions: list[str] = []
    statements: list[str] = []
    names: dict[str, str] = {}
    read = {item.name for item in graph.inputs}
    for argument in arguments:
        conditions += _conditions(argument)
        leaves = [leaf for leaf in argument.leaves if leaf is not argument and leaf.input in read]
        names |= {str(leaf.input): str(leaf.input) for leaf in leaves}
        lines = [f"{leaf.input} = {leaf.name}" for leaf in leaves]
        one_line = f"{', '.join(str(leaf.input) for leaf in leaves)} = {', '.join(leaf.name for leaf in leaves)}"
        statements += [one_line] if leaves and len(one_line) <= LINE else lines
    return Unpacking(tuple(conditions), tuple(statements), names)


def _conditions(argument: CapturedArgument) -> Iterator[str]:
    if argument.container is None or not argument.is_structured:
        return
    yield _condition(argument.name, argument.container)
    for item in argument.items:
        yield from _conditions(item)


def _condition(path: str, container: Container) -> str:
    kind, keys = container.kind, list(container.keys)
    if kind in (ContainerKind.POSITIONAL, ContainerKind.KEYWORDS) and not keys:
        return f"not {path}"
    if kind is ContainerKind.POSITIONAL:
        return f"len({path}) == {len(keys)}"
    if kind is ContainerKind.KEYWORDS:
        return f"[*{path}] == {keys}"
    if kind is ContainerKind.DICT:
        # The order of the keys decides the order of the items, if the target iterates over them.
        return f"type({path}) is {container.class_name or 'dict'} and [*{path}] == {keys}"
    if kind is ContainerKind.FIELDS:
        return f"type({path}) is {container.class_name}"
    return f"type({path}) is {kind.value} and len({path}) == {len(keys)}"
