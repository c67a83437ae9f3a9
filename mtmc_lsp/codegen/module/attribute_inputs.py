"""Tensors in plain attributes of a module, in the guard: they may be missing, or on another device than the arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtmc_lsp.capture.accesses import prefixes, quoted, steps
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind


def may_be_elsewhere(graph: Graph, item: GraphInput) -> bool:
    """Whether the guard moves a tensor to the arguments' device: ``Module.to`` does not move plain attributes."""
    is_updated = any(mutation.input == item.name for mutation in graph.mutations)
    return item.kind is InputKind.ATTRIBUTE and not is_updated and _leader(graph) is not None


def tensor_text(graph: Graph, item: GraphInput, names: Mapping[str, str]) -> str:
    """Python for an input on the device of the arguments. A tensor that is there already stays the same object."""
    leader = _leader(graph)
    if leader is None or not may_be_elsewhere(graph, item):
        return names[item.name]
    return f"{names[item.name]}.to({names[leader.name]}.device)"


def _leader(graph: Graph) -> GraphInput | None:
    """The input whose device counts."""
    return next((item for item in graph.inputs if item.kind is not InputKind.ATTRIBUTE), None)


def attribute_conditions(graph: Graph, names: Mapping[str, str]) -> Iterator[str]:
    """Conditions under which the attribute tensors exist, and the device to which they are moved is known."""
    leader = _leader(graph)
    if leader is not None and any(may_be_elsewhere(graph, item) for item in graph.inputs):
        yield f"isinstance({names[leader.name]}, torch.Tensor)"
    for container in graph.containers:
        text = _optional(container.access)
        kind = "(list, tuple)" if container.keys is None else "dict"
        contents = f"len({container.access}) == {container.length}"
        if container.keys is not None:
            contents = f"[*{container.access}] == [{', '.join(container.keys)}]"
        yield f"isinstance({text}, {kind}) and {contents}"
    for item in graph.inputs:
        if item.kind is InputKind.ATTRIBUTE:
            yield f"isinstance({_optional(item.access)}, torch.Tensor)"


def _optional(access: str) -> str:
    """Python for a path whose attributes may be missing. Items exist, since their container is checked before."""
    text = ""
    for path, step in zip(prefixes(access), [None, *steps(access)], strict=True):
        text = f"getattr({text}, {quoted(str(step.key))}, None)" if step is not None and not step.is_item else path
    return text
