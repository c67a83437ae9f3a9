"""Titles of actions: what a step does, in the names of the user's variables and modules, without line numbers.

A title is stored with its step, and the lines of the file change when steps are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mtmc_lsp.core.graph import PRODUCTS, Graph, InputKind, Node
from mtmc_lsp.ir.primitives import KernelIR

MOST_NAMES = 5
"""Most operations that a title names; of more, it names the first and the last ones."""
WEIGHT = ".weight"
SYMBOLS = ("view", "t", "transpose", "permute", "reshape", "expand", "unsqueeze", "squeeze", "contiguous", "alias")
"""Operations that change no value; a title names them only if there are no others."""


def joined(names: Sequence[str]) -> str:
    """``silu, mul and add``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def operation_names(ir: KernelIR, nodes: Iterable[str]) -> str:
    """The operations of a region: ``self.gate, silu and mul``. A layer of the module has the module's name."""
    named = [ir.graph.node(name) for name in nodes]
    working = [node for node in named if node.word not in SYMBOLS] or named
    names = list(dict.fromkeys(layer_of(ir.graph, node) or node.word for node in working))
    return joined(names if len(names) <= MOST_NAMES else [*names[:2], "...", *names[-2:]])


def layer_of(graph: Graph, node: Node) -> str:
    """The module whose weight a product or convolution reads: ``self.gate``; empty if there is none."""
    if node.word not in PRODUCTS and "conv" not in node.word:
        return ""
    inputs = {item.name: item for item in graph.inputs if item.kind is not InputKind.ARGUMENT}
    weights = [inputs[ref.name].access for ref in node.inputs() if ref.name in inputs]
    return next((access.removesuffix(WEIGHT) for access in weights if access.endswith(WEIGHT)), "")


def result_name(ir: KernelIR, nodes: Collection[str]) -> str:
    """What the last operation of a region computes: ``gated``, ``the result``, ``self.up``; empty if it has no name."""
    graph = ir.graph
    last = max(nodes, key=lambda name: graph.positions.get(name, -1))
    if last not in graph.named:
        return ""
    node = graph.node(last)
    if node.name in graph.backward_nodes:
        return gradient_name(graph, nodes)
    if node.variable:
        return node.variable
    positions = [number for number, ref in enumerate(graph.results, 1) if ref is not None and ref.name == last]
    if positions:
        return "the result" if len(graph.results) == 1 else f"result {positions[0]}"
    return layer_of(graph, node)


def gradient_name(graph: Graph, nodes: Collection[str]) -> str:
    """Which gradients the nodes compute: ``the gradients of x and weight``; ``the backward pass`` if none of them is a result."""
    assert graph.backward is not None
    pairs = zip(graph.gradients, graph.backward.gradients, strict=True)
    access = {item.name: item.access for item in graph.inputs}
    names = [access[name] for ref, name in pairs if ref.name in nodes]
    if not names:
        return "the backward pass"
    if len(names) > MOST_NAMES:
        return f"{len(names)} gradients"
    return f"the gradient{'s' if len(names) > 1 else ''} of {joined(names)}"


def kernel_title(ir: KernelIR, nodes: Collection[str]) -> str:
    """A kernel by what it computes: ``the kernel for gated``, ``the kernel for silu and mul``."""
    return f"the kernel for {result_name(ir, nodes) or operation_names(ir, nodes)}"


def with_result(ir: KernelIR, text: str, nodes: Collection[str]) -> str:
    """``text`` with the name of what the nodes compute, unless it contains it: ``Fuse silu and mul ... for gated``."""
    name = result_name(ir, nodes)
    return text if not name or name in text else f"{text} for {name}"


def computes_everything(graph: Graph, nodes: Collection[str]) -> bool:
    """Whether a region contains every operation of the target that changes a value."""
    return all(node.name in nodes for node in graph.nodes if node.word not in SYMBOLS)
