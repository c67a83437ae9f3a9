"""What a call does to tensors that it keeps, as batch norm does in training, and torch does best in place.

A functional graph gives each new value as a tensor of its own, to be copied into the old one at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.graph import Graph, Node, Ref

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
RUNNING = {3: 3, 4: 4}
"""Of the arguments of :data:`BATCH_NORM` and of its results: the running mean and variance, before and after."""


@dataclass(frozen=True)
class Count:
    """A tensor of one integer that grows by the same amount with each call, as a module's number of batches does."""

    input: str
    amount: int


def counts(graph: Graph) -> dict[str, Count]:
    """The nodes that count calls. Nothing else reads the number before or after, so it may be changed at the end.

    No kernel is worth its launch for one number; torch changes many of them in one.
    """
    found = {}
    for mutation in graph.mutations:
        node = graph.named.get(mutation.value.name)
        if node is None or node.op != "aten.add.Tensor" or node.kwargs or len(node.args) != 2:
            continue
        before, amount = node.args
        is_own = before == Ref(mutation.input) and type(amount) is int
        is_number = (
            not node.type.shape
            and node.type.dtype.startswith("int")
            and node.type == graph.type_of(Ref(mutation.input))
        )
        if is_own and is_number and not graph.readers(node.name) and _is_read_once(graph, mutation.input, node):
            assert isinstance(amount, int)
            found[node.name] = Count(mutation.input, amount)
    return found


def running_statistics(graph: Graph, node: Node) -> dict[Ref, str]:
    """Of a batch norm that torch may run in place: its results that are running statistics, and the inputs that they replace.

    Empty where something else wants the old values, or what training saves for its backward pass.
    """
    if node.op != BATCH_NORM:
        return {}
    found = {}
    for argument, result in RUNNING.items():
        before, after = node.args[argument], Ref(node.name, result)
        if not isinstance(before, Ref) or graph.written_inputs.get(after) != before.name or after in graph.outputs:
            return {}
        if not _is_read_once(graph, before.name, node):
            return {}
        found[after] = before.name
    wanted = {ref for reader in graph.readers(node.name) for ref in reader.inputs()} | graph.escaping
    return {} if {Ref(node.name, 1), Ref(node.name, 2)} & wanted else found


def _is_read_once(graph: Graph, name: str, node: Node) -> bool:
    """Whether the node alone reads an input."""
    return graph.readers(name) == (node,) and Ref(name) not in graph.outputs
